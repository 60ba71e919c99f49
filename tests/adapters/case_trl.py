"""TRL: two training steps of GRPO on the CPU, with a model of three letters made here."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from pathlib import Path

import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl_grpo import train

from adapters.cheats import CHEATING_PROOFS, CHEATS, HONEST, PROOF, STATEMENT, directly
from leanq.errors import StalledError
from leanq.trainers import LeanReward, proof_text
from leanq.trainers.testing import FakeLeanQClient

COUNT = 96


def tiny_model(folder: Path) -> None:
    """A random model that writes one of two letters, of which one is a proof."""
    letters = ["<pad>", "<eos>", "h", "k"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(letters),
            num_attention_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
            **shape,
        )
    ).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)


def main(folder: Path) -> None:
    model = folder / "model"
    tiny_model(model)
    rows = ({"statement": f"theorem t{n} (p : Prop) (h : p) : p := sorry"} for n in range(8))
    problems = folder / "problems.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = train(
        str(problems),
        str(model),
        str(folder / "out"),
        max_steps=2,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=1,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        seed=1,
    )
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == 2
    for step in steps:
        # The letter h is a proof, and nothing else that this model can write.
        assert step["reward"] == step["lean/accepted"], step
        assert step["lean/no_reward"] == 0.0, step
    assert any(0 < step["reward"] < 1 for step in steps), steps
    assert any(step["grad_norm"] > 0 for step in steps), steps

    # Missing rewards are nan in the trainer's own tensor.
    fake = FakeLeanQClient()
    fake.fleet.on("slow", "timeout")
    trainer.reward_funcs[0] = LeanReward(fake)
    inputs = [{"prompt": "", "statement": STATEMENT}] * 2
    # The one method that makes a tensor of rewards.
    rewarded = trainer._calculate_rewards  # noqa: SLF001
    found = rewarded(inputs, [""] * 2, ["slow", "fine"], [[0]] * 2)
    assert math.isnan(found[0, 0]), found
    assert found[1, 0] == 1.0, found
    # A fleet that stalls ends the training.
    fake.fleet.on("stalls", delay_s=60)
    trainer.reward_funcs[0] = LeanReward(fake, stall_s=0.2)
    with pytest.raises(StalledError):
        rewarded(inputs, [""] * 2, ["stalls", "fine"], [[0]] * 2)
    fake.close()

    def rewards(score: LeanReward, texts: list[str]) -> list[float | None]:
        return asyncio.run(score(completions=texts, statement=[STATEMENT] * len(texts)))

    whole, proofs = LeanReward(), LeanReward(extract=proof_text)
    assert rewards(whole, list(HONEST.values())) == [1.0] * len(HONEST)
    cheated = dict(zip(CHEATS, rewards(whole, list(CHEATS.values())), strict=True))
    assert cheated == dict.fromkeys(CHEATS, 0.0), cheated
    found = rewards(proofs, list(CHEATING_PROOFS.values()))
    cheated = dict(zip(CHEATING_PROOFS, found, strict=True))
    assert cheated == dict.fromkeys(CHEATING_PROOFS, 0.0), cheated
    direct = directly(COUNT)
    began = time.monotonic()
    assert rewards(proofs, [f"{PROOF} /- {n} -/" for n in range(COUNT)]) == [1.0] * COUNT
    rate = COUNT / (time.monotonic() - began)
    whole.close()
    proofs.close()
    print(json.dumps({"version": trl.__version__, "per_s": rate, "direct_per_s": direct}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
