"""Lean's language server, with real Lean: what it says, whom it serves, and what ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from support.lean.sandboxes import marked
from support.lean.sites import Site, check
from support.waiting import eventually

from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.lean.outcome import Printed
from leanq.lean.run.documents import DocumentRules, Key
from leanq.lean.sandbox.sandbox import Limits
from leanq.queue.metrics import COUNTS
from leanq.queue.requests import Reply, Request

HEAD = "prelude\nimport Core\n"
WRONG = f"{HEAD}theorem t (p q : Prop) (h : p) : q := h\n"
RIGHT = f"{HEAD}theorem t (p : Prop) (h : p) : p := h\n"
ALWAYS = DocumentRules(served_from=1, compare_every=0)


def read() -> float:
    return COUNTS["leanq_language_server_total", "read"]


def started() -> float:
    return COUNTS["leanq_language_server_total", "started"]


async def server(site: Site, rules: DocumentRules = ALWAYS) -> LeanDriver:
    return await site.driver(forks=None, documents=rules)


def words(reply: Reply) -> tuple[object, ...]:
    return reply.verdict, reply.reason, reply.messages, reply.theorems


async def test_one_process_rejects_text_after_text_as_lean_does(site: Site) -> None:
    driver, plain = (
        await server(site),
        await site.driver(forks=None, documents=DocumentRules(1 << 30)),
    )
    before, began = read(), started()
    for number in range(4):
        text = WRONG + f"-- 𝔸 {number}\ntheorem u : nonsense := by\n  skip\n#check Nat\n"
        assert words(await driver.run(check(text))) == words(await plain.run(check(text)))
    assert (read() - before, started() - began) == (4, 1)


async def test_what_is_accepted_is_compiled_and_judged(site: Site) -> None:
    driver = await server(site)
    reply = await driver.run(check(RIGHT))
    assert (reply.verdict, reply.axioms) == ("accepted", ())
    assert reply.kernel


async def test_each_tenant_and_each_header_has_a_process(site: Site) -> None:
    driver = await server(site)
    began = started()
    for tenant in ("a", "b", "a"):
        await driver.run(check(WRONG, tenant=tenant))
    await driver.run(check(WRONG.replace("\nimport", "\n\nimport"), tenant="a"))
    assert started() - began == 3


async def test_a_text_that_runs_programs_is_read_by_none(site: Site) -> None:
    driver = await server(site)
    before = read()
    reply = await driver.run(check(f"{WRONG}#eval 1\n"))
    assert (reply.verdict, read() - before) == ("rejected", 0)


async def test_a_process_that_was_killed_costs_no_text(site: Site) -> None:
    driver = await server(site)
    assert (await driver.run(check(WRONG))).verdict == "rejected"
    pids = [pid for pid in marked(site.marker) if b"--worker" in _command(pid)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert pids
    for _ in range(2):
        assert (await driver.run(check(WRONG))).reason == "lean_error"


async def test_a_process_that_was_stopped_costs_no_text(site: Site) -> None:
    driver = await server(site)
    assert (await driver.run(check(WRONG))).verdict == "rejected"
    for pid in marked(site.marker):
        if b"--worker" in _command(pid):
            os.kill(pid, signal.SIGSTOP)
    assert (await driver.run(check(WRONG, wall_s=10.0))).reason == "lean_error"


async def test_a_text_that_takes_too_long_ends_the_process_alone(site: Site) -> None:
    driver = await server(site)
    loops = f"{HEAD}theorem t (p : Prop) : p := by\n  repeat (first | skip | skip)\n"
    assert (await driver.run(check(WRONG))).verdict == "rejected"
    slow = await driver.run(check(loops, timeout_s=0.5, wall_s=20.0))
    assert slow.verdict in ("timeout", "exhausted", "rejected")
    assert (await driver.run(check(WRONG))).verdict == "rejected"


async def test_a_process_ends_after_its_last_text(site: Site) -> None:
    driver = await server(site, DocumentRules(served_from=1, compare_every=0, texts=2))
    began = started()
    for _ in range(4):
        assert (await driver.run(check(WRONG))).verdict == "rejected"
    assert started() - began == 2


async def test_a_rejection_that_a_new_lean_does_not_share_ends_the_use(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await server(site, DocumentRules(served_from=1, compare_every=1))
    reply = await driver.run(check(WRONG))
    documents = driver.opened.documents
    assert (reply.verdict, documents.unavailable) == ("rejected", "")
    plain = await driver.opened.lean.ask(RIGHT)
    documents.compare(Printed([(reply.messages[0], "")]), Printed(plain.encode()))
    assert "a new Lean takes" in documents.unavailable
    before = read()
    assert (await driver.run(check(WRONG))).verdict == "rejected"
    assert read() == before


# Lean's language server reads it with another rule than Lean.
SPOILED = 'case "$*" in *--worker*) exec "$@" -DautoImplicit=false;; esac; exec "$@"'
# Lean dies of each text but the worker's own.
DIES = """
case "$*" in *--worker*) exec "$@";; esac
text=$(cat)
case "$text" in *leanq_trial*) printf "%s\\n" "$text" | "$@"; exit;; esac
kill -9 $$
"""


def behind(site: Site, script: str) -> Environment:
    return site.behind("/bin/sh", "-c", script, "sh")


async def test_what_a_spoiled_process_rejects_is_accepted_in_the_end(site: Site) -> None:
    """Of the rejections that are looked at again, that is."""
    rules = DocumentRules(served_from=1, compare_every=1)
    driver = await site.driver(behind(site, SPOILED), forks=None, documents=rules)
    right = f"{HEAD}theorem t (h : And p q) : p := h.left\n"
    assert (await driver.run(check(WRONG))).reason == "lean_error"
    assert driver.opened.documents.unavailable == ""
    for _ in range(2):
        assert (await driver.run(check(right))).verdict == "accepted"
        assert "a new Lean takes" in driver.opened.documents.unavailable


# Behind each answer it prints what answers the numbers that would come next.
FORGES = """
import json, re, subprocess, sys
if "--worker" not in sys.argv:
    sys.exit(subprocess.call(sys.argv[1:]))
lean = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)

def tell(message):
    body = json.dumps(message).encode()
    sys.stdout.buffer.write(b"Content-Length: %d\\r\\n\\r\\n%s" % (len(body), body))

uri, version = "file:///leanq-document.lean", 0
place = {"start": {"line": 0, "character": 0}, "end": {"line": 0, "character": 1}}
while head := lean.stdout.readline():
    while (line := lean.stdout.readline()).strip():
        head += line
    message = json.loads(lean.stdout.read(int(re.search(rb"Length: (\\d+)", head)[1])))
    tell(message)
    version = message.get("params", {}).get("version") or version
    if message.get("result") is not None and message["id"]:
        for later in range(1, 4):
            lie = {"range": place, "message": "lie", "severity": 1}
            told = {"uri": uri, "version": version + later, "diagnostics": [lie]}
            tell({"method": "textDocument/publishDiagnostics", "params": told})
            tell({"id": message["id"] + later, "result": {}})
    sys.stdout.flush()
"""


async def test_what_an_earlier_text_has_printed_answers_for_no_later_one(site: Site) -> None:
    driver = await site.driver(
        site.behind(sys.executable, "-c", FORGES), forks=None, documents=ALWAYS
    )
    before = read()
    for text, verdict in ((WRONG, "rejected"), (RIGHT, "accepted"), (RIGHT, "accepted")):
        reply = await driver.run(check(text))
        assert (reply.verdict, [m.text for m in reply.messages if m.text == "lie"]) == (verdict, [])
    assert read() - before == 3


# It takes for ever over each text behind the header.
SPINS = """
import os, subprocess, sys
if "--worker" not in sys.argv:
    sys.exit(subprocess.call(sys.argv[1:]))
lean = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
while told := os.read(0, 1 << 16):
    while b"didChange" in told:
        pass
    lean.stdin.write(told)
    lean.stdin.flush()
"""


async def test_a_text_that_takes_too_long_there_is_read_by_a_lean_of_its_own(site: Site) -> None:
    driver = await site.driver(
        site.behind(sys.executable, "-c", SPINS), forks=None, documents=ALWAYS
    )
    assert (await driver.run(check(RIGHT, timeout_s=4.0))).verdict == "accepted"


# It prints messages, and no end of them.
FLOODS = """
import subprocess, sys
if "--worker" not in sys.argv:
    sys.exit(subprocess.call(sys.argv[1:]))
while True:
    sys.stdout.buffer.write(b"Content-Length: 50000\\r\\n\\r\\n{}%s" % (b" " * 49998))
"""


async def test_messages_without_an_end_are_not_read_for_ever(site: Site) -> None:
    driver = await site.driver(
        site.behind(sys.executable, "-c", FLOODS), forks=None, documents=ALWAYS
    )
    async with asyncio.timeout(60):
        assert (await driver.run(check(WRONG))).reason == "lean_error"


async def test_a_comparison_that_dies_tells_nothing(site: Site) -> None:
    rules = DocumentRules(served_from=1, compare_every=1)
    driver = await site.driver(behind(site, DIES), forks=None, documents=rules)
    reply = await driver.run(check(WRONG))
    assert (reply.reason, driver.opened.documents.unavailable) == ("lean_error", "")


async def test_a_header_without_a_process_is_tried_again_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.lean.run.documents._TRIED_AGAIN_AFTER", 2)
    script = 'case "$*" in *--worker*) exit 3;; esac; exec "$@"'
    driver = await site.driver(behind(site, script), forks=None, documents=ALWAYS)
    before, tries = COUNTS["leanq_lean_starts_total", "server"], []
    for _ in range(5):
        assert (await driver.run(check(WRONG))).reason == "lean_error"
        tries.append(COUNTS["leanq_lean_starts_total", "server"] - before)
    assert tries == [1, 1, 1, 2, 2]


async def test_a_process_that_texts_have_grown_is_replaced(site: Site) -> None:
    driver = await server(
        site, DocumentRules(served_from=1, compare_every=0, memory_bytes=-1 << 40)
    )
    began = started()
    for _ in range(3):
        assert (await driver.run(check(WRONG))).verdict == "rejected"
    assert started() - began == 3


async def test_as_many_errors_as_lean_tells(site: Site) -> None:
    """Lean ends with the hundredth."""
    many = HEAD + "".join(f"theorem t{n} (p q : Prop) (h : p) : q := h\n" for n in range(150))
    driver = await server(site)
    plain = await site.driver(forks=None, documents=DocumentRules(1 << 30))
    assert words(await driver.run(check(many))) == words(await plain.run(check(many)))


async def test_goals_are_bounded(site: Site) -> None:
    driver = await server(site)
    text = f"{HEAD}theorem t (p : Prop) (h : p) : p := by\n  apply h\n"
    limits = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=1 << 30)
    async with driver.opened.documents.lend(Key("", HEAD.rstrip())) as document:
        assert document is not None
        await document.read(text, limits)
        places = [(4, 2)] * 5
        size = len("p : Prop\nh : p\n⊢ p".encode())
        for most_bytes, found in ((5 * size, 5), (2 * size + 1, 2), (0, 0)):
            goals, _ = await document.goals(places, limits, most_bytes)
            assert len(goals) == found


@pytest.mark.parametrize("kind", ["lean", "server"])
async def test_the_goals_before_each_tactic(site: Site, kind: str) -> None:
    site.kind = kind
    driver = await site.one()
    code = (
        f"{HEAD}theorem t (p q : Prop) (h : p) (k : q) : And p q := by\n  constructor\n  exact h\n"
    )
    reply = await driver.run(check(f"{code}  exact k\n", goals=True))
    assert reply.verdict == "accepted"
    context = "p q : Prop\nh : p\nk : q\n⊢ "
    assert [(each.line, each.column, len(each.goals)) for each in reply.tactics] == [
        (4, 2, 1),
        (5, 2, 2),
        (6, 2, 1),
    ]
    assert reply.tactics[0].goals == (f"{context}p ∧ q",)
    rejected = await driver.run(check(f"{code}  exact h\n", goals=True))
    assert (rejected.verdict, len(rejected.tactics)) == ("rejected", 3)
    assert (await driver.run(check(code))).tactics == ()
    target = code.split("by\n")[0] + "sorry\n"
    verified = await driver.run(
        Request(op="verify", code=f"{code}  exact k\n", target=target, goals=True)
    )
    assert (verified.verdict, verified.tactics) == ("accepted", reply.tactics)
    bare = await driver.run(check(code.removeprefix(HEAD), goals=True))
    assert [each.line for each in bare.tactics] == [2, 3]


async def test_two_texts_at_once_have_a_process_each(site: Site) -> None:
    driver = await site.driver(slots=2, forks=None, documents=ALWAYS)
    replies = await asyncio.gather(*(driver.run(check(WRONG)) for _ in range(6)))
    assert {reply.reason for reply in replies} == {"lean_error"}
    await driver.close()
    await eventually(lambda: not marked(site.marker))


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
