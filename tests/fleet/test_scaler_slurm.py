"""Slurm as the scaler's target, by a model of its controller; see ``make slurm-test``, too."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.errors import TargetError, UsageError
from leanq.fleet.scaler import slurm
from leanq.fleet.scaler.slurm import SlurmTarget
from leanq.fleet.stats import FleetStats
from leanq.queue import wire
from leanq.queue.results import Status, WorkerRow

MOST = 8


@dataclass
class Task:
    id: str
    job: str
    state: Literal["PENDING", "RUNNING", "COMPLETING"] = "PENDING"
    run: str = "0:00"
    worker: bool = False
    held: int = 0


class Controller:
    """What Slurm's programs answer, and which tasks there are."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.cancelled: list[Task] = []
        self.submitted: list[list[str]] = []
        self._jobs = 0

    async def run(self, *command: str) -> str:
        return {"squeue": self._squeue, "sbatch": self._sbatch, "scancel": self._scancel}[
            command[0]
        ](list(command[1:]))

    def _squeue(self, options: list[str]) -> str:
        assert "--name=leanq-echo" in options
        then = (datetime.now() - timedelta(seconds=5)).isoformat(timespec="seconds")
        listed = (f"{t.id}|{t.job}|{t.state}|{t.run}|{then}\n" for t in self.tasks.values())
        return "".join(listed)

    def _sbatch(self, options: list[str]) -> str:
        self.submitted.append(options)
        (array,) = (option for option in options if option.startswith("--array=0-"))
        self._jobs += 1
        for n in range(int(array.removeprefix("--array=0-")) + 1):
            # Until they run, all tasks of an array have the array's number.
            task = Task(f"{self._jobs}_{n}", str(self._jobs))
            self.tasks[task.id] = task
        return f"{self._jobs}\n"

    def _scancel(self, ids: list[str]) -> str:
        self.cancelled += [self.tasks.pop(task) for task in ids]
        return ""

    def seen(self) -> FleetStats:
        rows = tuple(
            WorkerRow(f"w{t.job}", 5.0, t.held, wire.pack_info({"job": t.job, "started": 1.0}))
            for t in self.tasks.values()
            if t.worker
        )
        return FleetStats(0.0, Status({}, {}, rows, (), {}, 0), {})


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    monkeypatch.setattr(slurm, "_run", made.run)
    return made


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "worker.sh").write_text("#!/bin/bash\n")
    return str(tmp_path / "worker.sh")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("order"), st.integers(0, MOST)),
            st.tuples(st.sampled_from(("start", "join", "busy", "requeue", "scaler")), st.just(0)),
        ),
        max_size=30,
    )
)
def test_the_fleet_is_what_was_ordered(events: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        controller = Controller()
        patch.setattr(slurm, "_run", controller.run)
        target = SlurmTarget(__file__, "leanq-{env}", ["echo"])
        for what, number in events:
            tasks = list(controller.tasks.values())
            if what == "order":
                before = len(controller.cancelled)
                ordered = runner.run(target.look("echo", controller.seen()))
                assert ordered.order == len(tasks)
                assert len(ordered.starting_s) == sum(not task.worker for task in tasks)
                runner.run(target.order("echo", number, controller.seen()))
                assert len(controller.tasks) == number
                going = controller.cancelled[before:]
                stay = controller.tasks.values()
                # None that waits stays for one with a worker, and no idle one for a busy one.
                for rank in (lambda t: t.state == "RUNNING", lambda t: t.worker, lambda t: t.held):
                    assert not going or not stay or max(map(rank, going)) <= min(map(rank, stay))
            elif what == "scaler":
                target = SlurmTarget(__file__, "leanq-{env}", ["echo"])
            elif tasks:
                _happens(what, tasks)


def _happens(what: str, tasks: list[Task]) -> None:
    task = next((t for t in tasks if t.state != "RUNNING"), tasks[0])
    if what == "start" and task.state != "RUNNING":
        task.state, task.job = "RUNNING", f"{task.id}-job"
    for running in (t for t in tasks if t.state == "RUNNING"):
        if what == "join" and not running.worker:
            running.worker = True
            return
        if what == "busy" and running.worker and not running.held:
            running.held = 1
            return
        if what == "requeue":
            running.state, running.worker, running.held = "COMPLETING", False, 0
            return


async def test_tasks_that_end_at_once_are_not_started_again_and_again(
    controller: Controller, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = SlurmTarget(script, "leanq-{env}", ["echo"])

    async def tick(workers: int) -> None:
        await target.look("echo", controller.seen())
        await target.order("echo", workers, controller.seen())

    await tick(2)
    for task in controller.tasks.values():
        task.state, task.job = "RUNNING", f"{task.id}-job"
    await tick(2)
    controller.tasks.clear()
    await tick(2)
    assert (len(controller.submitted), controller.tasks) == (1, {})
    assert "2 jobs ended before their workers joined the queue, such as 1_0" in caplog.text
    assert "no more are started for 30 s" in caplog.text


async def with_one_running(controller: Controller, script: str) -> tuple[SlurmTarget, Task]:
    """A target that has ordered one task, which runs with its worker."""
    target = SlurmTarget(script, "leanq-{env}", ["echo"])
    await target.look("echo", controller.seen())
    await target.order("echo", 1, controller.seen())
    (task,) = controller.tasks.values()
    task.state, task.worker = "RUNNING", True
    return target, task


@pytest.mark.parametrize(("run", "orders"), [("0:00", 1), ("0:07", 2)])
async def test_a_task_that_completes_counts_if_it_will_run_again(
    controller: Controller, script: str, run: str, orders: int
) -> None:
    target, task = await with_one_running(controller, script)
    await target.look("echo", controller.seen())
    task.state, task.worker, task.run = "COMPLETING", False, run
    await target.look("echo", controller.seen())
    await target.order("echo", 1, controller.seen())
    assert (len(controller.submitted), controller.cancelled) == (orders, [])


async def test_a_worker_that_ends_by_itself_is_replaced_at_once(
    controller: Controller, script: str
) -> None:
    target, _ = await with_one_running(controller, script)
    ordered = await target.look("echo", controller.seen())
    assert (ordered.order, len(ordered.started_s)) == (1, 1)
    controller.tasks.clear()
    await target.look("echo", controller.seen())
    await target.order("echo", 1, controller.seen())
    assert len(controller.submitted) == 2


async def test_what_slurm_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, script: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    target = SlurmTarget(script, "leanq-{env}", ["echo"])
    with pytest.raises(TargetError, match="squeue cannot be started: No such file"):
        await target.look("echo", Controller().seen())
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\necho 'slurm_load_jobs error:\n  no answer' >&2; exit 1\n")
    program.chmod(0o755)
    with pytest.raises(TargetError, match="ended with code 1: slurm_load_jobs error: no answer"):
        await target.look("echo", Controller().seen())
    program.write_text("#!/bin/sh\necho nonsense\n")
    with pytest.raises(TargetError, match="squeue printed 'nonsense'; expected"):
        await target.look("echo", Controller().seen())


async def test_a_job_does_not_hand_its_own_options_on(
    monkeypatch: pytest.MonkeyPatch, script: str, tmp_path: Path
) -> None:
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\nenv | grep ^S.*= | sort >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("SLURM_CONF", "SLURM_MEM_PER_NODE", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, "x")
    with pytest.raises(TargetError) as refused:
        await SlurmTarget(script, "leanq-{env}", ["echo"]).look("echo", Controller().seen())
    assert "SLURM_CONF" in str(refused.value)
    assert "SLURM_MEM" not in str(refused.value)


def test_a_script_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no batch script"):
        SlurmTarget(str(tmp_path / "{env}.sh"), "leanq-{env}", ["echo"])
