"""GRPO with Lean's verdicts as rewards (`pip install 'leanq[trl]'`), on the fleet of LEANQ_URL.

    python examples/trl_grpo.py problems.jsonl MODEL OUTPUT

Each row of problems.jsonl has a ``statement``: Lean text with ``sorry`` for the proof.
"""

import sys

try:
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"{error}: pip install 'leanq[trl]'")

from leanq.trainers import LeanReward, proof_text


def train(problems: str, model: str, output: str, **settings: object) -> GRPOTrainer:
    """Trains ``model`` and leaves it in ``output``."""
    data = load_dataset("json", data_files=problems, split="train")
    data = data.map(lambda row: {"prompt": row["statement"].removesuffix("sorry")})
    # For models that write whole texts, leave `extract` out.
    reward = LeanReward(extract=proof_text, timeout_s=60.0, tenant="grpo")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=output, **settings),
        train_dataset=data,
    )
    trainer.train()
    reward.close()
    trainer.save_model(output)
    return trainer


if __name__ == "__main__":
    train(*sys.argv[1:4])
