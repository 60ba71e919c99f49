"""What clients record: in journals of their own, readable however the client or the disk ends."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway.gateways import STATE, Gateway, Scripted
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.errors import InvalidRequestError, UnknownEnvironmentError, UsageError
from leanq.producer.recording import SUFFIX, Journal, Recorded, pack, read_journal
from leanq.queue.requests import Message, Reply, Request
from leanq.queue.settings import Settings
from leanq.trainers.testing import FakeAsyncLeanQClient, FakeLeanQClient

# Takes requests until it is killed, and says when some are recorded.
_RECORDS = """
import sys
from leanq.trainers.testing import FakeLeanQClient
with FakeLeanQClient(record=sys.argv[1]) as lean:
    for number, _ in enumerate(lean.map(f"-- {n} " + "x" * 2000 for n in range(10**9))):
        if number == 200:
            print("now", flush=True)
"""


def journals(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def recorded(folder: Path) -> list[Recorded]:
    skipped: Counter[str] = Counter()
    found = [each for path in journals(folder) for each in read_journal(path, skipped)]
    assert not skipped
    return found


def record(number: int, text: str = "x") -> Recorded:
    request = Request("check", f"{number} {text}")
    reply = Reply("rejected", (Message("error", 1, 0, text),), request_id=str(number))
    return Recorded(number, "default", "{}", request, reply)


@pytest.mark.parametrize("far", [False, True])
async def test_what_ends_is_recorded_over_redis_and_http(
    gateway: Gateway, settings: Settings, tmp_path: Path, *, far: bool
) -> None:
    where = gateway.url if far else settings
    async with AsyncLeanQClient(where, record=tmp_path / "new" / "folder") as lean:
        labels = {"problem": "p", "step": 7, "of": ["a"]}
        checked = await lean.check("-- rejected", timeout_s=5, labels=labels)
        verified = await lean.verify("-- target", "-- accepted", holes=["h"], labels={})
        stepped = await lean.step(STATE, "x", env="default")
        await lean.attach(checked.request_id)
        with pytest.raises(UnknownEnvironmentError):
            await lean.check("-- x", env="nowhere")
        many = [each.verdict async for each in lean.amap(f"-- timeout {n}" for n in range(50))]
        assert many == ["timeout"] * 50
        one, two, three, *others = recorded(tmp_path / "new" / "folder")
        # Each is there once its caller has the reply, and not only when the client ends.
        assert len(others) == 50
    assert (one.request.op, one.request.code, one.request.timeout_s) == ("check", "-- rejected", 5)
    assert (one.environment, msgspec.json.decode(one.labels)) == ("default", labels)
    assert (one.reply, one.reply.request_id) == (checked, checked.request_id)
    assert one.reply.cpu_s == checked.cpu_s
    assert (two.request.target, two.request.holes, two.reply) == ("-- target", ("h",), verified)
    assert (three.request.op, three.request.tactic, three.reply) == ("step", "x", stepped)
    assert two.labels == "{}"
    assert one.ended_ms <= two.ended_ms <= three.ended_ms
    assert len(journals(tmp_path / "new" / "folder")) == 1


async def test_what_has_no_verdict_is_not_recorded(
    tmp_path: Path, scripted: Scripted, settings: Settings
) -> None:
    async with AsyncLeanQClient(settings, record=tmp_path) as lean:
        held = asyncio.create_task(lean.check("-- held"))
        await eventually(lambda: len(scripted.running) == 1)
        held.cancel()
        await eventually(lambda: scripted.stopped == ["-- held"])
    async with FakeAsyncLeanQClient(record=tmp_path) as fake:
        state = (await fake.check("sorry")).sorries[0].state
        assert state
        await fake.export(state)
    assert [each.request.op for each in recorded(tmp_path)] == ["check"]


def test_each_client_and_each_child_has_a_journal_of_its_own(tmp_path: Path) -> None:
    with FakeLeanQClient(record=tmp_path) as one, FakeLeanQClient(record=tmp_path):
        assert journals(tmp_path) == []
        assert one.check("-- parent").result().verdict == "accepted"
        pid = os.fork()
        if not pid:
            try:
                done = one.check("-- child").result(120).verdict == "accepted"
            finally:
                os._exit(0 if done else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert one.check("-- parent again").result().verdict == "accepted"
    assert len(journals(tmp_path)) == 2
    texts = {each.request.code for each in recorded(tmp_path)}
    assert texts == {"-- parent", "-- child", "-- parent again"}


def test_true_is_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeLeanQClient(record=True) as lean:
        lean.check("x").result()
    assert len(recorded(tmp_path / "leanq-record")) == 1


@pytest.mark.parametrize("record", ["", 7, None, b"x", "file", "file/below", "\0"])
def test_what_is_no_folder(tmp_path: Path, record: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="record"):
        FakeLeanQClient(record=record)


@pytest.mark.parametrize(
    "labels", [7, "x", ["a"], {1: "x", "y": "z"}, {"x": object()}, {"x": "\ud800"}]
)
def test_what_are_no_labels(labels: object) -> None:
    with FakeLeanQClient() as lean, pytest.raises(InvalidRequestError, match="labels"):
        lean.check("x", labels=labels)  # type: ignore[typeddict-item]


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_what_it_has_answered(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _RECORDS, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGKILL)
    (path,) = journals(tmp_path)
    skipped: Counter[str] = Counter()
    found = [int(each.request.code.split()[1]) for each in read_journal(path, skipped)]
    assert len(found) > 200
    assert set(range(201)) <= set(found)
    assert skipped["unreadable"] <= 1


def test_a_full_disk_costs_records_and_no_replies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with FakeLeanQClient(record=tmp_path) as lean, caplog.at_level(logging.ERROR, "leanq.client"):
        assert lean.check("-- first").result().verdict == "accepted"
        (path,) = journals(tmp_path)
        # Part of the next line fits, as on a disk that becomes full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        try:
            for n in range(3):
                assert lean.check(f"-- lost {n}").result().verdict == "accepted"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert lean.check("-- last").result().verdict == "accepted"
    assert [each.request.code for each in recorded(tmp_path)] == ["-- first", "-- last"]
    (said,) = [each.getMessage() for each in caplog.records]
    assert said == f"{path}: File too large; 1 request was not recorded"


def test_a_reply_that_is_no_unicode_is_recorded_as_what_can_be_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(record(1, "half a \ud800 pair"))
    journal.write(record(2, "∀ whole"))
    journal.close()
    assert [each.request.code for each in recorded(tmp_path)] == ["1 half a ? pair", "2 ∀ whole"]


_DAMAGES: st.SearchStrategy[Callable[[bytes], bytes]] = st.one_of(
    st.builds(lambda at: lambda data: data[: at % (len(data) + 1)], st.integers(0)),
    st.builds(
        lambda at, by: (
            lambda data: (
                data[: (k := at % len(data))] + bytes([data[k] ^ by]) + data[k + 1 :]
                if data
                else data
            )
        ),
        st.integers(0),
        st.integers(1, 255),
    ),
    st.builds(
        lambda at, size: lambda data: data[: (k := at % (len(data) + 1))] + data[k + size :],
        st.integers(0),
        st.integers(1, 400),
    ),
    st.builds(
        lambda at, junk: lambda data: data[: (k := at % (len(data) + 1))] + junk + data[k:],
        st.integers(0),
        st.binary(min_size=1, max_size=40) | st.just(bytes(4096)),
    ),
)


@given(
    # No request has a NUL character.
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30),
        max_size=6,
    ),
    damages=st.lists(_DAMAGES, max_size=4),
)
def test_of_a_damaged_journal_exactly_the_whole_lines_are_read(
    texts: list[str], damages: list[Callable[[bytes], bytes]]
) -> None:
    lines = [pack(record(number, text)) for number, text in enumerate(texts)]
    data = b"".join(lines)
    for damage in damages:
        data = damage(data)
    *whole, torn = data.split(b"\n")
    expected = [line + b"\n" for line in whole if line + b"\n" in lines]
    skipped: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"x{SUFFIX}"
        path.write_bytes(data)
        found = [pack(each) for each in read_journal(path, skipped)]
    assert found == expected
    assert skipped["unreadable"] == len(whole) - len(expected) + bool(torn)


@given(st.binary(max_size=200))
def test_a_line_with_a_right_sum_that_is_no_record_is_passed_over(text: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"x{SUFFIX}"
        text = text.replace(b"\n", b"")
        path.write_bytes(b"%08x %b\n" % (crc32(text), text))
        assert list(read_journal(path, Counter())) == []


def test_a_journal_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent: No such file"):
        list(read_journal(tmp_path / "absent", Counter()))
