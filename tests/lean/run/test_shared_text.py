"""Lean's code in huge pages is the same code, at the same place and with the same rights."""

from __future__ import annotations

import json
import subprocess
import sys

from leanq.lean.run.toolchain import wheel_libraries

_PROGRAM = """
import ctypes, hashlib, json, os, re, sys
from leanq.lean.run.preloaded import share_text
libraries = [os.path.realpath(each) for each in sys.argv[1:]]
for each in libraries:
    ctypes.CDLL(each, mode=ctypes.RTLD_GLOBAL)
lean = ctypes.CDLL(None)
lean.lean_mk_string.restype = ctypes.c_void_p
def largest():
    smaps = open("/proc/self/smaps").read()
    pattern = r"^(\\w+)-(\\w+) r-xp \\S+ \\S+ \\d+ *(.*)$(?s:.*?)AnonHugePages: *(\\d+) kB"
    found = re.findall(pattern, smaps, re.M)
    sizes = [(int(last, 16) - int(first, 16), int(first, 16), path, int(huge) << 10)
             for first, last, path, huge in found]
    size, first, path, huge_bytes = max(sizes)
    code = hashlib.sha256(ctypes.string_at(first, size)).hexdigest()
    text = ctypes.string_at(lean.lean_mk_string(b"words") + 32).decode()
    return {"where": [first, size], "does": [code, text], "path": path, "huge_bytes": huge_bytes}
before = largest()
share_text(libraries)
print(json.dumps([before, largest()]))
"""


def test_the_code_stays_what_it_is() -> None:
    libraries = [str(each) for each in wheel_libraries()]
    command = [sys.executable, "-c", _PROGRAM, *libraries]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    before, after = json.loads(done.stdout)
    assert before["path"].endswith("libleanshared.so")
    assert before["huge_bytes"] == 0
    for each in ("where", "does"):
        assert after[each] == before[each]
    # All of it but the ends; or nothing, if the machine has no huge pages now.
    size = after["where"][1]
    assert after["huge_bytes"] > size - (4 << 20) if not after["path"] else after == before
