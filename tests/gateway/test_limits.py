"""How many connections a gateway holds, and which one gives way."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st
from support.gateway.gateways import GATEWAY_TIMEOUT_S, Gateway, Scripted
from support.waiting import eventually

from leanq.gateway.keys import Key
from leanq.gateway.limits import CONNECTION, Connections, most_connections

KEYS = {name: Key(name, "0" * 64, "t") for name in "ab"}


class Connection:
    """A connection that notes what it was told."""

    def __init__(self) -> None:
        self.closed = False

    def has_key(self, name: str, *, streams: bool) -> None:
        """Nothing more is done about it here."""

    async def taken(self) -> None:
        """Nothing was sent."""

    def close(self) -> None:
        self.closed = True


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("enter", "leave", "works", "waits", "defers", "resumes")),
        st.integers(0, 15),
        st.sampled_from(("p", "q", "r")),
    ),
    max_size=60,
)


@given(most=st.integers(1, 8), steps=STEPS)
def test_there_are_never_more_than_there_may_be_and_none_that_works_gives_way(
    most: int, steps: list[tuple[str, int, str]]
) -> None:
    all_of_them = Connections(most)
    made: dict[int, Connection] = {}
    peers: dict[int, str] = {}
    working: set[int] = set()
    known: set[int] = set()
    deferred: set[int] = set()
    for step, number, peer in steps:
        if step == "enter" and number not in made:
            made[number], peers[number] = Connection(), peer
            if not all_of_them.enter(made[number], peer):
                del made[number]
        elif number not in made:
            continue
        elif step == "leave":
            all_of_them.leave(made.pop(number))
        elif step in ("defers", "resumes"):
            getattr(all_of_them, step)(made[number])
            deferred = deferred | {number} if step == "defers" else deferred - {number}
        elif step == "works":
            all_of_them.works(made[number])
            working.add(number)
            known.add(number)
        elif number in working:
            all_of_them.waits(made[number])
            working.discard(number)
        gone = {each for each, connection in made.items() if connection.closed}
        assert len(gone) <= 1
        assert not gone & working
        # One that had a key gives way only where there is no stranger beside the new one.
        strangers = [each for each in made if each not in known | gone | {number}]
        assert not (gone & known and strangers)
        # A silent one of the same peer gives way before one that waits for its turn.
        for each in gone & deferred - known:
            assert not [o for o in strangers if peers[o] == peers[each] and o not in deferred]
        for each in gone:
            del made[each]
        deferred &= made.keys()
        working &= made.keys()
        known &= made.keys()
        assert len(all_of_them) == len(made) <= most
        for peer in "pqr":
            of_peer = [each for each in made if each not in known and peers[each] == peer]
            assert len(of_peer) <= max(1, most // 3)


def test_the_requests_of_one_key_take_a_third_of_all_connections() -> None:
    all_of_them, scope = Connections(6), {"state": {CONNECTION: Connection()}}
    with contextlib.ExitStack() as under_way:
        for _ in range(2):
            under_way.enter_context(all_of_them.carrying(scope, KEYS["a"]))
        with pytest.raises(HTTPException) as refused, all_of_them.carrying(scope, KEYS["a"]):
            pass
        assert refused.value.status_code == 429
        assert refused.value.headers
        with all_of_them.carrying(scope, KEYS["b"]):
            pass
    with all_of_them.carrying(scope, KEYS["a"]):
        pass


def test_strangers_of_one_peer_and_a_key_leave_the_connections_of_others_alone() -> None:
    all_of_them = Connections(12)
    tenant = Connection()
    assert all_of_them.enter(tenant, "p")
    all_of_them.works(tenant)
    all_of_them.waits(tenant)
    with contextlib.ExitStack() as under_way, contextlib.suppress(HTTPException):
        for _ in range(12):
            working = Connection()
            assert all_of_them.enter(working, "p")
            scope = {"state": {CONNECTION: working}}
            under_way.enter_context(all_of_them.carrying(scope, KEYS["a"]))
            all_of_them.works(working)
    for _ in range(24):
        assert all_of_them.enter(Connection(), "p")
    assert not tenant.closed


def test_a_silent_stranger_gives_way_before_one_that_waits_for_its_turn() -> None:
    all_of_them = Connections(6)
    waits, silent, third, fourth = (Connection() for _ in range(4))
    assert all_of_them.enter(waits, "p")
    assert all_of_them.enter(silent, "p")
    all_of_them.defers(waits)
    assert all_of_them.enter(third, "p")
    assert (waits.closed, silent.closed) == (False, True)
    # Where all wait, the one that came first gives way.
    all_of_them.defers(third)
    assert all_of_them.enter(fourth, "p")
    assert (waits.closed, third.closed) == (True, False)


def test_a_small_limit_on_files_leaves_room_for_others() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        # It is raised as far as it may be.
        assert most_connections() == min(before[1], 65_536) - 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.asynccontextmanager
async def opened(gateway: Gateway, number: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    port = int(gateway.url.rpartition(":")[2])
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
    try:
        yield [reader for reader, _ in pairs]
    finally:
        for _, writer in pairs:
            writer.close()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways that hold ten connections."""
    monkeypatch.setattr("leanq.gateway.app.most_connections", lambda: 10)


@pytest.mark.usefixtures("few")
async def test_connections_on_which_nothing_comes_keep_nobody_out(
    gateway: Gateway, scripted: Scripted
) -> None:
    held = asyncio.create_task(gateway.http.post("/v1/check", json={"code": "-- held"}))
    await eventually(lambda: scripted.running == ["-- held"])
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        async with opened(gateway, 30) as readers:
            # The oldest have given way, and whoever comes is answered at once.
            assert [await reader.read() for reader in readers[:20]] == [b""] * 20
            for _ in range(5):
                assert (await gateway.http.get("/health")).status_code == 200
            scripted.gate.set()
            assert (await held).json()["verdict"] == "accepted"
