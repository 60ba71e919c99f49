"""Rewards over HTTP (`pip install 'leanq[server]'`), from the fleet of LEANQ_URL or `leanq up`.

- OpenRLHF: ``--remote_rm_url http://127.0.0.1:5000/get_reward``, with statements as labels
  (``--label_key statement``).
- NeMo Gym: a resources server at ``http://127.0.0.1:5000``, with rows whose
  ``verifier_metadata`` has the ``statement``.
"""

import sys

from leanq.trainers import LeanReward

try:
    import uvicorn

    from leanq.trainers.reward_server import make_app
except ImportError as error:
    sys.exit(f"{error}: pip install 'leanq[server]'")

if __name__ == "__main__":
    port = int(sys.argv[1]) if sys.argv[1:] else 5000
    score = LeanReward(timeout_s=60.0, tenant="reward")
    uvicorn.run(make_app(score), host="127.0.0.1", port=port)
