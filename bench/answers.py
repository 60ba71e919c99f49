"""Measures what a reward pays to read a model's answer, and whether hostile ones cost more; see
README.md.

A growth of 4 is linear: it is the time for an answer of 240,000 characters beside one of 60,000.
"""

from __future__ import annotations

import time

from leanq.lean.goals.completions import candidates_of

_STATEMENT = "namespace A\ntheorem t (p q : Prop) (h : And p q) : And q p := by\n  sorry\nend A\n"
_SHORT_CHARS, _TIMES, _ROUNDS = 60_000, 4, 3
_STEP = "  have h1 : 2 * x = x + x := by\n    nlinarith [sq_nonneg (x - 1)]\n"
_LIKELY = (
    f"<think>Let me see.</think>\n### Proof\n```lean4\ntheorem t := by\n{_STEP * 40}```\nDone."
)
# What hostile answers repeat.
_PIECES = (
    *("\n", "\t", "<think>", "<think>a</think>", "</think>", "<|a|>", "<|message|>", "<a>\n"),
    *("```\n", "```lean\n", "```x``` ", "`", "~~~\n", "> ", "> ```\n", "\\boxed{", "{", "[", '"'),
    *("theorem t : p := h\n", "theorem t : p := sorry\n", "```\ntheorem t : p := h\n```\n", "a."),
    *("```lean\nexact h\n```\n", "namespace a\n", "section\nend\n", "@[simp] ", "/-- a -/\n"),
    *("open a in\n", "/-", "-/", "This is it.\n", "A a ", "- a\n", ":= ", "by ", "(", "simp\n"),
    *("⊢ a\n", "r#", "'", "«", "```lean\nlemma a : p := b\n```\n"),
)


def _least_s(answer: str) -> float:
    """Returns the least CPU time, since other programs can only make a call slower."""
    spent = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        candidates_of(_STATEMENT, answer)
        spent.append(time.process_time() - began)
    return min(spent)


def main() -> None:
    likely_ms = _least_s(_LIKELY) * 1e3
    print(f"an answer of {len(_LIKELY):,} characters: {likely_ms:.1f} ms\n")
    print("| repeated | 60,000 characters | growth |\n| --- | --- | --- |")
    for piece in _PIECES:
        count = _SHORT_CHARS // len(piece)
        short_s, long_s = _least_s(piece * count), _least_s(piece * count * _TIMES)
        print(f"| `{piece!r}` | {short_s * 1e3:.0f} ms | {long_s / short_s:.1f} |")


if __name__ == "__main__":
    main()
