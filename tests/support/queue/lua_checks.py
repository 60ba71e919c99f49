"""What tests add to the queue's scripts, whose texts and names stay their own.

Each script of a test's process refuses to send a number to the server that some server reads as no
integer, or writes otherwise than it was: a fraction, one of 2⁵³ or more, or ``-0``.

With ``pytest --branches FOLDER`` each script also notes which of its branches ran. ``python -m
support.queue.lua_checks FOLDER`` (in ``tests/``) shows those of no script and no test.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import redis

from leanq.queue import connection
from leanq.queue.scripts import Library, library_of

# A library has another `redis` while it is loaded than when it is called.
_CHECKS = r"""
local checked
local function checked_redis()
  local server = redis
  checked = checked or setmetatable({}, {__index = function(_, name)
    local found = server[name]
    if name ~= 'call' and name ~= 'pcall' then return found end
    return function(...)
      for _, value in ipairs({...}) do
        local text = type(value) == 'number' and string.format('%.17g', value) or value
        if text ~= value and (value % 1 ~= 0 or math.abs(value) >= 2 ^ 53)
          or string.find(text, '^%(?%-0$') or string.find(text, '^%(?%-?%d[%d.]*e[+-]%d+$') then
          error({err = 'ERR ' .. (...) .. ' gets ' .. text .. ', which not every server reads'})
        end
      end
      return found(...)
    end
  end})
  return checked
end
local redis = redis
"""
_MAIN = "local function main(KEYS, ARGV)\n"


@cache
def _checking(script: str) -> Library:
    library = library_of(script)
    head, _, rest = library.text.partition("\n")
    assert _MAIN in rest
    rest = rest.replace(_MAIN, f"{_MAIN}redis = checked_redis()\n")
    return Library(library.function, f"{head}\n{_CHECKS}{rest}")


def check_numbers() -> None:
    """Has the libraries that this process loads check the numbers that they send."""
    connection.library_of = _checking  # type: ignore[assignment]


# Branches

_TOKEN = re.compile(
    r"--\[\[.*?\]\]|--[^\n]*|\[\[.*?\]\]|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\w+|.", re.DOTALL
)
_LUA = resources.files("leanq.queue") / "lua"
_NOTES = "local hits = {} local function HIT(n) hits[n] = true return true end\n"
_BLOCKS = {"if", "function", "do", "repeat"}


def _with_notes(text: str) -> tuple[str, list[tuple[int, str]]]:
    """Returns the text whose branches note that they ran, and each branch's place and kind."""
    out: list[str] = []
    branches: list[tuple[int, str]] = []
    blocks: list[list[Any]] = []

    def note(kind: str) -> str:
        branches.append((found.start(), kind))
        return f" HIT({len(branches)})"

    depth = None
    for found in _TOKEN.finditer(text):
        word = found[0]
        if word in ("end", "until"):
            kind, has_else, at = blocks.pop()
            if kind == "if" and not has_else:
                branches.append((at, "no branch of this if"))
                out.append(f" else HIT({len(branches)}) ")
        out.append(word)
        if word in _BLOCKS:
            blocks.append([word, False, found.start()])
        if word == "function":
            depth = 0
        elif depth is not None and word in "()":
            depth += 1 if word == "(" else -1
            if depth == 0:
                out.append(note("function") + ";")
                depth = None
        if word in ("then", "do", "repeat"):
            out.append(note(word) + ";")
        elif word == "else":
            blocks[-1][1] = True
            out.append(note(word) + ";")
        elif word in ("and", "or"):
            out.append(note(word) + " and")
    return "".join(out), branches


@cache
def _noting(script: str) -> tuple[Library, list[tuple[str, int, str] | None]]:
    """Returns the library that notes its branches, and for each its file, line and kind."""
    library = _checking(script)
    head, _, rest = library.text.partition("\n")
    text, branches = _with_notes(rest)
    shown = (
        f"\nredis.register_function{{function_name = '{library.function}_hits',"
        " flags = {'no-writes', 'allow-oom', 'allow-stale'}, callback = function() local found = {}"
        " for n in pairs(hits) do found[#found + 1] = n end return found end}"
    )
    files = dict[str, tuple[int, str]]()
    for file in (*_LUA.iterdir(), *(_LUA / "parts").iterdir()):
        if file.name.endswith(".lua"):
            source = file.read_text()
            body = source.partition("\n")[2] if source.startswith("#!") else source
            if (start := rest.find(body)) >= 0:
                # A part may have the name of a script.
                folder = "" if source.startswith("#!") else "parts/"
                files[folder + file.name] = start, body
    places = list[tuple[str, int, str] | None]()
    for at, kind in branches:
        inside = (
            (name, body.count("\n", 0, at - start) + (1 if "/" in name else 2), kind)
            for name, (start, body) in files.items()
            if start <= at < start + len(body)
        )
        places.append(next(inside, None))
    return Library(library.function, f"{head}\n{_NOTES}{text}{shown}"), places


_noted: dict[str, list[tuple[str, int, str] | None]] = {}
_folders: list[Path] = []


def note_branches(folder: Path) -> None:
    """Has all libraries that this process loads note their branches, to be written there."""
    _folders.append(folder)

    def noting(script: str) -> Library:
        library, places = _noting(script)
        _noted[library.function] = places
        return library

    connection.library_of = noting  # type: ignore[assignment]


def write_branches(url: str) -> None:
    """Writes which branches ran on the server, and which there are, if they were noted."""
    for folder in _folders:
        # A server may be gone, or let no such user in.
        with contextlib.suppress(redis.RedisError):
            _write(folder, url)


def _write(folder: Path, url: str) -> None:
    ran = set[tuple[int, tuple[str, int, str]]]()
    there = set[tuple[int, tuple[str, int, str]]]()
    with redis.Redis.from_url(url) as server:
        for function, places in _noted.items():
            # Several branches of one line and kind count by their order.
            numbered = [*_numbered(places)]
            there |= {each for each in numbered if each}
            try:
                hits = server.execute_command("FCALL", f"{function}_hits", 0)
            except redis.ResponseError:
                continue
            ran |= {each for n in hits if (each := numbered[n - 1])}
    folder.mkdir(parents=True, exist_ok=True)
    found = {"ran": sorted(ran), "there": sorted(there)}
    (folder / f"{secrets.token_hex(8)}.json").write_text(json.dumps(found))


def _numbered(
    places: list[tuple[str, int, str] | None],
) -> Iterator[tuple[int, tuple[str, int, str]] | None]:
    seen = dict[tuple[str, int, str], int]()
    for place in places:
        if place is None:
            yield None
        else:
            seen[place] = seen.get(place, 0) + 1
            yield seen[place], place


def main() -> int:
    ran, there = set[Any](), set[Any]()
    for file in Path(sys.argv[1]).glob("*.json"):
        found = json.loads(file.read_text())
        ran |= {(n, *place) for n, place in found["ran"]}
        there |= {(n, *place) for n, place in found["there"]}
    for n, name, line, kind in sorted(there - ran, key=lambda each: each[1:]):
        print(
            f"{name}:{line}: {kind} {n}: {(_LUA / name).read_text().splitlines()[line - 1].strip()}"
        )
    print(f"{len(ran)} of {len(there)} branches ran")
    return 1 if there - ran else 0


if __name__ == "__main__":
    raise SystemExit(main())
