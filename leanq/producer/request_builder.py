"""What a caller asks for, as submissions: arguments checked, and given a place in the queue."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Generic, TypedDict, TypeVar

from leanq.errors import InvalidRequestError, RequestError
from leanq.lean.recipes import Recipe, snapshot_key, text_hash, unpack_export
from leanq.lean.syntax import split_header
from leanq.queue import wire
from leanq.queue.keys import new_request_id, shard_of
from leanq.queue.requests import PRIORITIES, Reply, Request, wall_for
from leanq.queue.results import Submission
from leanq.queue.settings import Settings, check_name

DEFAULT_ENVIRONMENT = "default"
ECHO_ENVIRONMENT = "echo"

_T = TypeVar("_T")

# States whose environment need not be looked up; a search seldom goes back further.
_STATES_REMEMBERED = 100_000


class Placing(TypedDict, total=False):
    """Where a request goes in the queue.

    Attributes:
        tenant: who shares fairly with other tenants; the client's own unless given.
        priority: 0 (most urgent) to 2; 1 unless given.
        deadline_s: seconds in the queue after which the verdict is ``expired``.
        request id: a name for the request; the same name again gives the same reply.
        traceparent: the caller's trace context (W3C), which the worker's log then names.
    """

    traceparent: str
    tenant: str
    priority: int
    deadline_s: float | None
    request_id: str | None


class InEnvironment(Placing, total=False):
    """What is done in one environment.

    Attributes:
        env: the environment, as a worker offers it; ``default`` unless given, or that of the
            state that is asked for.
    """

    env: str


class Check(InEnvironment, total=False):
    """How code is checked, or a tactic tried.

    Attributes:
        timeout_s: budget of CPU time in seconds (60); beyond it the verdict is ``timeout``.
        memory_mb: resident memory in MiB (4096); beyond it the verdict is ``memory``.
        allow_axioms: axioms allowed beside the environment's own.
        audit: whether what Lean accepts is judged and audited (True).
    """

    timeout_s: float
    memory_mb: int
    allow_axioms: Iterable[str]
    audit: bool


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a state can be stepped: its environment, and who is warm for it."""

    environment: str
    warmth: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest(Generic[_T]):
    """One request to be sent, and what its reply means to the caller.

    ``state``: the one that it is about, if any. Where that is unknown, the submission has no
    environment.
    """

    submission: Submission
    read: Callable[[Reply], _T]
    state: str = ""


class RequestBuilder:
    """Makes the calls of one client, and learns from their replies where states are.

    Every method raises UsageError for malformed arguments.
    """

    def __init__(self, settings: Settings, tenant: str) -> None:
        self._settings = settings
        self._tenant = check_name("tenant", tenant)
        self._states: OrderedDict[str, Whereabouts] = OrderedDict()
        self._fingerprints: dict[str, str] = {}

    def check(self, code: str, options: Check) -> PreparedRequest[Reply]:
        """A check of ``code``."""
        _only(Check.__optional_keys__, options)
        request = _budgeted(Request("check", code=_text(code)), options)
        environment = options.get("env", DEFAULT_ENVIRONMENT)
        header, source = text_hash(split_header(code).text), text_hash(code)
        fingerprint = self._fingerprints.get(environment)
        warmth = () if fingerprint is None else (snapshot_key(fingerprint, header),)

        def read(reply: Reply) -> Reply:
            if reply.fingerprint:
                self._fingerprints[environment] = reply.fingerprint
                keys = (snapshot_key(reply.fingerprint, each) for each in (source, header))
                self._learn(Whereabouts(environment, tuple(keys)), reply)
            return reply

        return PreparedRequest(self._submission(request, environment, options, warmth), read)

    def shared(self, options: Check) -> Check:
        """``options`` for any number of checks; what is wrong with them is wrong at once."""
        if options.get("request_id") is not None:
            raise InvalidRequestError("a request id names one request, and these are many")
        # An iterator could be read only once.
        shared: Check = {**options, "allow_axioms": _axioms(options)}
        self.check("-- any code", shared)
        return shared

    def step(self, state: str, tactic: str, options: Check) -> PreparedRequest[Reply]:
        """A step: ``tactic`` tried on ``state``."""
        _only(Check.__optional_keys__, options)
        request = _budgeted(Request("step", state=state, tactic=tactic), options)
        known = self._whereabouts(state, options.get("env"))

        def read(reply: Reply) -> Reply:
            if known:
                self._learn(known, reply)
            return reply

        return self._at(known, state, request, options, read)

    def export(self, state: str, options: InEnvironment) -> PreparedRequest[bytes]:
        """The export of ``state``."""
        _only(InEnvironment.__optional_keys__, options)
        known = self._whereabouts(state, options.get("env"))
        return self._at(known, state, Request("export", state=state), options, _payload)

    def import_(self, exported: bytes, options: InEnvironment) -> PreparedRequest[str]:
        """The import of an exported state."""
        _only(InEnvironment.__optional_keys__, options)
        # What is damaged need not travel.
        recipe = unpack_export(exported)
        environment = options.get("env", DEFAULT_ENVIRONMENT)

        def read(reply: Reply) -> str:
            if reply.state is None:
                raise RequestError(f"the import ended with the verdict {reply.verdict}")
            self._learn(whereabouts(recipe, environment), reply)
            return reply.state

        request = Request("import", payload=exported)
        return PreparedRequest(self._submission(request, environment, options), read)

    def echo(self, payload: bytes, delay_s: float, placing: Placing) -> PreparedRequest[bytes]:
        """An echo of ``payload``."""
        _only(Placing.__optional_keys__, placing)
        request = Request("echo", payload=payload, delay_s=delay_s)
        return PreparedRequest(self._submission(request, ECHO_ENVIRONMENT, placing), _payload)

    def request_id(self, request_id: str) -> str:
        """``request_id`` if it can be one; raises UsageError."""
        if shard_of(request_id) >= self._settings.shards:
            raise InvalidRequestError(
                f"{request_id!r} is of a shard that this queue does not have; it has "
                f"{self._settings.shards} (LEANQ_SHARDS)"
            )
        if not (request_id.isascii() and request_id.isprintable()):
            raise InvalidRequestError(f"{request_id!r} has characters that no request id may have")
        return request_id

    def _whereabouts(self, state: str, env: str | None) -> Whereabouts | None:
        known = self._states.get(state)
        if env is None or (known and known.environment == env):
            return known
        return Whereabouts(env)

    def _learn(self, where: Whereabouts, reply: Reply) -> None:
        """The states of a reply are where the request was."""
        for state in (reply.state, *(sorry.state for sorry in reply.sorries)):
            if state is not None:
                self._states[state] = where
                self._states.move_to_end(state)
        while len(self._states) > _STATES_REMEMBERED:
            self._states.popitem(last=False)

    def _at(
        self,
        where: Whereabouts | None,
        state: str,
        request: Request,
        placing: Placing,
        read: Callable[[Reply], _T],
    ) -> PreparedRequest[_T]:
        if where is None:
            return PreparedRequest(self._submission(request, None, placing), read, state)
        return PreparedRequest(
            self._submission(request, where.environment, placing, where.warmth), read, state
        )

    def _submission(
        self,
        request: Request,
        environment: str | None,
        placing: Placing,
        warmth: tuple[str, ...] = (),
    ) -> Submission:
        priority = placing.get("priority", 1)
        if priority not in range(PRIORITIES):
            raise InvalidRequestError(f"priority is {priority}; 0 is most urgent, 2 least")
        deadline_s = placing.get("deadline_s")
        if deadline_s is not None and not 0 < deadline_s <= 1e9:
            raise InvalidRequestError(f"deadline is {deadline_s:g} s; it must be above 0")
        request_id = placing.get("request_id")
        body = wire.pack_request(request)
        # An echo is for load tests, where each request is to run.
        digest = b"" if request.op == "echo" else blake2b(body, digest_size=16).digest()
        if traceparent := placing.get("traceparent"):
            # Whoever asks the same may share a run, wherever it is traced to.
            body = wire.pack_request(replace(request, traceparent=traceparent))
        return Submission(
            request_id=new_request_id(self._settings.shards, digest)
            if request_id is None
            else self.request_id(request_id),
            environment="" if environment is None else check_name("environment", environment),
            tenant=check_name("tenant", placing.get("tenant", self._tenant)),
            priority=int(priority),
            deadline_ms=0 if deadline_s is None else max(1, int(deadline_s * 1000)),
            longest_run_ms=int(request.longest_run_s * 1000),
            body=body,
            affinity=warmth,
            digest=urlsafe_b64encode(digest).rstrip(b"=").decode() if digest else "",
        )


def whereabouts(recipe: Recipe, environment: str) -> Whereabouts:
    """Where a state of this recipe can be stepped, if ``environment`` is its environment."""
    header = text_hash(split_header(recipe.source.code).text)
    keys = (recipe.snapshot_key, snapshot_key(recipe.source.fingerprint, header))
    return Whereabouts(environment, keys)


def _budgeted(request: Request, options: Check) -> Request:
    timeout_s = options.get("timeout_s", 60.0)
    return replace(
        request,
        timeout_s=timeout_s,
        wall_s=wall_for(timeout_s),
        memory_mb=options.get("memory_mb", 4096),
        allow_axioms=tuple(sorted(set(_axioms(options)))),
        audit=options.get("audit", True),
    )


def _axioms(options: Check) -> tuple[str, ...]:
    names = options.get("allow_axioms", ())
    # Each of its letters would be allowed.
    if isinstance(names, str):
        raise InvalidRequestError(f"allow_axioms is the text {names!r:.80}; give a list of names")
    return tuple(names)


def _text(code: object) -> str:
    if not isinstance(code, str):
        raise InvalidRequestError(f"Lean code is text; this is {type(code).__name__}")
    return code


def _only(known: frozenset[str], options: Mapping[str, object]) -> None:
    """What Python does by itself for a function without ``**options``."""
    if not options.keys() <= known:
        unknown = min(options.keys() - known)
        raise TypeError(f"unexpected option {unknown!r}; there are {', '.join(sorted(known))}")


def _payload(reply: Reply) -> bytes:
    if reply.payload is None:
        raise RequestError(f"the request ended with the verdict {reply.verdict}")
    return reply.payload
