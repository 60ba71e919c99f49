"""Where things lie in the checkout."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SUPPORT = TESTS / "support"
SAMPLES = TESTS / "samples"
# Recorded dialogues with the real REPL, which lie beside the checkout or where the user says.
TRANSCRIPTS = Path(
    os.environ.get("LEANQ_TRANSCRIPTS", ROOT.parent / "shared" / "repl-transcripts")
).resolve()
