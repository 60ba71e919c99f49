"""An OpenEnv server over a fleet (`pip install 'leanq[openenv]'`): reset, step by tactic, state.

The fleet is that of LEANQ_URL or `leanq up`. Trainers connect with OpenEnv's own client:

    async with GenericEnvClient(base_url="http://127.0.0.1:8000") as env:
        seen = await env.reset(index=0)
        seen = await env.step({"tactic": "constructor"})
"""

import sys

from leanq import LeanQClient

try:
    import uvicorn

    from leanq.trainers.openenv_server import make_app
except ImportError as error:
    sys.exit(f"{error}: pip install 'leanq[openenv]'")

PROBLEMS = [
    "theorem and_swap (p q : Prop) (h : And p q) : And q p := sorry",
    "theorem compose (p q r : Prop) (f : p → q) (g : q → r) : p → r := sorry",
]

if __name__ == "__main__":
    port = int(sys.argv[1]) if sys.argv[1:] else 8000
    with LeanQClient() as lean:
        uvicorn.run(make_app(lean, PROBLEMS, timeout_s=30), host="127.0.0.1", port=port)
