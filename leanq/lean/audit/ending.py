"""Whether Lean has read a text to its end, as data.

After ``#exit``, or whatever else ends a text early, Lean takes a file and has not read the rest. So
what is compiled is the text with a declaration of ours behind it, and that must be in the result.
It stands in a namespace of its own, so that nothing the text leaves open (an attribute, a doc
comment, ``… in``) can take it for its own and come to stand where it could not end.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from leanq.queue.requests import Message


@dataclass(frozen=True, slots=True)
class Ended:
    """A text with the declaration behind it.

    Attributes:
        code: the text alone.
        text: what is compiled.
        name: the last parts of the declaration's name.
    """

    code: str
    text: str
    name: tuple[str, str]

    @classmethod
    def of(cls, code: str) -> Ended:
        """With a name that the text cannot know, and no notation of its can have taken."""
        word = f"leanqEnd{secrets.token_hex(8)}"
        text = f"{code}\nnamespace {word}\naxiom is{word} : Prop\nend {word}\n"
        return cls(code, text, (word, f"is{word}"))

    def own(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Those of Lean's messages that are about the text itself."""
        return tuple(message for message in messages if not self._is_behind(message))

    def is_involved(self, messages: Sequence[Message]) -> bool:
        """Whether an error may be about what stands behind the text, or be worded after it."""
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
