"""``make k8s-test``: every overlay and component on a real API server, and ``local`` at work on it.

The API server and the controllers are built from Debian bookworm's source package ``kubernetes``
(1.20), or taken from ``--folder``. A cluster that is there already is named by KUBECONFIG, and has
to have the namespaces ``leanq`` and ``leanq-nodes``: there all are dry runs. What the old version
does not know is rewritten or left out, and named.

No kubelet runs: a node of our own starts each pod's program as a process of this machine, with the
pod's arguments and name, tells the API server whether it is ready, and ends it by SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import yaml
from support.paths import ROOT
from support.servers import own_server

from engines.machine import Unavailable, in_namespaces, install, run, until
from leanq import LeanQClient
from leanq.queue.settings import Settings

PROGRAMS = ("kube-apiserver", "kube-controller-manager")
OLD = "1.20"
BURST, ROLLOUT = 7000, 1200
# So that growing and shrinking take seconds; the overlay's own take minutes.
QUICK = ["--every=2s", "--deadline=20s", "--scale-down-delay=8s"]
NAMESPACE = "leanq"
_SOURCE_S, _COMPILE_S = 300.0, 3600.0
# Of operators that are not there; an API server as old as this falls over its own checks of them.
_CUSTOM = ("PodMonitor", "PrometheusRule", "ScaledObject")


def main() -> int:
    """Runs the course."""
    return in_namespaces("engines.cluster", course)


def course(folder: Path) -> None:
    """The overlays, then ``local``."""
    if named := os.environ.get("KUBECONFIG"):
        print(f"the cluster of {named}, on which nothing but dry runs are tried", flush=True)
        _validate(Path(named), old=False)
        return
    programs = _programs(folder)
    with _api_server(folder, programs) as api:
        _validate(api.kubeconfig, old=True)
        _Fleet(api, folder).run()


# The control plane


def _programs(folder: Path) -> Path:
    """The folder of the programs, built where they are not there; raises Unavailable."""
    install(["etcd-server"], ["etcd"], _SOURCE_S)
    if shutil.which("kubectl") is None:
        raise Unavailable("kubectl is not installed")
    made = folder / "bin"
    if all((made / name).exists() for name in PROGRAMS):
        return made
    install(["golang-go", "dpkg-dev", "rsync", "make"], ["go", "dpkg-source", "rsync"], _SOURCE_S)
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
    source.rename(place)
    print("building the API server and the controllers: a quarter of an hour", flush=True)
    go = os.environ | {"CGO_ENABLED": "0", "GO111MODULE": "off", "GOFLAGS": ""}
    go |= {"GOPATH": str(folder / "go"), "GOCACHE": str(folder / "cache"), "HOME": str(folder)}
    nice = ("nice", "-n", "10")
    run(*nice, "make", "generated_files", environ=go, folder=place, timeout_s=_COMPILE_S)
    for name in PROGRAMS:
        build = (*nice, "go", "build", "-p", "1", "-trimpath", "-ldflags=-s -w")
        build = (*build, "-o", str(made / name), f"./cmd/{name}")
        run(*build, environ=go, folder=place, timeout_s=_COMPILE_S)
    return made


class Api:
    """The API server: calls as its administrator."""

    def __init__(self, url: str, token: str, kubeconfig: Path) -> None:
        self.url = url
        self.kubeconfig = kubeconfig
        headers = {"Authorization": f"Bearer {token}"}
        # Its certificate is its own, made a moment ago.
        self._client = httpx.Client(base_url=url, headers=headers, verify=False, timeout=20.0)

    def call(
        self, verb: str, path: str, body: object = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        """The answer; fails where it is a refusal, but for what is gone already."""
        data = None if body is None else json.dumps(body).encode()
        answer = self._client.request(verb, path, content=data, headers={"Content-Type": kind})
        assert answer.status_code < 300 or answer.status_code == 404, answer.text
        return dict(answer.json())

    def patch(self, path: str, body: object) -> None:
        """A merge patch."""
        self.call("PATCH", path, body, "application/merge-patch+json")

    def kubectl(self, *args: str, text: str | None = None) -> str:
        """What kubectl prints."""
        environ = os.environ | {"KUBECONFIG": str(self.kubeconfig)}
        return run("kubectl", *args, environ=environ, text=text, timeout_s=120)

    def answers(self) -> bool:
        """Whether it is up."""
        with contextlib.suppress(httpx.HTTPError, AssertionError):
            return "status" not in self.call("GET", "/api/v1/namespaces/default")["status"]
        return False


def kubeconfig(path: Path, url: str, token: str) -> Path:
    """Writes a file that names a server and a token."""
    cluster = {"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": True}}
    user = {"name": "u", "user": {"token": token}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
    whole = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "users": [user]}
    path.write_text(yaml.safe_dump({**whole, "contexts": [context], "current-context": "c"}))
    return path


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _api_server(folder: Path, programs: Path) -> Iterator[Api]:
    place = folder / "state"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    etcd, peer, port = _free_port(), _free_port(), _free_port()
    token, key = secrets.token_hex(16), place / "accounts.key"
    (place / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    run("openssl", "genrsa", "-out", key, "2048")
    url = f"https://127.0.0.1:{port}"
    config = kubeconfig(place / "admin.yaml", url, token)
    clients, peers = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
    commands = {
        "etcd": [
            *("etcd", "--data-dir", place / "etcd"),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        ],
        "kube-apiserver": [
            *(programs / "kube-apiserver", f"--etcd-servers={clients}", f"--secure-port={port}"),
            *("--bind-address=127.0.0.1", f"--cert-dir={place}", "--authorization-mode=RBAC"),
            *(
                f"--token-auth-file={place / 'tokens.csv'}",
                "--service-cluster-ip-range=10.9.0.0/24",
            ),
            *("--service-account-issuer=here", f"--service-account-key-file={key}"),
            *(f"--service-account-signing-key-file={key}", "--allow-privileged=true"),
            "--endpoint-reconciler-type=none",
        ],
        "kube-controller-manager": [
            *(programs / "kube-controller-manager", f"--kubeconfig={config}", "--port=0"),
            *("--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port=0"),
            *(
                f"--service-account-private-key-file={key}",
                "--use-service-account-credentials=false",
            ),
            # The node below tells nothing of itself.
            "--controllers=*,-nodelifecycle,-nodeipam",
        ],
    }
    api = Api(url, token, config)
    with contextlib.ExitStack() as at_end:
        for name, command in commands.items():
            log = at_end.enter_context((place / f"{name}.log").open("w"))
            process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
            at_end.callback(process.wait, 30)
            at_end.callback(process.terminate)
            if name == "kube-apiserver":
                until(api.answers, 180.0)
        print(
            f"an API server of Debian's source package ({OLD}) and its controllers run", flush=True
        )
        yield api


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

    if old:
        apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}])
        apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "leanq-nodes"}}])
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


# A node


class _Node(threading.Thread):
    """Runs the pods of the namespace as processes of this machine."""

    def __init__(self, api: Api, environ: Mapping[str, str], folder: Path) -> None:
        super().__init__(daemon=True)
        self._api = api
        self._environ = environ
        self._folder = folder
        self._pods: dict[str, tuple[subprocess.Popen[bytes], int, str]] = {}
        self._told: dict[str, bool] = {}
        self._over = threading.Event()
        self.failed: BaseException | None = None
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "here"}}
        api.call("POST", "/api/v1/nodes", node)

    def run(self) -> None:
        """Until :meth:`stop`."""
        try:
            while not self._over.wait(0.2):
                self._look()
        except BaseException as error:
            self.failed = error
            raise

    def stop(self) -> None:
        """Ends all pods."""
        self._over.set()
        self.join(30)
        for process, _, _ in self._pods.values():
            process.terminate()
        for process, _, _ in self._pods.values():
            process.wait(30)

    def _look(self) -> None:
        place = f"/api/v1/namespaces/{NAMESPACE}/pods"
        listed = self._api.call("GET", place)["items"]
        for pod in listed:
            name, path = pod["metadata"]["name"], f"{place}/{pod['metadata']['name']}"
            if "deletionTimestamp" in pod["metadata"]:
                self._end(name, path)
            elif name not in self._pods:
                target = {"apiVersion": "v1", "kind": "Node", "name": "here"}
                about = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
                self._api.call("POST", f"{path}/binding", {**about, "target": target})
                self._pods[name] = self._start(pod)
            else:
                self._tell(path, *self._pods[name])

    def _start(self, pod: Mapping[str, Any]) -> tuple[subprocess.Popen[bytes], int, str]:
        name, (container,) = pod["metadata"]["name"], pod["spec"]["containers"]
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        port = _free_port()
        ports = {str(each["containerPort"]) for each in container["ports"]}
        args = [str(port) if word in ports else word for word in container["args"]]
        for each in ports:
            args = [word.replace(f"={each}", f"={port}") for word in args]
        args = [word.replace("$(POD_NAMESPACE)", NAMESPACE) for word in args]
        if component == "server":
            command = ["sleep", "infinity"]  # the queue's server is on a socket of ours
        else:
            command = [sys.executable, "-m", "leanq", *args]
            command += QUICK if component == "scaler" else []
        # A worker tells its host, by which the scaler knows whose pod is idle.
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]
        log = (self._folder / f"{name}.log").open("w")
        process = subprocess.Popen(named, env=dict(self._environ), stdout=log, stderr=log)
        return process, port, component

    def _tell(self, path: str, process: subprocess.Popen[bytes], port: int, kind: str) -> None:
        assert process.poll() is None, f"{path} ended with code {process.returncode}"
        page = "/healthz" if kind == "worker" else "/metrics"
        ready = kind == "server" or _answers(f"http://127.0.0.1:{port}{page}")
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self._told.get(path) == ready:
            return
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
        status = {"phase": "Running", "conditions": [condition]}
        self._api.patch(f"{path}/status", {"status": status})
        self._told[path] = ready

    def _end(self, name: str, path: str) -> None:
        process, _, _ = self._pods.get(name, (None, 0, ""))
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            return
        self._api.call("DELETE", path, {"gracePeriodSeconds": 0})
        self._pods.pop(name, None)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class _Fleet:
    """``local`` at work."""

    def __init__(self, api: Api, folder: Path) -> None:
        self._api = api
        self._folder = folder / "state"

    def run(self) -> None:
        """Grows, shrinks, and is rolled over."""
        with own_server() as server:
            settings = replace(server.settings, lease_s=10.0)
            self._api.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(self._objects()))
            config = kubeconfig(self._folder / "scaler.yaml", self._api.url, self._token())
            environ = os.environ | {"LEANQ_URL": settings.url, "KUBECONFIG": str(config)}
            node = _Node(self._api, environ, self._folder)
            node.start()
            try:
                self._course(settings, node)
            finally:
                node.stop()

    def _objects(self) -> list[dict[str, Any]]:
        return _for_old(_render("overlays/local"), set())

    def _token(self) -> str:
        """Of the scaler's account, whose Role then holds."""
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        place = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/leanq-scaler/token"
        return str(self._api.call("POST", place, asked)["status"]["token"])

    def _workers(self) -> dict[str, int]:
        place = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/leanq-worker"
        found = self._api.call("GET", place)
        ready = found.get("status", {}).get("readyReplicas", 0)
        return {"wanted": found["spec"].get("replicas", 1), "ready": ready}

    def _course(self, settings: Settings, node: _Node) -> None:
        def wait(condition: Callable[[], bool], deadline_s: float = 240.0) -> None:
            until(lambda: bool(node.failed) or condition(), deadline_s)
            assert node.failed is None, node.failed

        with LeanQClient(settings) as lean:
            wait(lambda: self._workers() == {"wanted": 1, "ready": 1})
            print("local: one worker is ready", flush=True)
            began = time.monotonic()
            futures = [lean.echo(b"%d" % n, delay_s=1.0) for n in range(BURST)]
            wait(lambda: self._workers() == {"wanted": 5, "ready": 5})
            print(f"a burst: five workers after {time.monotonic() - began:.0f} s", flush=True)
            _all_there(futures)
            began = time.monotonic()
            wait(lambda: self._workers() == {"wanted": 1, "ready": 1}, 300.0)
            print(f"and one again {time.monotonic() - began:.0f} s after its end", flush=True)
            futures = [lean.echo(b"%d" % n, delay_s=0.2) for n in range(ROLLOUT)]
            self._api.kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/leanq-worker")
            _all_there(futures)
            self._api.kubectl(
                *("-n", NAMESPACE, "rollout", "status", "deployment/leanq-worker"),
                "--timeout=100s",
            )
        command = (sys.executable, "-m", "leanq", "status", "--json", "--url", settings.url)
        status = json.loads(run(*command))
        assert (status["reaped"], status["dead"]) == (0, 0), status
        print(
            f"a rollout under load: {ROLLOUT} of {ROLLOUT}, none reaped, "
            f"{status['released']} given back",
            flush=True,
        )


def _all_there(futures: list[Future[bytes]]) -> None:
    assert [future.result(240) for future in futures] == [b"%d" % n for n in range(len(futures))]


if __name__ == "__main__":
    sys.exit(main())
