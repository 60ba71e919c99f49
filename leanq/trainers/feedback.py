"""Tells a model in its next turn what Lean said about its candidate."""

from __future__ import annotations

from collections.abc import Iterator

from leanq.queue.requests import Reply

_MOST_MESSAGES = 8


def feedback(reply: Reply, *, max_characters: int = 4000) -> str:
    """Returns the verdict, its reason, the first errors with their places, and the goals that are
    left.

    Examples:
        >>> from leanq import Sorry
        >>> print(feedback(Reply("incomplete", sorries=(Sorry(2, 2, "p : Prop\\n⊢ p"),))))
        Lean says: incomplete.
        Goal at line 2, column 2:
        p : Prop
        ⊢ p

    Args:
        max_characters: the length at which the text is cut.
    """
    return shortened("\n".join(_lines(reply)), max_characters)


def shortened(text: str, most: int = 4000) -> str:
    """Returns a text that fills little of a model's context, and says how much was cut."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def _lines(reply: Reply) -> Iterator[str]:
    reason = f" ({reply.reason})" if reply.reason else ""
    yield f"Lean says: {reply.verdict}{reason}."
    for failure in reply.failed:
        yield f"{failure.name}: {failure.text}"
    errors = [message for message in reply.messages if message.severity == "error"]
    for message in errors[:_MOST_MESSAGES]:
        yield f"Line {message.line}, column {message.column}: {message.text}"
    if len(errors) > _MOST_MESSAGES:
        yield f"… and {len(errors) - _MOST_MESSAGES} more errors."
    for sorry in reply.sorries:
        if sorry.goal:
            yield f"Goal at line {sorry.line}, column {sorry.column}:\n{sorry.goal}"
