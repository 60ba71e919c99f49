"""``make k8s-test``: every overlay and component against a real API server, by its own validation.

The API server is built from Debian bookworm's source package ``kubernetes`` (1.20), or taken from
``--folder``; a cluster that is there already is named by KUBECONFIG, and has to have the namespaces
``leanq`` and ``leanq-nodes``, as nothing is created there: all are dry runs. What the old version
does not know is rewritten or left out, and named. No pod runs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from support.paths import ROOT

from engines.machine import Unavailable, in_namespaces, install, run, until

OLD = "1.20"
NAMESPACES = ("leanq", "leanq-nodes")
_SOURCE_S, _COMPILE_S = 300.0, 3600.0
# Of operators that are not there; an API server as old as this falls over its own checks of them.
_CUSTOM = ("PodMonitor", "PrometheusRule", "ScaledObject")


def main() -> int:
    """Runs the course."""
    return in_namespaces("engines.cluster", course)


def course(folder: Path) -> None:
    """All overlays, in the cluster that is named or on an API server of ours."""
    if named := os.environ.get("KUBECONFIG"):
        print(f"the cluster of {named}: dry runs alone", flush=True)
        _validate(Path(named), old=False)
        return
    program = _program(folder)
    with _api_server(folder, program) as config:
        print(f"an API server of Debian's source package ({OLD}) runs", flush=True)
        _validate(config, old=True)


# The API server


def _program(folder: Path) -> Path:
    """The API server, built where it is not there; raises Unavailable."""
    install(["etcd-server"], ["etcd"], _SOURCE_S)
    if shutil.which("kubectl") is None:
        raise Unavailable("kubectl is not installed")
    made = folder / "bin" / "kube-apiserver"
    if made.exists():
        return made
    install(["golang-go", "dpkg-dev", "rsync", "make"], ["go", "dpkg-source", "rsync"], _SOURCE_S)
    place = _source(folder)
    print("building the API server: a quarter of an hour", flush=True)
    go = os.environ | {"CGO_ENABLED": "0", "GO111MODULE": "off", "GOFLAGS": "-p=1"}
    go |= {"GOPATH": str(folder / "go"), "GOCACHE": str(folder / "cache"), "HOME": str(folder)}
    for command in (
        ("make", "generated_files"),
        ("go", "build", "-trimpath", "-ldflags=-s -w", "-o", str(made), "./cmd/kube-apiserver"),
    ):
        run("nice", "-n", "10", *command, environ=go, folder=place, timeout_s=_COMPILE_S)
    return made


def _source(folder: Path) -> Path:
    """The source, where Go looks for it."""
    apt = folder / "apt"
    (apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    listed = Path("/etc/apt/sources.list.d/debian.sources").read_text()
    (apt / "kubernetes.sources").write_text(listed.replace("Types: deb\n", "Types: deb-src\n"))
    (apt / "apt.conf").write_text(
        f'Dir::Etc::SourceList "/dev/null"; Dir::Etc::SourceParts "{apt}";\n'
        f'Dir::State::Lists "{apt}/lists"; APT::Sandbox::User "root";\n'
    )
    environ = os.environ | {"APT_CONFIG": f"{apt}/apt.conf"}
    try:
        run("apt-get", "update", "-q", environ=environ, timeout_s=_SOURCE_S)
        get = ("apt-get", "source", "-q", "kubernetes")
        run(*get, environ=environ, folder=folder, timeout_s=_SOURCE_S)
    except AssertionError as error:
        raise Unavailable(f"the source package cannot be fetched: {error}") from None
    (source,) = (path for path in folder.glob("kubernetes-*") if path.is_dir())
    place = folder / "go" / "src" / "k8s.io" / "kubernetes"
    place.parent.mkdir(parents=True)
    return source.rename(place)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _api_server(folder: Path, program: Path) -> Iterator[Path]:
    """The kubeconfig of its administrator."""
    place = folder / "state"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    etcd, peer, port = _free_port(), _free_port(), _free_port()
    token, key = secrets.token_hex(16), place / "accounts.key"
    (place / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    run("openssl", "genrsa", "-out", key, "2048")
    clients, peers = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
    commands: dict[str, list[str | Path]] = {
        "etcd": [
            *("etcd", "--data-dir", place / "etcd", "--initial-cluster", f"default={peers}"),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
        ],
        "kube-apiserver": [
            *(program, f"--etcd-servers={clients}", f"--secure-port={port}"),
            *("--bind-address=127.0.0.1", f"--cert-dir={place}", "--authorization-mode=RBAC"),
            *(f"--token-auth-file={place}/tokens.csv", "--service-cluster-ip-range=10.9.0.0/24"),
            *("--service-account-issuer=here", f"--service-account-key-file={key}"),
            *(f"--service-account-signing-key-file={key}", "--endpoint-reconciler-type=none"),
        ],
    }
    config = _kubeconfig(place / "admin.yaml", f"https://127.0.0.1:{port}", token)
    with contextlib.ExitStack() as at_end:
        for name, command in commands.items():
            log = at_end.enter_context((place / f"{name}.log").open("w"))
            process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
            at_end.callback(process.wait, 60)
            at_end.callback(process.terminate)
        until(lambda: _is_up(config), 180.0)
        yield config


def _kubeconfig(path: Path, url: str, token: str) -> Path:
    # Its certificate is its own, made a moment ago.
    cluster = {"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": True}}
    user = {"name": "u", "user": {"token": token}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    whole = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "users": [user]}
    path.write_text(yaml.safe_dump({**whole, "contexts": [context], "current-context": "c"}))
    return path


def _is_up(config: Path) -> bool:
    command = ["kubectl", "get", "namespace", "default", "--request-timeout=5s"]
    environ = os.environ | {"KUBECONFIG": str(config)}
    return subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 0


# The overlays


def _render(folder: str) -> list[dict[str, Any]]:
    text = run("kubectl", "kustomize", ROOT / "k8s" / folder)
    return [each for each in yaml.safe_load_all(text) if each]


def _for_old(objects: list[dict[str, Any]], notes: set[str]) -> list[dict[str, Any]]:
    """As the old version can take them; ``notes`` says what it does not check."""
    for each in objects:
        if each["kind"] == "PodDisruptionBudget":
            each["apiVersion"] = "policy/v1beta1"
            each["spec"].pop("unhealthyPodEvictionPolicy", None)
            notes.add("PodDisruptionBudget as policy/v1, unhealthyPodEvictionPolicy")
        elif each["kind"] == "HorizontalPodAutoscaler":
            each["apiVersion"] = "autoscaling/v2beta2"
            notes.add("HorizontalPodAutoscaler as autoscaling/v2")
        elif each["kind"] == "Deployment":
            spec = each["spec"]["template"]["spec"]
            contexts = [spec, *(c["securityContext"] for c in spec["containers"])]
            for where, field in ((spec, "hostUsers"), *((c, "appArmorProfile") for c in contexts)):
                if where.pop(field, None) is not None:
                    notes.add(field)
        elif each["kind"] in _CUSTOM:
            notes.add(each["kind"])
    return [each for each in objects if each["kind"] not in _CUSTOM]


def _validate(config: Path, *, old: bool) -> None:
    environ = os.environ | {"KUBECONFIG": str(config)}
    notes: set[str] = set()

    def apply(objects: list[dict[str, Any]], *options: str) -> int:
        sent = _for_old(objects, notes) if old else objects
        text = yaml.safe_dump_all(sent)
        run("kubectl", "apply", *options, "-f", "-", environ=environ, text=text, timeout_s=120)
        return len(sent)

    for name in NAMESPACES if old else ():
        apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}])
    folders = ["nodes", "base", *(f"overlays/{p.name}" for p in (ROOT / "k8s/overlays").iterdir())]
    for folder in sorted(folders):
        count = apply(_render(folder), "--dry-run=server")
        print(f"{folder}: {count} objects pass the server's validation", flush=True)
    with contextlib.ExitStack() as at_end:
        for component in sorted((ROOT / "k8s/components").iterdir()):
            made = Path(at_end.enter_context(tempfile.TemporaryDirectory())).resolve()
            overlay = os.path.relpath(ROOT / "k8s/overlays/gke-spot", made)
            text = f"resources: [{overlay}]\ncomponents: [{os.path.relpath(component, made)}]\n"
            (made / "kustomization.yaml").write_text(text)
            count = apply(_render(str(made)), "--dry-run=server")
            print(f"gke-spot with {component.name}: {count} objects pass", flush=True)
    for note in sorted(notes):
        print(f"not checked, as {OLD} does not know it: {note}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
