"""``leanq try``: what leanq does with a user's Lean, library and texts, on one page."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import click

from leanq import __version__
from leanq.commands import options
from leanq.commands.common import EXIT_INFRASTRUCTURE, EXIT_NOT_ACCEPTED, EXIT_OK, tell
from leanq.commands.doctor import Finding, environment_findings, sandbox_finding
from leanq.commands.submit import lean_files, read_source
from leanq.errors import LeanQError, UsageError
from leanq.fleet.shown import counted, plural, printable
from leanq.lean.environment import Environment, open_environment
from leanq.lean.run.files import library_of
from leanq.lean.run.plain import Said, difference, plain_lean
from leanq.lean.run.toolchain import LEANS_OWN
from leanq.lean.sandbox.sandbox import Limits
from leanq.local import Pool
from leanq.producer.stream import Result

_NAME = "tried"
_MOST_TEXTS = 200
_MADE_TEXTS = 40
_SHOWN = 3
_LONGEST = 600
# Plain Lean begins no text later than this, so that the whole takes some five minutes.
_PLAIN_S = 120.0
_TEXT_S = 120.0
_TEXT_MB = 6000


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A text of which leanq says something else than plain Lean; ``how`` is for people."""

    file: str
    lean: str
    leanq: str
    reason: str | None
    how: str


@dataclass(slots=True)
class Tryout:
    """What was seen.

    Attributes:
        header: in front of each text, if leanq made the texts.
        first_s: seconds from opening the environment to the first verdict.
        texts_per_s: texts a second on all slots, once the environment was in use; plain Lean's is
            ``lean_texts_per_s``, on as many.
        cpu_s: mean CPU seconds of a text, Lean's and the judge's; plain Lean's is ``lean_cpu_s``.
        compared: how many texts plain Lean has read, too.
        differ: the first texts on which the two disagree, of ``differing``.
    """

    leanq: str
    machine: str
    slots: int
    environment: str
    findings: list[Finding]
    texts: int
    header: str = ""
    first_s: float = 0.0
    texts_per_s: float = 0.0
    cpu_s: float = 0.0
    lean_texts_per_s: float = 0.0
    lean_cpu_s: float = 0.0
    verdicts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    differing: int = 0
    differ: list[Disagreement] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def exit_code(self) -> int:
        if self.errors or not all(each.works for each in self.findings):
            return EXIT_INFRASTRUCTURE
        return EXIT_NOT_ACCEPTED if self.differing else EXIT_OK


@click.command("try")
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("files", nargs=-1, metavar="[FILE|FOLDER]...")
@options.lean_program
@click.option("--out", metavar="FILE", help="Write the page to a file, as Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def tryout(
    path: Path, files: Sequence[str], lean: str | None, out: str | None, as_json: bool
) -> int:
    """Try leanq on your Lake project, with your texts.

    PATH is the project, or a folder of .olean files. It says in some five minutes what serves
    there (forks, judge, kernel), how many texts a second it checks beside plain Lean, and the
    first three texts on which leanq and plain Lean disagree. The first 200 files count. Without
    files, it makes texts behind the largest library. Nothing is sent anywhere, and each text runs
    in the sandbox.

    Exit code: 0 if they agree, 1 if they disagree on a text, 3 if leanq cannot serve there.
    """
    environment = open_environment(_NAME, path, lean=lean)
    header = "" if files else header_of(environment)
    texts = lean_texts(files) if files else made_texts(header)
    seen = asyncio.run(_try(environment, path, lean, texts))
    seen.header = header
    lines = [printable(line) for line in _page(seen)]
    if out is not None:
        try:
            Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror}") from None
    tell(as_json, [asdict(seen)], lines)
    return seen.exit_code()


def lean_texts(files: Sequence[str]) -> dict[str, str]:
    """Returns the first texts by file name; raises UsageError if one cannot be read."""
    texts = {}
    for name in islice(lean_files(files), _MOST_TEXTS):
        try:
            texts[name] = read_source(name)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    return texts


def header_of(environment: Environment) -> str:
    """Returns the import of the environment's largest library, else of Std; "" with neither."""
    sizes = Counter(map(library_of, environment.seen))
    names = [name for name, _ in sizes.most_common() if name not in LEANS_OWN]
    for name in (*names, "Std"):
        if environment.find_olean(name):
            # Without `prelude`, Lean also looks for its own Init.
            prelude = "" if environment.find_olean("Init") else "prelude\n"
            return f"{prelude}import {name}\n"
    return ""


def made_texts(header: str) -> dict[str, str]:
    """Returns small texts behind a header. Every other one has an error, since most texts of a
    rollout do."""
    texts = {}
    for number in range(_MADE_TEXTS):
        proof = "And.intro hq hp" if number % 2 else "And.intro hp hq"
        texts[f"made {number}"] = (
            f"{header}theorem first_{number} (p : Prop) (hp : p) : p := hp\n"
            f"theorem second_{number} (p q : Prop) (hp : p) (hq : q) : And q p := {proof}\n"
        )
    return texts


async def _try(
    environment: Environment, path: Path, lean: str | None, texts: dict[str, str]
) -> Tryout:
    slots = len(os.sched_getaffinity(0))
    seen = Tryout(
        __version__,
        f"{slots} CPUs, {platform.system()} {platform.release()}, {platform.machine()}, "
        f"Python {platform.python_version()}",
        slots,
        str(environment),
        [await sandbox_finding(), *await environment_findings(environment)],
        len(texts),
    )
    if not all(each.works for each in seen.findings):
        return seen
    said = await _plain(seen, environment, texts)
    results = await asyncio.to_thread(_checked, seen, path, lean, texts)
    _compare(seen, texts, said, results)
    return seen


async def _plain(
    seen: Tryout, environment: Environment, texts: dict[str, str]
) -> dict[str, Said | None]:
    """Has plain Lean read the texts, as many as it can in time."""
    limits = Limits(_TEXT_S, 2 * _TEXT_S, _TEXT_MB << 20)
    began_s, said = time.monotonic(), dict[str, Said | None]()
    async with plain_lean(environment, seen.slots) as plain:

        async def read(name: str, text: str) -> None:
            async with gate:
                if time.monotonic() < began_s + _PLAIN_S:
                    said[name] = await plain.read(text, limits)

        gate = asyncio.Semaphore(seen.slots)
        await asyncio.gather(*(read(*each) for each in texts.items()))
    known = [each for each in said.values() if each]
    seen.lean_texts_per_s = len(said) / (time.monotonic() - began_s)
    seen.lean_cpu_s = sum(each.cpu_s for each in known) / max(1, len(known))
    return said


def _checked(seen: Tryout, path: Path, lean: str | None, texts: dict[str, str]) -> list[Result]:
    """Checks the texts twice: the first time finds what a fresh worker waits for."""
    began_s = time.monotonic()
    with Pool({_NAME: path}, lean=lean) as pool:
        first, results = True, []
        how: dict[str, Any] = {"env": _NAME, "timeout_s": _TEXT_S, "memory_mb": _TEXT_MB}
        for result in pool.map(texts.values(), **how):
            if first:
                first, seen.first_s = False, time.monotonic() - began_s
            results.append(result)
        began_s = time.monotonic()
        again = [result.reply for result in pool.map(texts.values(), **how)]
        seen.texts_per_s = len(again) / (time.monotonic() - began_s)
    replies = [reply for reply in again if reply]
    seen.cpu_s = sum(reply.cpu_s for reply in replies) / max(1, len(replies))
    return results


def _compare(
    seen: Tryout,
    texts: dict[str, str],
    said: dict[str, Said | None],
    results: Sequence[Result],
) -> None:
    verdicts, reasons = Counter[str](), Counter[str]()
    for name, result in zip(texts, results, strict=True):
        reply = result.reply
        if isinstance(result.error, LeanQError) or reply is None:
            seen.errors.append(f"{name}: {result.error}")
            continue
        verdicts[str(reply.verdict)] += 1
        reasons.update(filter(None, [reply.reason]))
        if (lean := said.get(name)) is None:
            continue
        seen.compared += 1
        how = difference(lean.messages, reply)
        if lean.verdict != reply.verdict:
            ours = [each.text for each in reply.messages if each.is_ours]
            how = (ours or [how])[-1]
        if how or lean.verdict != reply.verdict:
            seen.differing += 1
            if len(seen.differ) < _SHOWN:
                told = str(lean.verdict), str(reply.verdict), reply.reason
                seen.differ.append(Disagreement(name, *told, how[:_LONGEST]))
    seen.verdicts, seen.reasons = dict(verdicts), dict(reasons)


def _page(seen: Tryout) -> Iterator[str]:
    """Yields the lines of the page, in Markdown."""
    yield f"# leanq {seen.leanq} with {seen.environment}"
    yield ""
    yield f"{seen.machine}."
    yield ""
    yield "| part | | |"
    yield "| --- | --- | --- |"
    for each in seen.findings:
        state = "FAILED" if not each.works else "slower or weaker" if each.warns else "works"
        yield f"| {each.what} | {state} | {each.text.replace('|', '/')} |"
    if not seen.verdicts and not seen.errors:
        return
    yield ""
    yield "| | leanq | plain Lean |"
    yield "| --- | --- | --- |"
    rates = seen.texts_per_s, seen.lean_texts_per_s
    yield "| texts a second, all CPUs | {:.2f} | {:.2f} |".format(*rates)
    yield "| texts a second and CPU | {:.2f} | {:.2f} |".format(*(r / seen.slots for r in rates))
    yield f"| CPU seconds a text | {seen.cpu_s:.3f} | {seen.lean_cpu_s:.3f} |"
    yield f"| seconds to the first verdict | {seen.first_s:.1f} | |"
    yield ""
    what = f"your {plural(seen.texts, 'text')}"
    if seen.header:
        header = " ".join(seen.header.split())
        what = f"{plural(seen.texts, 'text')} that leanq made behind `{header}`"
    reasons = f" ({counted(seen.reasons)})" if seen.reasons else ""
    yield f"Of {what}: {counted(seen.verdicts)}{reasons}."
    yield from (f"Without a verdict: {each}" for each in seen.errors[:_SHOWN])
    yield ""
    if not seen.differing:
        yield f"Plain Lean read {seen.compared:,} of them and agrees on each, word for word."
        return
    yield f"Plain Lean read {seen.compared:,} of them and disagrees on {seen.differing:,}:"
    for text in seen.differ:
        reason = f" ({text.reason})" if text.reason else ""
        yield f"- {text.file}: Lean {text.lean}, leanq {text.leanq}{reason}: {text.how}"
