"""Tells from data whether Lean has read a text to its end.

``#exit`` and some other words end a text early, and Lean then skips the rest. So a declaration of
ours is compiled behind the text, and has to be in the result. A namespace of its own keeps the text
from taking it over: an open attribute, doc comment or ``… in`` at its end would be an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from leanq.queue.requests import Message


@dataclass(frozen=True, slots=True)
class Ended:
    """A text with the declaration behind it.

    Attributes:
        code: the text alone.
        text: the text to compile.
        name: the last parts of the declaration's name.
    """

    code: str
    text: str
    name: tuple[str, str]

    @classmethod
    def of(cls, code: str) -> Ended:
        """Adds a declaration whose name the text cannot know, and that no notation of the text can
        have taken."""
        word = f"leanqEnd{secrets.token_hex(8)}"
        text = f"{code}\nnamespace {word}\naxiom is{word} : Prop\nend {word}\n"
        return cls(code, text, (word, f"is{word}"))

    def own(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Returns those of Lean's messages that are about the text itself. None reaches behind its
        end, as one would that ends where the next word begins."""
        lines = self.code.split("\n")
        end = (len(lines), len(lines[-1]))
        found = []
        for each in messages:
            if self._is_behind(each):
                continue
            if each.end_line is not None and (each.end_line, each.end_column or 0) > end:
                found.append(replace(each, end_line=end[0], end_column=end[1]))
            else:
                found.append(each)
        return tuple(found)

    def is_involved(self, messages: Sequence[Message]) -> bool:
        """Returns whether an error may be about the declaration behind the text, or be worded after
        it."""
        return any(
            message.severity == "error"
            and (
                self._is_behind(message)
                or "'namespace'" in message.text
                or self.name[0] in message.text
            )
            for message in messages
        )

    def _is_behind(self, message: Message) -> bool:
        return message.line > self.code.count("\n") + 1
