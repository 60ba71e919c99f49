"""Every key of leanq's in Redis.

All keys of a shard begin with ``{PREFIX:SHARD}``, the hash tag that keeps them in one slot
of a cluster, so that one script can change them together. A rid names its shard. Where there are
several, SHARD is ``0/3.7``: the first of three, and a number that makes their slots lie evenly.

| key after the tag | type | holds | written by | ends |
| --- | --- | --- | --- | --- |
| ``:req:RID`` | hash | a request in flight: see below | submit, claim, requeue | at its reply |
| ``:body:RID`` | string | the packed request | submit | at its reply |
| ``:reply:RID`` | string | the packed reply | settle, cancel, reap, claim | time-to-live |
| ``:wait:LANE:LEVEL:TENANT`` | list | rids that wait, next first | submit, requeue | when empty |
| ``:ring:LANE:LEVEL`` | list | tenants whose wait list is not empty | the same | when empty |
| ``:suspects:LANE`` | list | rids that must run alone | requeue | when empty |
| ``:work:WORKER`` | sorted set | its processing list: rid → overrun, ms | claim | when empty |
| ``:workers`` | sorted set | worker → end of its lease, ms | join, claim, renew | leave, reap |
| ``:info`` | hash | worker → what it says of itself | join | leave, reap |
| ``:lanes`` | hash | environment → its fingerprint and version | join | never |
| ``:isolating:LANE`` | string | who empties itself for a suspect | claim | time-to-live |
| ``:run:LANE:DIGEST`` | string | the rid that identical ones attach to | claim | with its run |
| ``:with:RID`` | sorted set | its followers: rid → submitted, ms | submit, claim | with its run |
| ``:verdict:FINGERPRINT:DIGEST`` | string | a remembered reply | settle | time-to-live |
| ``:prints`` | hash | environment → its fingerprint now | join | never |
| ``:inbox:CLIENT`` | stream | rid, reply, rid, reply … | whoever ends a request | time-to-live |
| ``:pinning`` | hash | environment → who watches over promises | submit, claim | never |
| ``:warm:LANE:AFFINITY`` | sorted set | worker → when it was last warm, ms | claim | time-to-live |
| ``:vacant`` | hash | worker → how many more it would take | claim, submit | leave, reap |
| ``:promise:WORKER`` | list | rids that only it may claim, for a moment | submit | claim, reap |
| ``:promises`` | sorted set | worker → until when that holds, ms | submit | claim, reap |
| ``:bell:LANE`` | list | tokens that wake idle workers | submit, requeue, claim | when empty |
| ``:stop:WORKER`` | list | rids to stop, ``+`` for a promise | cancel, submit, poke | leave, reap |
| ``:stats`` | hash | counters, and ``waiting:LANE`` | every script | never |
| ``:dead`` | sorted set | dead letters: rid → time of death, ms | reap, renew | dead drop, retry |
| ``:deadreq:RID`` | hash | a dead letter's request and body | reap, renew | with ``:dead`` |
| ``:states:XXX`` | hash | records of states whose ids begin so | state_… scripts | collected |
| ``:collect`` | hash | how far the collection of states is | state_collect | never |
| ``:snaps`` | hash | snapshot → last use, bytes, chunks | snapshot_… scripts | when empty |
| ``:making:KEY`` | string | that somebody makes a snapshot | the worker that does | time-to-live |
| ``:snap:KEY`` | string | a snapshot's manifest | snapshot_keep | time-to-live |
| ``:chunk:HASH`` | string | a piece of a snapshot | the worker that made it | time-to-live |

Fields of ``:req:RID``: ``st`` (queued, leased or attached), ``l`` lane, ``t`` tenant, ``p`` level,
``c`` the client whose inbox is told ("" after it withdrew what runs on for others), ``n`` attempts,
``at`` submitted (ms), ``exp`` deadline in the queue (ms, 0 for none), ``run`` longest run (ms),
``d`` digest, where the run may be shared; while leased or attached also ``w``, the worker; while
leased ``tok``, the lease token, and ``solo``, where it runs alone and may be shared; while attached
``on``, the rid that it follows. Of one that names affinities also ``a``, their names; while queued
``to``, the worker that it is promised to; and ``by``, of any, when a warmer one first went before
it (ms). A request in flight carries no time-to-live, so no eviction policy that spares such keys
can lose it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from redis.crc import key_slot

from .errors import UsageError

_SLOTS = 16384


@dataclass(frozen=True)
class Keys:
    """The names of one shard's keys."""

    prefix: str
    shard: int = 0
    shards: int = 1

    @cached_property
    def tag(self) -> str:
        """The hash tag; of N shards the first has a slot in the first N-th of all slots.

        It names their number, so that whoever has another one in mind sees another queue, and not
        half of this one.
        """
        shard = f"{self.shard}/{self.shards}" if self.shards > 1 else str(self.shard)
        for number in count():
            tag = f"{{{self.prefix}:{shard}{f'.{number}' if number else ''}}}"
            if key_slot(tag.encode()) * self.shards // _SLOTS == self.shard:
                return tag
        raise AssertionError

    def reply(self, rid: str) -> str:
        return f"{self.tag}:reply:{rid}"

    def inbox(self, client: str) -> str:
        return f"{self.tag}:inbox:{client}"

    def bell(self, lane: str) -> str:
        return f"{self.tag}:bell:{lane}"

    def stop(self, worker: str) -> str:
        return f"{self.tag}:stop:{worker}"

    @property
    def dead(self) -> str:
        return f"{self.tag}:dead"

    def dead_letter(self, rid: str) -> str:
        return f"{self.tag}:deadreq:{rid}"


def new_rid(shards: int, digest: bytes = b"") -> str:
    """A rid that nobody else will ever make: a shard, then 96 random bits.

    Any shard will do, but requests with the same ``digest`` have to meet in one.
    """
    shard = int.from_bytes(digest) % shards if digest else secrets.randbelow(shards)
    return f"{shard}-{secrets.token_urlsafe(12)}"


def retry_rid(rid: str) -> str:
    """The rid under which a dead letter is sent again: ``0-x``, ``0-x.r1``, ``0-x.r2`` …

    The old one has its reply already. It is the same whoever retries, so that two retries of one
    letter are one request.
    """
    base, dot, number = rid.rpartition(".r")
    return f"{base}.r{int(number) + 1}" if dot and number.isdigit() else f"{rid}.r1"


def shard_of(rid: str) -> int:
    """The shard that ``rid`` names; raises UsageError for what is no rid."""
    head, dash, rest = rid.partition("-")
    if not (dash and head.isascii() and head.isdigit() and 0 < len(rest) <= 64):
        raise UsageError(f"{rid!r} is no request id; one looks like '0-yXAfGB0pJr2-dUyP'")
    return int(head)
