"""Every key of leanq in Redis, most of them written by scripts alone.

A new key also stands in ``deploy/users.acl``. One that workers write stands in
``lua/register.lua`` too, which asks for the right to it.

All keys of a shard begin with ``{PREFIX:SHARD}``. This hash tag keeps them in one slot of a
cluster, so that one script can change them together. A request id names its shard. If there are
several, SHARD looks like ``0/3.7``: the first of three, and a number that spreads their slots
evenly.

The scripts of early releases lose requests whose records they cannot read. So the keys of requests
and workers begin with ``{PREFIX:SHARD}{3}``, which those scripts never look at. What outlasts
requests is shared with them: weights, accounts, states and replay memories begin with
``{PREFIX:SHARD}`` alone.

| key after the tag | type | holds | written by | ends |
| --- | --- | --- | --- | --- |
| ``:req:ID`` | string | a request in flight: its record | submit, requeue | at its reply |
| ``:req:ID`` | string | then its packed reply | settle, cancel, reap, claim | time-to-live |
| ``:body:ID`` | string | the body of a request in flight, if it is large | submit | at its reply |
| ``:upload:CALL:ID`` | string | a body or a reply on its way | clients, workers | time-to-live |
| ``:phase`` | hash | id → its phase, if it does not simply wait | submit, claim | at its reply |
| ``:phase`` | hash | ``r:ENV:DIGEST`` → the run that its like join | claim | with its run |
| ``:wait:ENV:PRIORITY:TENANT`` | list | ids that wait, next first | submit, requeue | when empty |
| ``:ring:ENV:PRIORITY`` | list | tenants whose wait list is not empty | the same | when empty |
| ``:parked:ENV:PRIORITY`` | set | such tenants that are held back | submit, pause | resume |
| ``:paused`` | hash | ``e:ENV`` or ``t:TENANT`` held back → since when, ms | pause | resume |
| ``:weights`` | hash | tenant → its weight | the operator | the operator |
| ``:shares:ENV:PRIORITY`` | hash | tenant → virtual time, mean | claim, release | time-to-live |
| ``:quarantined:ENV`` | list | ids that wait for an isolated attempt | requeue | when empty |
| ``:wait:ENV:left:VERSION`` | list | what claims cannot read: id, place | claim, … | time-to-live |
| ``:withdrawn`` | hash | ``wait:…``, ``quarantined:…`` → entries not waiting | cancel | at 0 |
| ``:processing:WORKER`` | sorted set | what it holds: id → run timeout, ms | claim | when empty |
| ``:workers`` | sorted set | worker → end of its lease, ms | register, claim, renew | leave, reap |
| ``:info`` | hash | worker → what it says of itself | register | leave, reap |
| ``:environments`` | hash | environment → what its worker says of it | register | never |
| ``:isolating:ENV`` | string | the worker that empties itself | claim | time-to-live |
| ``:joined:ID`` | sorted set | what joined the run: id → submitted | submit, claim | with its run |
| ``:verdict:FINGERPRINT:DIGEST`` | string | a remembered reply | settle | time-to-live |
| ``:fingerprints`` | hash | environment → its fingerprint now | register | never |
| ``:hot:FINGERPRINT`` | hash | tenant → when, counts of its headers | renew | time-to-live |
| ``:texts:FINGERPRINT`` | hash | hash → text of a header that is in use | renew | time-to-live |
| ``:inbox:CLIENT`` | stream | id, reply, id, reply … | each end of a request | time-to-live |
| ``:warm:ENV:AFFINITY`` | sorted set | worker → when it was last warm, ms | claim | time-to-live |
| ``:wakeup:ENV`` | list | tokens that wake workers, one with its request | submit, … | when empty |
| ``:stop:WORKER`` | list | ids to stop, or ``""`` | cancel, notify_worker | leave, reap |
| ``:stats`` | hash | counters, see ``Status``; affinities' environments | every script | never |
| ``:minutes`` | sorted set | the totals of each minute, a day long | submit, renew | bounded |
| ``:account:DAY`` | hash | what a day's runs cost; ``since``: from when, ms | renew | 100 days |
| ``:accounts`` | sorted set | the days since 1970 that have an account | renew | bounded |
| ``:scaler`` | hash | environment → the scaler's last decision | the scaler | time-to-live |
| ``:dead`` | sorted set | dead letters: id → time of death, ms | reap, renew | dead drop, retry |
| ``:disagreed`` | sorted set | the same, where kernels disagree | claim | dead drop, retry |
| ``:deadreq:ID`` | hash | a dead letter's request, body, reply | reap, renew, claim | with these |
| ``:states:XXX`` | hash | records of states whose ids begin so | state_… scripts | collected |
| ``:collect`` | hash | how far the collection of states is | state_collect | never |
| ``:snaps`` | hash | snapshot → last use, bytes, chunks | snapshot_… scripts | when empty |
| ``:making:KEY`` | string | that a worker makes this snapshot | that worker | time-to-live |
| ``:snap:KEY`` | string | a snapshot's manifest | snapshot_keep | time-to-live |
| ``:chunk:HASH`` | string | a piece of a snapshot | the worker that made it | time-to-live |
| ``:replay:names`` | sorted set | replay memory → when it was made, ms | replay_… | dropped |
| ``:replay:NAME:about`` | hash | a replay memory's bounds, counters | replay_… | dropped |
| ``:replay:NAME:log`` | stream | its entries in their order | replay_… | bounded |
| ``:replay:NAME:slots`` | hash | its reservoir: slot → number, entry | replay_write | bounded |
| ``:replay:NAME:classes`` | hash | class of weights → how many | replay_… | bounded |
| ``:replay:NAME:index`` | hash | class, place → member, weight | replay_… | bounded |
| ``:replay:NAME:places`` | hash | member → class, place | replay_… | bounded |
| ``:replay:NAME:value`` | stream | the value beside it, by its version | replay_publish | dropped |
| ``:replay:NAME:writer:ID`` | string | a writer's last write | replay_write | time-to-live |

A record (``lua/parts/record.lua`` has its layout) begins with a byte below 0x80, the version of its
layout. A detached request's body is in ``:body:ID``. A reply begins with 0x93. The call that an
upload was made for moves or removes it: ``submit`` (CALL is new with each) or ``claim`` (CALL is
the lease's token).

``lua/parts/phase.lua`` has the layout of ``:phase``: leased, joined to a run, passed over by a
warmer request, or waiting for an isolated attempt. A leased request whose client is "" was
withdrawn: it runs on for others, and has its reply. A request in flight carries no time-to-live, so
an eviction policy that spares such keys cannot lose it.

``:scaler`` is the same in every shard. Its values are JSON objects: ``at`` (seconds since 1970 by
the scaler's clock), ``target`` and ``order`` (workers wanted from now on, and before), ``reason``,
``text``, ``who``.

A replay memory is in one shard, which its name's hash chooses.

One key belongs to no shard: ``{PREFIX:queue}{3}:shape``, a hash with ``shards`` and ``lease_s``.
The last worker that joined an empty fleet wrote it, and it stays for good. Processes that expect
another number of shards have to find it, so no script touches it. Its field ``refused`` says when
(seconds since 1970), which worker and why, if a worker cannot join; it counts for two minutes.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from redis.crc import key_slot

from leanq.errors import UsageError

_SLOTS = 16384
# Early releases look at keys without it.
_QUEUE = "{3}"
# What all releases share, under keys without it.
_LASTING = frozenset(("weights", "account", "accounts", "states", "collect", "replay"))


@dataclass(frozen=True)
class Keys:
    """The names of one shard's keys."""

    prefix: str
    shard: int = 0
    shards: int = 1

    @cached_property
    def tag(self) -> str:
        """Returns how the keys of requests and workers begin."""
        return f"{self.lasting}{_QUEUE}"

    @cached_property
    def lasting(self) -> str:
        """Returns the hash tag; of N shards the first has a slot in the first N-th of all slots.

        The tag has the number of shards, so a process that expects another number sees another
        queue and not half of this one.
        """
        shard = f"{self.shard}/{self.shards}" if self.shards > 1 else str(self.shard)
        for number in count():
            tag = f"{{{self.prefix}:{shard}{f'.{number}' if number else ''}}}"
            if key_slot(tag.encode()) * self.shards // _SLOTS == self.shard:
                return tag
        raise AssertionError

    def of(self, *parts: object) -> str:
        """Returns the key with these parts after the tag; see the table above."""
        tag = self.lasting if parts[0] in _LASTING else self.tag
        return ":".join((tag, *map(str, parts)))

    def request(self, request_id: str) -> str:
        """Returns the key of a request, and afterwards of its reply."""
        return f"{self.tag}:req:{request_id}"

    def upload(self, call: str, request_id: str) -> str:
        """Returns the key of a body before its submit, or of a reply before it is settled."""
        return f"{self.tag}:upload:{call}:{request_id}"


def shape_key(prefix: str) -> str:
    """Returns the key of a queue's shape, the same for any number of shards."""
    return f"{{{prefix}:queue}}{_QUEUE}:shape"


def early_shape_key(prefix: str) -> str:
    """Returns the shape's key in releases whose records have version 1 or 2."""
    return f"{{{prefix}:queue}}:shape"


def new_request_id(shards: int, digest: bytes = b"") -> str:
    """Returns a request id that no other process will ever make: a shard, then 96 random bits.

    Any shard will do, but requests with the same ``digest`` have to meet in one.
    """
    try:
        name = _names.pop()
    except IndexError:
        _draw_names()
        name = _names.pop()
    if shards == 1:
        return f"0-{name}"
    shard = int.from_bytes(digest) % shards if digest else secrets.randbelow(shards)
    return f"{shard}-{name}"


# Random names not yet used. Asking the system for each one would cost more than the rest of a
# request id.
_names: list[str] = []
_DRAWN = 256


def _draw_names() -> None:
    text = secrets.token_urlsafe(12 * _DRAWN)
    _names.extend(text[start : start + 16] for start in range(0, len(text), 16))


# A forked child must not use its parent's names.
os.register_at_fork(after_in_child=_names.clear)


def retry_request_id(request_id: str) -> str:
    """Returns the request id under which a dead letter is sent again: ``0-x``, ``0-x.r1`` …

    The old id has its reply already. The new one is the same for everyone, so that two retries of
    one letter are one request.
    """
    base, dot, number = request_id.rpartition(".r")
    return f"{base}.r{int(number) + 1}" if dot and number.isdigit() else f"{request_id}.r1"


def shard_of(request_id: str) -> int:
    """Returns the shard that ``request_id`` names; raises UsageError if it is no request id."""
    head, dash, rest = request_id.partition("-")
    # Python reads no number of thousands of digits.
    is_shard = head.isascii() and head.isdigit() and len(head) < 10
    if not (dash and is_shard and 0 < len(rest) <= 64):
        raise UsageError(
            f"{request_id!r:.80} is no request id; one looks like '0-yXAfGB0pJr2-dUyP'"
        )
    return int(head)
