"""Compiled files for tests: by real Lean, and images that Lean never writes."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path
from typing import Any

from leanq.lean.environment import Environment


class Lean:
    """Real Lean: what is written to ``folder`` can be imported as well."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.environment, self.folder = environment, folder

    def find_olean(self, module: str) -> Path | None:
        path = self.folder / f"{module}.olean"
        return path if path.exists() else self.environment.find_olean(module)

    def run(self, source: str, *, name: str = "Candidate", folder: Path | None = None) -> list[Any]:
        """Compiles to ``NAME.olean`` and returns Lean's messages."""
        where = folder or self.folder
        where.joinpath(f"{name}.lean").write_text(source)
        variables = self.environment.process_env()
        variables["LEAN_PATH"] += f":{self.folder}"
        command = [*self.environment.toolchain.command, "--json", "-o", f"{name}.olean"]
        done = subprocess.run(
            [*command, f"{name}.lean"],
            cwd=where,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=60,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    def compile(self, source: str, *, name: str = "Candidate", folder: Path | None = None) -> Path:
        """Compiles what must compile."""
        messages = self.run(source, name=name, folder=folder)
        errors = [each["data"] for each in messages if each["severity"] == "error"]
        assert not errors, errors
        return (folder or self.folder) / f"{name}.olean"


class Image:
    """Writes memory images, so that we can read what no Lean at hand writes."""

    BASE = 0x123456780000
    V1 = b"olean\x01" + bytes(42)
    V2 = b"olean\x02\x01" + bytes(33 + 40)

    def __init__(self, magic: bytes = V2) -> None:
        self.data = bytearray(magic + struct.pack("<Q", self.BASE) + bytes(8))

    def put(self, tag: int, fields: int, size: int, body: bytes) -> int:
        address = self.BASE + len(self.data)
        self.data += struct.pack("<iHBB", 0, size, fields, tag) + body + bytes(-len(body) % 8)
        return address

    def object(self, tag: int, *fields: int, scalars: bytes = b"") -> int:
        body = struct.pack(f"<{len(fields)}Q", *fields) + scalars
        return self.put(tag, len(fields), 8 + len(body) + -len(body) % 8, body)

    def array(self, *items: int) -> int:
        body = struct.pack(f"<{len(items) + 2}Q", len(items), len(items), *items)
        return self.put(246, 0, 1, body)

    def string(self, text: bytes) -> int:
        body = struct.pack("<3Q", len(text) + 1, len(text) + 1, len(text)) + text + b"\0"
        return self.put(249, 0, 1, body)

    def name(self, *parts: str | int) -> int:
        address = 1
        for part in parts:
            is_text = isinstance(part, str)
            last = self.string(part.encode()) if isinstance(part, str) else 2 * part + 1
            address = self.object(1 if is_text else 2, address, last, scalars=bytes(8))
        return address

    def const(self, name: int) -> int:
        return self.object(4, name, 1, scalars=bytes(8))

    def app(self, function: int, argument: int) -> int:
        return self.object(5, function, argument, scalars=bytes(8))

    def axiom(self, name: int, type_: int) -> int:
        head = self.object(0, name, 1, type_)
        return self.object(0, self.object(0, head, scalars=bytes(8)))

    def write(
        self,
        path: Path,
        constants: dict[int, int],
        *,
        imports: tuple[str, ...] = (),
        scalars: bytes = bytes(8),
    ) -> Path:
        """The constants by the addresses of their names; without scalars as before modules."""
        empty = self.array()
        imported = self.array(
            *(self.object(0, self.name(module), scalars=bytes(8)) for module in imports)
        )
        names, infos = self.array(*constants), self.array(*constants.values())
        root = self.object(0, imported, names, infos, empty, empty, scalars=scalars)
        start = self.data.index(struct.pack("<Q", self.BASE)) + 8
        self.data[start : start + 8] = struct.pack("<Q", root)
        path.write_bytes(self.data)
        return path
