"""Slurm as a scaler's target: each worker is a task of a job array.

The controller knows the jobs of this user by their name. A worker tells its job's number
(``SLURM_JOB_ID``).

Slurm has no lease for scalers. Run the scaler as a job with ``--dependency=singleton``: then the
controller lets one of that name run at a time.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import re
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path

from leanq.errors import TargetError, UsageError
from leanq.fleet.scaler.jobs import Job, JobTarget
from leanq.fleet.scaler.targets import named

# A controller that reads its configuration answers within seconds; squeue itself retries.
_CALL_S = 60.0
# Of a task: what scancel takes, its own number once it runs, its state, the time that it has run,
# when it was submitted.
_FORMAT = "%i|%A|%T|%M|%V"
# Those that run or will, and those that complete.
_STATES = "PENDING,CONFIGURING,RUNNING,SUSPENDED,RESIZING,STOPPED,COMPLETING"
# Of a task that completes before Slurm requeues it. Others were told to end, or end by themselves.
_NOT_RUN = "0:00"
# Variables of a job, and not of the cluster as a whole.
_OF_A_JOB = re.compile(r"SLURM_(?!CONF$|CLUSTERS$)|SLURMD_|SBATCH_")


class SlurmTarget(JobTarget):
    """Array tasks of this user on a Slurm cluster, one for each worker.

    Slurm's programs have to be on PATH.

    Args:
        script: the batch script of one worker; ``{env}`` in it stands for the environment's name.
        job_name: the jobs' name, likewise. Jobs of this name and user are the fleet.

    Raises:
        UsageError: there is no such script.
    """

    def __init__(self, script: str, job_name: str, environments: list[str]) -> None:
        super().__init__(environments)
        self._script = script
        self._job_name = job_name
        for name in environments:
            if not Path(path := named(script, name)).is_file():
                raise UsageError(f"--script: there is no batch script {path}")

    async def jobs(self, environment: str) -> list[Job]:
        name = named(self._job_name, environment)
        listed = await _run(
            *("squeue", "--noheader", "--array", f"--user={getpass.getuser()}"),
            *(f"--name={name}", f"--states={_STATES}", f"--format={_FORMAT}"),
        )
        return list(_tasks(listed))

    async def start(self, environment: str, count: int) -> None:
        await _run(
            *("sbatch", "--parsable", "--requeue", f"--array=0-{count - 1}"),
            f"--job-name={named(self._job_name, environment)}",
            named(self._script, environment),
        )

    async def end(self, ids: Collection[str], ready: Collection[str]) -> None:
        await _run("scancel", *ids)


def _tasks(listed: str) -> Iterator[Job]:
    """Yields the tasks of ``squeue``'s answer; raises TargetError."""
    now = datetime.now()  # squeue prints local times, without a zone
    for line in listed.splitlines():
        try:
            task, job, state, run, submitted = line.split("|")
            age_s = (now - datetime.fromisoformat(submitted)).total_seconds()
        except ValueError:
            raise TargetError(f"squeue printed {line!r}; expected {_FORMAT}") from None
        if state == "COMPLETING" and run != _NOT_RUN:
            continue
        waits = state in ("PENDING", "CONFIGURING", "COMPLETING")
        yield Job(task, job, waits, max(0.0, age_s))


async def _run(*command: str) -> str:
    """Returns what one of Slurm's programs prints; raises TargetError."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            # Slurm's variables for the scaler's own job must not become the workers' options.
            env={name: value for name, value in os.environ.items() if not _OF_A_JOB.match(name)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise TargetError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        async with asyncio.timeout(_CALL_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise TargetError(f"{command[0]} has not answered within {_CALL_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = " ".join(err.decode(errors="replace").split())
        raise TargetError(f"{command[0]} ended with code {process.returncode}: {said}")
    return out.decode(errors="replace")
