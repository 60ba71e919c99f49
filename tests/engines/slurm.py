"""``make slurm-test``: a fleet on a real Slurm cluster, by the scripts of deploy/slurm.

The controller, three nodes of two CPUs and munge come from Debian's packages, and all run on this
machine. The Redis, the scaler and the workers are jobs. A burst takes the fleet from nothing to six
workers and back. Meanwhile workers are preempted by SIGTERM and by SIGKILL, tasks are requeued, and
the controller and the scaler start anew. Every request has its verdict, and no more workers run
than were allowed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import redis
from support.paths import ROOT

from engines.machine import in_namespaces, install, run, until
from leanq import LeanQClient
from leanq.queue.settings import Settings

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "squeue", "sbatch", "munged")
NODES, CPUS, MOST, BURST, CHECKS = 3, 2, 6, 2000, 40
ECHOES = "leanq-echo"
_INSTALL_S = 240.0


def main() -> int:
    """Runs the course."""
    return in_namespaces("engines.slurm", course)


def course(folder: Path) -> None:
    """A burst, with faults."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    install(PACKAGES, PROGRAMS, _INSTALL_S)
    with _cluster(folder) as cluster:
        try:
            _fleet(cluster)
        except AssertionError:
            # The folder will be gone.
            for log in sorted((folder / "fleet").glob("*.log")):
                print(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}")
            print(cluster.ask("squeue", "--array", "--states=all"), flush=True)
            print(cluster.ask("sinfo", "--Node", "--long"), flush=True)
            raise


class Cluster:
    """A cluster of this machine. ``folder`` holds its files; its programs need ``environ``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.controller: subprocess.Popen[bytes] | None = None

    def ask(self, *command: str, folder: Path | None = None, **environ: str) -> str:
        """What one of Slurm's programs prints."""
        return run(*command, environ=self.environ | environ, folder=folder, timeout_s=90)

    def start_controller(self) -> None:
        """Starts it, with what it knew before."""
        with (self.folder / "controller.out").open("ab") as log:
            self.controller = subprocess.Popen(
                ["slurmctld", "-D"], env=self.environ, stdout=log, stderr=log
            )

        def answers() -> bool:
            with contextlib.suppress(AssertionError):
                return self.ask("scontrol", "ping").count("UP") == 1
            return False

        until(answers)

    def stop_controller(self) -> None:
        """Kills it."""
        assert self.controller
        self.controller.kill()
        self.controller.wait(20)

    def tasks(self, name: str) -> dict[str, str]:
        """The state of each task of this name that runs or will, by what ``scancel`` takes."""
        states = "--states=PENDING,CONFIGURING,RUNNING"
        listed = self.ask("squeue", "-h", "-r", f"--name={name}", states, "--format=%i %T")
        return dict(line.split() for line in listed.splitlines())

    def running(self, name: str) -> list[str]:
        """The tasks of this name that run."""
        return sorted(task for task, state in self.tasks(name).items() if state == "RUNNING")

    def pid(self, task: str) -> int:
        """The process of a task's batch script, which has become a worker."""
        job = self.ask("squeue", "-h", f"--jobs={task}", "--format=%A").strip()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if f"SLURM_JOB_ID={job}".encode() in environ and b"worker" in words:
                    return int(pid)
        raise AssertionError(f"task {task} has no worker")


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[Cluster]:
    host = socket.gethostname()
    munge = folder / "munge"
    munge.mkdir(exist_ok=True, mode=0o711)
    folder.chmod(0o711)
    for name in ("state", "spool"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o400)
    port = 26800
    (folder / "slurm.conf").write_text(f"""\
ClusterName=leanq
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge / "socket"}
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={folder / "state"}
SlurmdSpoolDir={folder / "spool"}/%n
SlurmctldPidFile={folder / "controller.pid"}
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder / "controller.log"}
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=30
SchedulerParameters=bf_interval=2,sched_interval=2,requeue_delay=1
NodeName=n[1-{NODES}] NodeHostname={host} Port=[{port + 1}-{port + NODES}] CPUs={CPUS} State=UNKNOWN
NodeName=n0 NodeHostname={host} Port={port + NODES + 1} CPUs={CPUS} State=UNKNOWN
PartitionName=spot Nodes=n[1-{NODES}] Default=YES MaxTime=INFINITE State=UP
PartitionName=stable Nodes=n0 MaxTime=INFINITE State=UP
""")
    cluster = Cluster(folder)
    with contextlib.ExitStack() as at_end:

        def start(name: str, *command: str) -> None:
            log = at_end.enter_context((folder / f"{name}.out").open("wb"))
            process = subprocess.Popen(command, env=cluster.environ, stdout=log, stderr=log)
            at_end.callback(process.wait, 30)
            at_end.callback(process.terminate)

        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        files["seed-file"] = "seed"
        places = (f"--{option}={munge / name}" for option, name in files.items())
        start("munge", "munged", "--foreground", "--force", *places)
        until((munge / "socket").exists)
        cluster.start_controller()
        at_end.callback(cluster.stop_controller)
        for name in ("n0", *(f"n{n}" for n in range(1, NODES + 1))):
            start(name, "slurmd", "-D", "-N", name)
        until(lambda: cluster.ask("sinfo", "-h", "-N", "--states=idle").count("idle") == NODES + 1)
        at_end.callback(lambda: cluster.ask("scancel", "--user=root"))
        print(cluster.ask("sinfo", "--version").strip(), f"with {NODES + 1} nodes", flush=True)
        yield cluster


class _Most(threading.Thread):
    """Looks twice a second how many workers are ordered."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._over = threading.Event()
        self.seen: Counter[int] = Counter()

    def run(self) -> None:
        """Until :meth:`stop`."""
        while not self._over.wait(0.5):
            # Not while the controller is away.
            with contextlib.suppress(AssertionError):
                self.seen[len(self._cluster.tasks(ECHOES))] += 1

    def stop(self) -> int:
        """The most that were seen."""
        self._over.set()
        self.join(120)
        return max(self.seen)


def _fleet(cluster: Cluster) -> None:
    home = cluster.folder / "fleet"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(ROOT / "deploy/slurm", home)
    # The nodes' CPUs and memory are this machine's, several times over.
    worker = (home / "worker.sh").read_text()
    worker = worker.replace("--cpus-per-task=8", "--cpus-per-task=1").replace("=32G", "=0")
    (home / "worker-default.sh").write_text(worker)
    worker = worker.replace('--slots "$SLURM_CPUS_PER_TASK"', "--slots 8 --driver echo")
    (home / "worker-echo.sh").write_text(worker)
    environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    most = f"--max-workers {MOST} --every 2s --deadline 20s --scale-down-delay 8s"
    environ["SCALER_OPTIONS"] = f"{most} --env echo --env default"

    def submit(script: str) -> None:
        small = ("--cpus-per-task=1", "--mem=0", "--partition=stable")
        cluster.ask("sbatch", *small, script, folder=home, **environ)

    scaler = (home / "scaler.sh").read_text()
    (home / "scaler.sh").write_text(scaler.replace("worker.sh", "'worker-{env}.sh'"))
    submit("redis.sh")
    submit("scaler.sh")
    until((home / "url").exists)
    port = (home / "url").read_text().strip().rpartition(":")[2]
    password = (home / "password").read_text().strip()
    settings = Settings.load(f"redis://127.0.0.1:{port}", {"LEANQ_PASSWORD": password})
    until(lambda: cluster.running("leanq-scaler") != [])
    until(lambda: _answers(settings))
    watch = _Most(cluster)
    watch.start()
    with LeanQClient(settings) as lean:
        _burst(cluster, settings, lean, lambda: submit("scaler.sh"))
        began = time.monotonic()
        until(lambda: cluster.tasks(ECHOES) == {}, 120.0)
        print(f"no worker {time.monotonic() - began:.0f} s after its end", flush=True)
        assert watch.stop() == MOST, watch.seen
        done = [lean.check(f"theorem t{n} : True := True.intro") for n in range(CHECKS)]
        until(lambda: done[0].done(), 240.0)
        # Slurm signals all processes of the job, those of Lean as well.
        gone = cluster.running("leanq-default")
        cluster.ask("scancel", *gone)
        assert {future.result(240).verdict for future in done} == {"accepted"}
        said = f"{CHECKS} of {CHECKS} accepted by a worker of another name, which was cancelled"
        print(f"real Lean: {said}", flush=True)


def _answers(settings: Settings) -> bool:
    with contextlib.suppress(redis.RedisError), redis.Redis.from_url(settings.url) as connection:
        return bool(connection.ping())
    return False


def _status(settings: Settings) -> dict[str, Any]:
    environ = os.environ | {"LEANQ_URL": settings.url}
    status = run(sys.executable, "-m", "leanq", "status", "--json", environ=environ)
    return cast(dict[str, Any], json.loads(status))


def _serving(settings: Settings) -> int:
    return sum(worker["lease_s"] > 0 for worker in _status(settings)["workers"])


def _scaler_sees(settings: Settings, workers: int) -> bool:
    text = _status(settings)["scaler"].get("echo", {}).get("text", "")
    return f"{workers} workers ready, {workers} ordered" in text


def _burst(
    cluster: Cluster, settings: Settings, lean: LeanQClient, another_scaler: Callable[[], None]
) -> None:
    began = time.monotonic()
    # Enough for the whole fleet, for as long as the faults below take.
    futures = [lean.echo(b"%d" % n, delay_s=8.0) for n in range(BURST)]

    def serve(workers: int) -> Callable[[], bool]:
        return lambda: len(cluster.running(ECHOES)) == _serving(settings) == workers

    until(serve(MOST), 120.0)
    print(f"a burst: {MOST} workers after {time.monotonic() - began:.0f} s", flush=True)
    # A task that is gone before the scaler has seen its worker makes it pause.
    until(lambda: _scaler_sees(settings, MOST))
    drained, killed, requeued = cluster.running(ECHOES)[:3]
    os.kill(cluster.pid(killed), signal.SIGKILL)
    cluster.ask("scancel", "--batch", "--signal=TERM", drained)
    # Slurm itself keeps such a task back for two minutes.
    cluster.ask("scontrol", "requeue", requeued)
    until(lambda: not {drained, killed} & cluster.tasks(ECHOES).keys())
    until(serve(MOST - 1), 120.0)
    print("a worker killed, one drained: both are replaced", flush=True)
    cluster.stop_controller()
    cluster.start_controller()
    # It waits until the one before has ended.
    another_scaler()
    first = cluster.running("leanq-scaler")
    cluster.ask("scancel", *first)
    until(lambda: cluster.running("leanq-scaler") not in ([], first), 120.0)
    # A controller that was killed knows some seconds less than its nodes, until they have told it.
    until(serve(MOST - 1), 120.0)
    gone = cluster.running(ECHOES)[0]
    os.kill(cluster.pid(gone), signal.SIGKILL)
    until(lambda: gone not in cluster.tasks(ECHOES))
    until(serve(MOST - 1), 120.0)
    print("the controller killed, and another scaler: it replaces a worker", flush=True)
    until(serve(MOST), 180.0)
    assert requeued in cluster.running(ECHOES)
    print(
        f"a task requeued: it runs again {time.monotonic() - began:.0f} s after the start",
        flush=True,
    )
    assert sum(future.done() for future in futures) < BURST, "the burst was over too soon"
    said = [future.result(240) for future in futures]
    assert said == [b"%d" % n for n in range(BURST)]
    print(f"{BURST} of {BURST} answered after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
