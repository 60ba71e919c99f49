"""What is deployed, as data: files, the overlays as kubectl renders them, and leanq's own words."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import click
import pytest
import yaml

from leanq.cli import cli
from leanq.commands.submit import submit
from leanq.lean.driver import EchoDriver
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT
from leanq.queue.settings import variables
from support.paths import ROOT

OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
# Also the base, parts of which every overlay here replaces and another one may not.
EVERYTHING = [*(f"overlays/{name}" for name in OVERLAYS), "base"]

Object = Mapping[str, Any]

ECHO_ENVIRONMENT = EchoDriver().environment
_FLAGS = {"--make-key", "--json", "--require-walls", "--trust-steps"}
_SUFFIXES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9}


def read(path: str) -> Any:
    """A YAML file of the repository."""
    return yaml.safe_load((ROOT / path).read_text())


RELEASE: str = read("compose.yaml")["x-leanq"]["image"].partition(":")[2]
"""The release whose image all files here name."""


@lru_cache
def render(folder: str) -> tuple[Object, ...]:
    """The objects of an overlay, or of another kustomization below ``k8s``."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(ROOT / "k8s" / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "kustomize warns of what is deprecated"
    return tuple(yaml.safe_load_all(done.stdout))


def overlay(name: str) -> tuple[Object, ...]:
    return render(f"overlays/{name}")


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


@dataclass(frozen=True)
class Pod:
    """What a Deployment makes, with its one container."""

    name: str
    labels: Mapping[str, str]
    spec: Object
    container: Object

    @property
    def is_ours(self) -> bool:
        return bool(self.labels["app.kubernetes.io/name"] == "leanq")

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def command(self) -> tuple[str, dict[str, str]]:
        return parse(self.container["args"])

    @property
    def environments(self) -> list[str]:
        """Those that a worker offers, or a scaler sizes."""
        values = [arg.removeprefix("--env=") for arg in self.container["args"] if "--env" in arg]
        if self.command[1].get("--driver") == "echo":
            return [ECHO_ENVIRONMENT]
        return [value.partition("=")[0] for value in values] or [DEFAULT_ENVIRONMENT]

    def matches(self, selector: Mapping[str, Any]) -> bool:
        """As Kubernetes matches; an empty selector matches all."""
        assert set(selector) <= {"matchLabels"}, "only matchLabels are understood here"
        return set(selector.get("matchLabels", {}).items()) <= set(self.labels.items())


def pods(objects: Sequence[Object]) -> list[Pod]:
    """The pods of all Deployments; there is nothing else that makes pods."""
    assert not of_kind(objects, "Pod", "StatefulSet", "DaemonSet", "Job", "CronJob")
    found = []
    for each in of_kind(objects, "Deployment"):
        template = each["spec"]["template"]
        spec = template["spec"]
        assert "initContainers" not in spec
        (container,) = spec["containers"]
        labels = template["metadata"]["labels"]
        found.append(Pod(each["metadata"]["name"], labels, spec, container))
    return found


def pod(objects: Sequence[Object], name: str) -> Pod:
    (found,) = (each for each in pods(objects) if each.name == name)
    return found


def parse(args: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The command of leanq and its options; fails where leanq would not understand them."""
    command, *rest = args
    found = cli.get_command(click.Context(cli), command)
    assert found, f"leanq has no command {command!r}"
    known = {word for param in found.params for word in param.opts}
    options: dict[str, str] = {}
    words = iter(rest)
    for word in words:
        name, equals, value = word.partition("=")
        assert name in known, f"leanq {command} has no option {name!r}"
        options[name] = value if equals or name in _FLAGS else next(words)
    return command, options


def quantity(text: str) -> float:
    """A quantity of Kubernetes: CPUs, or bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|k|M|G|Ki|Mi|Gi|)", text)
    assert match, f"{text!r} is no quantity"
    number, suffix = match.groups()
    return float(number) * (1e-3 if suffix == "m" else _SUFFIXES[suffix])


def settings() -> set[str]:
    """The environment variables that leanq knows."""
    return {name for name, _, _ in variables()}


def request_bytes() -> int:
    """The memory that a request may take by default, its scratch folder included."""
    options = [each for each in submit.params if each.name in ("memory_mb", "scratch_mb")]
    assert len(options) == 2
    return sum(int(option.default) for option in options) << 20


def strings(value: Any) -> Iterator[str]:
    """All strings in a document, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from strings(key)
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def check_pinned(image: str) -> None:
    name, colon, tag = image.rpartition(":")
    assert name
    assert colon
    assert re.match(r"v?\d+\.\d+", tag), f"{image} may be another tomorrow"
