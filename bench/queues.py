"""The tests' object with the calls of all three roles; benchmarks play client and worker, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.queue.queues import Queue as Queue
