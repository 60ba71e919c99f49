"""``make image-test``: the Dockerfile and compose.yaml as they stand, on podman and on Docker.

The image is built and examined; compose's fleet gives the samples' verdicts, grows, loses a worker
to SIGKILL and one to SIGTERM, and its server. Needs root on Debian bookworm, and a mirror of
Debian's packages and one of PyPI's; pulls nothing. Says why where an engine cannot be had; anything
else that is lacking fails it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import yaml
from support.paths import ROOT

from engines.engine import (
    Engine,
    docker,
    mathlib_stand_in,
    podman,
    root_file_system,
    stand_ins,
)
from engines.machine import NoEngine, in_namespaces, run, until
from leanq import LeanQClient

MATRIX = ROOT / "deploy" / "docker-bake.json"
# On its stand-in.
BY_MATHLIB = (
    "printf 'prelude\\nimport Mathlib\\ntheorem t (p : Prop) (h : p) : p := ofMathlib p h\\n'"
    " | LEAN_PATH=/srv/lean lean --stdin"
)
SERVICES_OF_COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())[
    "services"
]
IMAGE: str = SERVICES_OF_COMPOSE["worker"]["image"]
VERSION = IMAGE.partition(":")[2]
# A URL has a meaning for each of these signs.
PASSWORD = "a/b#c%d?e@f"
HARDENED = ["--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
HARDENED += ["--security-opt", "no-new-privileges"]
# Of `leanq doctor`: something does not work. The image has no server; its stand-in may have one.
DOCTORS_CODES = (0, 3)
# docs/operations/containers.md has the table.
ALL_WALLS = {"user-ns", "mount-ns", "pid-ns", "net-ns", "ipc-ns", "landlock", "seccomp"}
SAMPLES = sorted((ROOT / "examples").glob("*.lean"))
BURST = 40
SERVICES = ("valkey", "worker", "exporter", "gateway")
# Some seconds of Lean.
LONG = "prelude\nimport Core\n" + "\n".join(
    f"theorem t{n} (p q : Prop) : And p q → And q p := by\n"
    "  intro h\n  constructor\n  exact h.right\n  exact h.left"
    for n in range(1200)
)


def main() -> int:
    """Runs the course."""
    return in_namespaces("engines.image", course)


def course(folder: Path) -> None:
    """All engines, one after the other."""
    started = time.monotonic()
    root_file_system(folder)
    for start in (podman, docker):
        try:
            with start(folder) as engine:
                Course(engine, folder).run()
                took_s = time.monotonic() - started
                print(f"RAN on {engine.name}; {took_s:.0f} s so far", flush=True)
        except NoEngine as why:
            print(f"SKIPPED: {start.__name__}: {why}", flush=True)


class Course:
    """What is tried with one engine."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        with socket.socket() as free, socket.socket() as other:
            free.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self._port, self._http_port = free.getsockname()[1], other.getsockname()[1]
        self._environ = dict(engine.environ) | {
            "LEANQ_PORT": str(self._port),
            "LEANQ_PASSWORD": PASSWORD,
            "LEANQ_HTTP_PORT": str(self._http_port),
            "WORKER_CPUS": str(min(2, len(os.sched_getaffinity(0)))),
        }
        self._client_environ = os.environ | {
            "LEANQ_URL": f"redis://127.0.0.1:{self._port}",
            "LEANQ_PASSWORD": PASSWORD,
        }
        self._began = time.monotonic()

    def run(self) -> None:
        """Everything, in order."""
        stages = stand_ins(self._engine, self._folder)
        self._done("stand-ins for what would be pulled")
        options = [f"--build-context={name}={source}" for name, source in stages.items()]
        self._engine.make(IMAGE, ROOT, f"--build-arg=LEANQ_VERSION={VERSION}", *options)
        self._done("the image is built")
        self._image()
        if self._engine.bake:
            self._matrix(stages)
        with self._fleet():
            self._samples()
            self._over_http()
            self._no_way_out()
            self._killed_among_three()
            self._drained()
            self._server_killed()

    def _done(self, text: str) -> None:
        now = time.monotonic()
        print(f"{self._engine.name}: {text} ({now - self._began:.1f} s)", flush=True)
        self._began = now

    # The image

    def _image(self) -> None:
        hardened = ("run", *HARDENED)
        assert self._engine.do(*hardened, IMAGE, "--version") == f"leanq, version {VERSION}\n"
        inside = "id -u; command -v gcc cc clang git curl make; ls /opt/lean/bin/clang; "
        inside += "find / -xdev -perm /6000 -type f"
        shell = (*hardened, "--entrypoint", "sh", IMAGE, "-c", f"{{ {inside}; }} 2>/dev/null")
        said = self._engine.do(*shell, codes=(0, 1)).split()
        assert said == ["10001"], f"in the image are tools, or files that raise rights: {said[1:]}"
        self._done(f"{self._size_mb(IMAGE):.0f} MB, with no compiler, no setuid file, no root")
        compose = [
            f"--security-opt={each}" for each in SERVICES_OF_COMPOSE["worker"]["security_opt"]
        ]
        wanted = self._engine.walls
        for what, extra, least in (
            ("the engine's own profile", [], wanted),
            ("systempaths=unconfined", ["--security-opt=systempaths=unconfined"], wanted),
            ("compose.yaml's options", compose, ALL_WALLS),
        ):
            findings = self._doctor(extra)
            walls = _walls(findings["sandbox"]["text"])
            for name in ("lean", "judge", "check"):
                assert findings[name]["works"], findings[name]
            assert {re.sub(r"-\d+$", "", wall) for wall in walls} >= least, walls
            self._done(f"walls with {what}: {', '.join(walls)}")

    def _size_mb(self, image: str) -> float:
        return int(self._engine.do("image", "inspect", "--format", "{{.Size}}", image)) / 1e6

    def _matrix(self, stages: Mapping[str, str]) -> None:
        """Builds each image of the matrix, and has its judge accept a text on its library."""
        contexts = {f"*.contexts.{name}": source for name, source in stages.items()}
        mathlib = mathlib_stand_in(self._folder)
        contexts["*-mathlib-*.contexts.project"] = mathlib
        self._engine.make_matrix(MATRIX, contexts)
        self._done("the matrix is built")
        for row in json.loads(MATRIX.read_text())["target"]["image"]["matrix"]["image"]:
            image = f"leanq:{VERSION}-{row['tag']}"
            library = ["--env", "mathlib=/srv/lean"] if row["project"] else []
            said = self._engine.do(
                "run", *HARDENED, image, "doctor", "--json", *library, codes=DOCTORS_CODES
            )
            findings = {each["what"]: each for each in map(json.loads, said.splitlines())}
            for name in ("lean", "judge", "check"):
                assert findings[name]["works"], findings[name]
            if library:
                shell = ("run", *HARDENED, "--entrypoint", "sh", image, "-c")
                self._engine.do(*shell, f"test -s /srv/lean/.leanq-hashes && {BY_MATHLIB}")
            self._done(f"{image}: {self._size_mb(image):.0f} MB; its Lean and judge work")

    def _doctor(self, extra: Sequence[str]) -> dict[str, Any]:
        doctor = ("doctor", "--json")
        command = ("run", *HARDENED, *extra, IMAGE, *doctor)
        said = self._engine.do(*command, codes=DOCTORS_CODES, folder=ROOT)
        return {found["what"]: found for found in map(json.loads, said.splitlines())}

    # The fleet

    def _compose(self, *args: str) -> str:
        return run(*self._engine.compose, *args, environ=self._environ, folder=ROOT, timeout_s=180)

    def _containers(self, service: str, *options: str) -> list[str]:
        labels = ["com.docker.compose.project=leanq", f"com.docker.compose.service={service}"]
        filters = [f"--filter=label={label}" for label in labels]
        return self._engine.do("ps", "-q", *options, *filters).split()

    def _is_healthy(self, service: str, count: int = 1) -> bool:
        found = self._containers(service)
        return len(found) == count and all(map(self._container_is_healthy, found))

    def _container_is_healthy(self, container: str) -> bool:
        if self._engine.health:
            how = ("inspect", "--format", "{{.State.Health.Status}}", container)
            return self._engine.do(*how).strip() == "healthy"
        # Without systemd this engine never looks by itself.
        command = [*self._engine.command, "healthcheck", "run", container]
        environ = dict(self._engine.environ)
        return (
            subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 0
        )

    @contextlib.contextmanager
    def _fleet(self) -> Iterator[None]:
        try:
            self._compose("up", "-d", "--no-build")
            for service in SERVICES:
                until(lambda service=service: self._is_healthy(service))  # type: ignore[misc]
            self._done("compose up: server, worker, exporter and gateway are healthy")
            yield
        except BaseException:
            for service in SERVICES:
                for container in self._containers(service):
                    print(f"--- {service} {container}", file=sys.stderr)
                    subprocess.run(
                        [*self._engine.command, "logs", "--tail", "40", container],
                        env=dict(self._engine.environ),
                        check=False,
                    )
            raise
        finally:
            # podman-compose leaves what it has added.
            for container in self._containers("worker", "-a"):
                self._engine.do("rm", "-f", container)
            self._compose("down", "-v")
        assert not self._containers("worker")
        self._done("compose down")

    def _leanq(self, *args: str | Path, codes: Sequence[int] = (0,)) -> str:
        command = (sys.executable, "-m", "leanq", *args)
        return run(*command, environ=self._client_environ, codes=codes, timeout_s=120)

    @contextlib.contextmanager
    def _client(self) -> Iterator[LeanQClient]:
        before = dict(os.environ)
        os.environ.update(self._client_environ)
        try:
            with LeanQClient() as lean:
                yield lean
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _samples(self) -> None:
        said = self._leanq("submit", "--json", *SAMPLES, codes=(1,))
        got = {
            Path(each["file"]).name: each["verdict"] for each in map(json.loads, said.splitlines())
        }
        # A sample's first line begins with what it comes to.
        wanted = {path.name: path.read_text().split()[1].rstrip(":").lower() for path in SAMPLES}
        assert got == wanted, f"{got}, and not {wanted}"
        self._done(f"{len(got)} samples have the verdicts that they should")

    def _over_http(self) -> None:
        url = f"http://127.0.0.1:{self._http_port}"
        (gateway,) = self._containers("gateway")
        command = [*self._engine.command, "logs", gateway]
        environ = dict(self._engine.environ)
        logs = subprocess.run(command, env=environ, capture_output=True, check=True)
        found = re.search(rb"shown this once: ([0-9a-f]{64})", logs.stdout + logs.stderr)
        assert found, "the gateway's first start prints a key"
        with LeanQClient(url, key=found[1].decode()) as lean:
            assert lean.check(_small(0)).result(120).verdict == "accepted"
        assert httpx2.get(f"{url}/v1/status").status_code == 401
        self._done(
            "the gateway takes the key that its first start prints, and no caller without one"
        )

    def _no_way_out(self) -> None:
        for service in ("worker", "exporter"):
            (container,) = self._containers(service)
            routes = self._engine.do("exec", container, "cat", "/proc/net/route").splitlines()
            assert not [line for line in routes[1:] if line.split()[1] == "00000000"], routes
        self._done("worker and exporter have no route out")

    def _killed_among_three(self) -> None:
        self._compose("up", "-d", "--no-build", "--no-recreate", "--scale", "worker=3")
        until(lambda: self._is_healthy("worker", 3))
        until(lambda: len(json.loads(self._leanq("status", "--json"))["workers"]) == 3)
        with self._client() as lean:
            futures = [lean.check(_small(n)) for n in range(BURST)]
            self._engine.do("kill", "-s", "KILL", self._containers("worker")[0])
            verdicts = [future.result(120).verdict for future in futures]
        assert verdicts == ["accepted"] * BURST, verdicts
        self._done(f"three workers, one killed: {BURST} of {BURST} accepted")

    def _drained(self) -> None:
        # podman-compose adds containers, and takes none away.
        container, *others = self._containers("worker")
        for other in others:
            self._engine.do("stop", other)
        with self._client() as lean:
            before = self._released()
            future = lean.check(LONG)
            until(lambda: json.loads(self._leanq("status", "--json"))["running"] == 1)
            began = time.monotonic()
            self._engine.do("stop", container)
            took_s = time.monotonic() - began
            reply = future.result(10)
        code = self._engine.do("inspect", "--format", "{{.State.ExitCode}}", container).strip()
        assert (code, reply.verdict, reply.attempts) == ("0", "accepted", 1), (code, reply)
        assert self._released() == before
        self._done(f"SIGTERM: drained in {took_s:.1f} s, the request ended, code 0")
        self._engine.do("start", container)
        until(lambda: self._is_healthy("worker"))

    def _released(self) -> int:
        return int(json.loads(self._leanq("status", "--json"))["released"])

    def _server_killed(self) -> None:
        (server,) = self._containers("valkey")
        with self._client() as lean:
            futures = [lean.check(_small(BURST + n)) for n in range(BURST)]
            until(lambda: json.loads(self._leanq("status", "--json"))["running"] > 0)
            # The server may lose the writes of its last second; clients submit them again.
            self._engine.do("kill", "-s", "KILL", server)
            self._engine.do("start", server)
            verdicts = [future.result(120).verdict for future in futures]
        assert verdicts == ["accepted"] * BURST, verdicts
        self._done(f"the server killed and started: {BURST} of {BURST} accepted")


def _walls(text: str) -> list[str]:
    """The walls in what ``leanq doctor`` says of the sandbox."""
    return text.removeprefix("only ").partition(";")[0].split(", ")


def _small(number: int) -> str:
    return f"prelude\ntheorem small{number} (p : Prop) (h : p) : p := h\n"


if __name__ == "__main__":
    sys.exit(main())
