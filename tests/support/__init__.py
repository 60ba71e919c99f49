"""What tests share: servers, fleets, stand-ins, models, checkers."""

import pytest

# Failures of its rules show values, as those of tests do.
pytest.register_assert_rewrite("support.queue.queue_machine")
