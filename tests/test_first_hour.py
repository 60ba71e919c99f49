"""Every step of the page "Your first hour" works as the page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT
from support.waiting import eventually

PAGE = ROOT / "docs" / "first-hour.md"
STEP_S = 120.0


def blocks() -> Iterator[tuple[str, str, str]]:
    """The page's fenced blocks: the file that the words before it name, language, text."""
    page = PAGE.read_text()
    end = 0
    for match in re.finditer(r"(?ms)^```(\w+)\n(.*?)^```$", page):
        named = re.findall(r"[Ss]ave [\w ]*\sas\s`([\w.]+)`", page[end : match.start()])
        yield (named[-1] if named else ""), match[1], match[2]
        end = match.end()


def pattern(expected: str) -> str:
    return ".*".join(map(re.escape, expected.split("…")))


class Reader:
    """Does what the page says, in a folder of its own."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self._folder = folder
        self._environ = environ
        self._background: list[subprocess.Popen[str]] = []

    def save(self, name: str, text: str) -> None:
        assert name, f"the page does not say under which name this is saved: {text}"
        (self._folder / name).write_text(text)

    def run(self, commands: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", commands],
            cwd=self._folder,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        assert done.returncode == 0, (commands, done.stdout, done.stderr)
        return done.stdout

    def start(self, command: str) -> Path:
        """Starts a command that stays, and returns the file that has what it prints."""
        log = self._folder / "background.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self._folder,
                env=self._environ,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._background.append(process)
        return log

    def close(self) -> None:
        for process in self._background:
            process.send_signal(signal.SIGINT)
            process.wait(STEP_S)


@pytest.fixture
def reader(tmp_path: Path, cache: Path) -> Iterator[Reader]:
    home = tmp_path / "home"
    home.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LEANQ_")}
    environ |= {
        "HOME": str(home),
        "LEANQ_CACHE": str(cache),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    reader = Reader(tmp_path, environ)
    yield reader
    reader.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_newcomer_gets_through_the_page(reader: Reader) -> None:
    printed = ""
    steps = 0
    for name, language, text in blocks():
        match language:
            case "lean" | "python":
                reader.save(name, text)
            case "sh" if "terminal of its own" in text:
                log = reader.start(text.partition("#")[0].strip())
                await eventually(lambda log=log: "leanq is up" in log.read_text(), STEP_S)
            case "sh":
                printed = reader.run(text)
                steps += 1
            case "text":
                assert re.fullmatch(pattern(text.strip()), printed.strip(), re.DOTALL), printed
            case "console":
                # Installing is what `make demo` does in an environment of its own.
                assert "pip install" in text
            case _:
                pytest.fail(f"the page has a block of another kind: {language}")
    assert steps >= 9
