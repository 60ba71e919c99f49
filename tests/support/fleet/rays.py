"""A stand-in for Ray: named actors in their states, and what is written down at its head.

``make ray-test`` runs the same against Ray itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    """As Ray's own."""


@dataclass
class Actor:
    """An actor: it waits for a node, or its process runs, and its worker may have joined."""

    name: str
    options: dict[str, Any]
    arguments: tuple[Any, ...]
    running: bool = False
    worker: bool = False
    held: int = 0
    told: bool = False
    killed: bool = False

    @property
    def drain(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: self._call("drain"))

    @property
    def renew(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: self._call("renew"))

    def _call(self, what: str) -> Call:
        self.told |= what == "drain" and self.running
        return Call(self)


@dataclass(eq=False)
class Call:
    """A call that an actor answers once it runs."""

    actor: Actor


@dataclass
class Ray:
    """One cluster, as its driver sees it."""

    actors: dict[str, Actor] = field(default_factory=dict)
    noted: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    initialised: bool = True
    away: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it in Ray's place."""
        modules = {
            "ray": {
                "init": self._init,
                "is_initialized": lambda: self.initialised,
                "get": self._get,
                "get_actor": self._get_actor,
                "get_runtime_context": lambda: SimpleNamespace(get_node_id=lambda: "here"),
                "kill": self._kill,
                "remote": self._remote,
                "wait": self._wait,
                "util": SimpleNamespace(list_named_actors=self._list),
            },
            "ray.exceptions": {"RayError": RayError},
            "ray.experimental": {
                "internal_kv": SimpleNamespace(
                    _internal_kv_put=self._put, _internal_kv_get=self._read
                )
            },
            "ray.util": {},
            "ray.util.scheduling_strategies": {
                "NodeAffinitySchedulingStrategy": lambda node, soft: (node, soft)
            },
        }
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "leanq.fleet.scaler.ray", raising=False)

    def _answer(self) -> None:
        if self.away:
            raise RayError("no answer")

    def _init(self, address: str, **_: object) -> None:
        assert address == "auto"
        if self.away:
            raise ConnectionError("no cluster")

    def _put(self, key: bytes, value: bytes, namespace: bytes) -> None:
        self._answer()
        self.noted[namespace, key] = value

    def _read(self, key: bytes, namespace: bytes) -> bytes | None:
        self._answer()
        return self.noted.get((namespace, key))

    def _list(self) -> list[str]:
        self._answer()
        return list(self.actors)

    def _get_actor(self, name: str) -> Actor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def _remote(self, _kind: type) -> SimpleNamespace:
        def options(**given: Any) -> SimpleNamespace:
            def remote(*arguments: Any) -> Actor:
                self._answer()
                if given["name"] in self.actors:
                    raise ValueError("the name is taken")
                made = Actor(given["name"], given, arguments)
                # What asks for no CPU waits for none.
                made.running = given["num_cpus"] == 0
                return self.actors.setdefault(made.name, made)

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=options)

    def _get(self, call: Call, timeout: float) -> None:
        if self.actors.get(call.actor.name) is not call.actor:
            raise RayError("the actor died")

    def _wait(
        self, calls: list[Call], num_returns: int, timeout: float
    ) -> tuple[list[Call], list[Call]]:
        assert (num_returns, timeout > 0) == (len(calls), True)
        answered: Callable[[Call], bool] = lambda call: call.actor.running  # noqa: E731
        return list(filter(answered, calls)), [call for call in calls if not answered(call)]

    def _kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        self.actors.pop(actor.name).killed = True
