"""Builds submissions from a caller's arguments, and checks these."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import Any, Generic, TypedDict, TypeVar

import msgspec
from cachetools import LRUCache
from msgspec import Struct
from msgspec.structs import replace

from leanq.errors import InvalidRequestError, RequestError
from leanq.lean.goals.recipes import Recipe, snapshot_key, text_hash, unpack_export
from leanq.lean.text import split_header
from leanq.producer import arguments
from leanq.queue import wire
from leanq.queue.keys import new_request_id, shard_of
from leanq.queue.requests import (
    PRIORITIES,
    Reply,
    Request,
    wall_for,
)
from leanq.queue.results import Submission
from leanq.queue.settings import Settings, check_name

DEFAULT_ENVIRONMENT = "default"
DEFAULT_TENANT = "default"
ECHO_ENVIRONMENT = "echo"

_T = TypeVar("_T")

# How many states to remember with their environment; a search seldom goes back further.
_STATES_REMEMBERED = 100_000


class SubmitOptions(TypedDict, total=False):
    """How a request is queued.

    Attributes:
        tenant: the tenant; tenants are served round-robin. The default is the client's own.
        priority: 0 (most urgent) to 2; the default is 1.
        deadline_s: seconds in the queue after which the verdict is ``expired``; the default is
            none.
        request_id: a name for the request; the same name again gives the same reply.
        traceparent: the caller's trace context (W3C), which the worker's log then names.
        campaign: the name under which ``leanq report cost`` also counts it.
        labels: JSON values by name, such as the problem or the policy's version. They are not sent:
            a client that records keeps them beside the request.
    """

    traceparent: str | None
    campaign: str
    labels: Mapping[str, Any]
    tenant: str
    priority: int
    deadline_s: float | None
    request_id: str | None


class InEnvironment(SubmitOptions, total=False):
    """Options of an operation in one environment, in addition to ``SubmitOptions``.

    Attributes:
        env: the environment, as a worker offers it. The default is the state's environment if a
            state is given, else ``default``.
    """

    env: str


class Check(InEnvironment, total=False):
    """Options of a check or a tactic, in addition to ``InEnvironment``.

    Attributes:
        timeout_s: budget of CPU time in seconds (60); beyond it the verdict is ``timeout``.
        memory_mb: resident memory in MiB (4096); beyond it the verdict is ``memory``.
        scratch_mb: disk that the candidate's processes may fill, in MiB (256); beyond it the
            verdict is ``memory`` as well.
        allow_axioms: names of axioms allowed beside the environment's own.
        audit: whether to judge and audit what Lean accepts (True); if not, it is ``unjudged``.
        trust_programs: whether the caller vouches for a text that runs programs of its own (False).
            The text can then be ``accepted``; otherwise it is ``unverified``.
        statements: whether the reply's theorems have their statements (True). Printing them takes a
            part of a small check's time, so leave them out if nobody reads them.
        goals: whether a check or a verification tells the goals before each tactic of the text's
            proofs (False).
        profile: whether a check says where Lean spends its time, instead of being judged (False).
    """

    timeout_s: float
    memory_mb: int
    scratch_mb: int
    allow_axioms: Iterable[str]
    audit: bool
    trust_programs: bool
    statements: bool
    goals: bool
    profile: bool


def _optional(check: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda name, value: None if value is None else check(name, value)


_OPTIONS: Mapping[str, Callable[[str, object], Any]] = {
    "tenant": arguments.text,
    "priority": arguments.whole_number,
    "deadline_s": _optional(arguments.number),
    "request_id": _optional(arguments.text),
    "traceparent": _optional(arguments.text),
    "campaign": arguments.text,
    "labels": arguments.json_values,
    "env": arguments.text,
    "timeout_s": arguments.number,
    "memory_mb": arguments.whole_number,
    "scratch_mb": arguments.whole_number,
    "allow_axioms": arguments.texts,
    "audit": arguments.flag,
    "trust_programs": arguments.flag,
    "statements": arguments.flag,
    "goals": arguments.flag,
    "profile": arguments.flag,
}


class Whereabouts(Struct, frozen=True):
    """Where a state can be stepped: its environment, and the affinities of workers warm for it."""

    environment: str
    warmth: tuple[str, ...] = ()


class PreparedRequest(Struct, Generic[_T], frozen=True):
    """A request to send, and the meaning of its reply to the caller.

    Attributes:
        submission: the request as it goes into a queue; its environment is empty if that of
            the request's state is not known yet.
        labels: the caller's labels, as JSON.
    """

    request: Request
    submission: Submission
    read: Callable[[Reply], _T]
    labels: str = "{}"

    def at(self, where: Whereabouts) -> PreparedRequest[_T]:
        """Returns the request, to be sent to its state's environment unless it names its own."""
        submission = replace(
            self.submission,
            environment=self.submission.environment or where.environment,
            affinity=self.submission.affinity or where.warmth,
        )
        return replace(self, submission=submission)


class RequestBuilder:
    """Prepares the requests of one client, and learns from their replies where states are.

    Every method raises UsageError for malformed arguments.

    ``tenant``: that of requests whose options name none. ``seals``: whether they go to a gateway,
    which seals ids of states and derives the tenant from the key.
    """

    def __init__(self, settings: Settings, tenant: str, *, seals: bool = False) -> None:
        # Who imports leanq and makes no client needs no traces.
        from leanq.fleet.tracing import caller

        self._caller = caller
        self._settings = settings
        self._seals = seals
        self._tenant = self._checked_tenant(arguments.text("tenant", tenant))
        # Callers' threads read this, and the client's thread writes it.
        self._states: LRUCache[str, Whereabouts] = LRUCache(_STATES_REMEMBERED)
        self._states_lock = Lock()
        self._fingerprints: dict[str, str] = {}

    def __reduce__(self) -> tuple[Callable[..., RequestBuilder], tuple[Settings, str]]:
        # A copy in another process learns for itself.
        return partial(RequestBuilder, seals=self._seals), (self._settings, self._tenant)

    def check(self, code: str, options: Check) -> PreparedRequest[Reply]:
        return self.checks(options)(code)

    def checks(self, options: Check) -> Callable[[str], PreparedRequest[Reply]]:
        """Returns a function that makes a check of each text, all with the same options."""
        options = _checked(Check.__optional_keys__, options)
        budget = _budget(options)

        def check(code: str) -> PreparedRequest[Reply]:
            request = Request("check", code=arguments.text("the Lean code", code), **budget)
            return self._of_code(request, options)

        return check

    def verify(
        self,
        target: str | None,
        code: str,
        theorems: Iterable[str],
        holes: Iterable[str],
        options: Check,
    ) -> PreparedRequest[Reply]:
        """Returns a verification that ``code`` proves ``target``, or the ``theorems``."""
        options = _checked(Check.__optional_keys__, options)
        request = Request(
            "verify",
            code=arguments.text("the candidate", code),
            target="" if target is None else arguments.text("the target", target),
            theorems=arguments.texts("theorems", theorems),
            holes=arguments.texts("holes", holes),
            **_budget(options),
        )
        return self._of_code(request, options)

    def _of_code(self, request: Request, options: Check) -> PreparedRequest[Reply]:
        environment = options.get("env", DEFAULT_ENVIRONMENT)
        header = text_hash(split_header(request.code).text)
        source = text_hash(request.code)
        fingerprint = self._fingerprints.get(environment)
        warmth = () if fingerprint is None else (snapshot_key(fingerprint, header),)

        def read(reply: Reply) -> Reply:
            if reply.fingerprint:
                self._fingerprints[environment] = reply.fingerprint
                keys = (snapshot_key(reply.fingerprint, each) for each in (source, header))
                self._learn(Whereabouts(environment, tuple(keys)), reply)
            return reply

        return self._prepared(Whereabouts(environment, warmth), request, options, read)

    def shared(self, options: Check) -> Check:
        """Checks ``options`` at once, and returns them for use with any number of codes."""
        # Keep the checked options: an iterator of axioms could be read only once.
        shared = _checked(Check.__optional_keys__, options)
        if shared.get("request_id") is not None:
            raise InvalidRequestError("a request id names one request, and these are many")
        self.check("-- any code", shared)
        return shared

    def step(self, state: str, tactic: str, options: Check) -> PreparedRequest[Reply]:
        options = _checked(Check.__optional_keys__, options)
        state = self._state(state)
        tactic = arguments.text("the tactic", tactic)
        if any(mark in tactic for mark in ("--", "/-", ";")):
            # Most tactics have none, and clients load little.
            from leanq.lean.goals.holes import read_tactic

            read_tactic(tactic)  # A comment alone is no tactic, and needs no worker to say so.
        request = Request("step", state=state, tactic=tactic, **_budget(options))
        known = self._whereabouts(state, options.get("env"))

        def read(reply: Reply) -> Reply:
            if known:
                self._learn(known, reply)
            return reply

        return self._prepared(known, request, options, read)

    def export(self, state: str, options: InEnvironment) -> PreparedRequest[bytes]:
        options = _checked(InEnvironment.__optional_keys__, options)
        state = self._state(state)
        known = self._whereabouts(state, options.get("env"))
        return self._prepared(known, Request("export", state=state), options, _payload)

    def import_(self, exported: bytes, options: InEnvironment) -> PreparedRequest[str]:
        options = _checked(InEnvironment.__optional_keys__, options)
        exported = arguments.data("the exported state", exported)
        # Reject damaged bytes here rather than send them.
        recipe = unpack_export(exported)
        environment = options.get("env", DEFAULT_ENVIRONMENT)

        def read(reply: Reply) -> str:
            if reply.state is None:
                raise RequestError(f"the import ended with the verdict {reply.verdict}")
            self._learn(whereabouts(recipe, environment), reply)
            return reply.state

        request = Request("import", payload=exported)
        return self._prepared(Whereabouts(environment), request, options, read)

    def echo(
        self, payload: bytes, delay_s: float, options: SubmitOptions
    ) -> PreparedRequest[bytes]:
        options = _checked(SubmitOptions.__optional_keys__, options)
        payload = arguments.data("the payload", payload)
        delay_s = arguments.number("delay_s", delay_s)
        # Leave the default out, so that it needs no check.
        delay: Any = {"delay_s": delay_s} if delay_s else {}
        request = Request("echo", payload=payload, **delay)
        return self._prepared(Whereabouts(ECHO_ENVIRONMENT), request, options, _payload)

    def request_id(self, request_id: str) -> str:
        """Returns ``request_id`` if it is a possible one; raises UsageError."""
        request_id = arguments.text("a request id", request_id)
        if shard_of(request_id) >= self._settings.shards:
            raise InvalidRequestError(
                f"{request_id!r} is of a shard that this queue does not have; it has "
                f"{self._settings.shards} (LEANQ_SHARDS)"
            )
        if not (request_id.isascii() and request_id.isprintable()):
            raise InvalidRequestError(f"{request_id!r} has characters that no request id may have")
        return request_id

    def _state(self, state: str) -> str:
        state = arguments.text("the state", state)
        if "-" in state and not self._seals:
            raise InvalidRequestError(
                f"{state!r:.80} is not a state of a Redis; expected 64 hexadecimal digits"
            )
        return state

    def _whereabouts(self, state: str, env: str | None) -> Whereabouts | None:
        with self._states_lock:
            known = self._states.get(state)
        if env is None or (known and env == known.environment):
            return known
        return Whereabouts(env)

    def _learn(self, where: Whereabouts, reply: Reply) -> None:
        """Notes that the states of a reply are where its request ran."""
        with self._states_lock:
            for state in (reply.state, *(sorry.state for sorry in reply.sorries)):
                if state is not None:
                    self._states[state] = where

    def _checked_tenant(self, tenant: str) -> str:
        if self._seals and tenant != DEFAULT_TENANT:
            raise InvalidRequestError(
                f"a gateway knows the tenant by its key, so it cannot be {tenant!r:.80} by the "
                "caller's word; leave the tenant out, and use a key of that tenant"
            )
        return check_name("tenant", tenant)

    def _prepared(
        self,
        where: Whereabouts | None,
        request: Request,
        options: SubmitOptions,
        read: Callable[[Reply], _T],
    ) -> PreparedRequest[_T]:
        """Returns the request, packed; ``where`` is None if its state has to be looked up."""
        priority = options.get("priority", 1)
        if not 0 <= priority < PRIORITIES:
            raise InvalidRequestError(f"priority must be 0 (most urgent), 1 or 2, got {priority}")
        deadline_s = options.get("deadline_s")
        if deadline_s is not None and not 0 < deadline_s <= 1e9:
            raise InvalidRequestError(f"deadline_s must be above 0, got {deadline_s:g}")
        request_id = options.get("request_id")
        body = wire.pack_request(request)
        # Echoes are for load tests, in which each request has to run.
        digest = b"" if request.op == "echo" else blake2b(body, digest_size=16).digest()
        traceparent = options.get("traceparent") or self._caller()
        campaign = options.get("campaign", "")
        if traceparent or campaign:
            # Add them after the digest, so that they do not keep identical requests from sharing a
            # run.
            request = replace(request, traceparent=traceparent, campaign=campaign)
            body = wire.pack_request(request)
        submission = Submission(
            request_id=new_request_id(self._settings.shards, digest)
            if request_id is None
            else self.request_id(request_id),
            environment=check_name("environment", where.environment) if where else "",
            tenant=self._checked_tenant(options.get("tenant", self._tenant)),
            priority=priority,
            deadline_ms=0 if deadline_s is None else max(1, int(deadline_s * 1000)),
            longest_run_ms=int(request.longest_run_s * 1000),
            body=body,
            affinity=where.warmth if where else (),
            digest=urlsafe_b64encode(digest).rstrip(b"=").decode() if digest else "",
        )
        given = options.get("labels")
        labels = msgspec.json.encode(given).decode() if given else "{}"
        return PreparedRequest(request, submission, read, labels)


def whereabouts(recipe: Recipe, environment: str) -> Whereabouts:
    """Returns where a state of this recipe can be stepped, if it is of ``environment``."""
    header = text_hash(split_header(recipe.source.code).text)
    keys = (recipe.snapshot_key, snapshot_key(recipe.source.fingerprint, header))
    return Whereabouts(environment, keys)


# Fields of a request that options set. The request has defaults for the others.
_OF_BUDGET = (
    *("timeout_s", "memory_mb", "scratch_mb", "audit", "trust_programs", "statements", "goals"),
    "profile",
)


def _budget(options: Check) -> dict[str, Any]:
    given: Mapping[str, Any] = options
    budget = {name: given[name] for name in _OF_BUDGET if name in given}
    if "timeout_s" in options:
        budget["wall_s"] = wall_for(options["timeout_s"])
    if "allow_axioms" in options:
        budget["allow_axioms"] = tuple(sorted(set(options["allow_axioms"])))
    return budget


_Options = TypeVar("_Options", SubmitOptions, InEnvironment, Check)


def _checked(known: frozenset[str], options: _Options) -> _Options:
    """Returns the options with values of the right types.

    Raises:
        TypeError: an unknown option, as Python raises for a function without ``**options``.
        InvalidRequestError: a value of a wrong type.
    """
    checked: Any = {}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"unexpected option {name!r}; there are {', '.join(sorted(known))}")
        checked[name] = _OPTIONS[name](name, value)
    return checked  # type: ignore[no-any-return]


def _payload(reply: Reply) -> bytes:
    if reply.payload is None:
        raise RequestError(f"the request ended with the verdict {reply.verdict}")
    return reply.payload
