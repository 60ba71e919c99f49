"""Campaigns that cannot run: they fail once, say why, and are not tried for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import rq
from rq.serializers import DefaultSerializer, JSONSerializer
from support.campaigns.campaigns import Desk, stop_worker
from support.cluster import Node
from support.fleets import Recorder, serving
from support.servers import own_server
from support.terminals import Terminal

from leanq.queue.settings import Settings


@pytest.mark.slow
def test_campaigns_that_cannot_run_fail_once(desk: Desk, settings: Settings) -> None:
    there = desk.send("a")
    mine = desk.terminal.file("c0.out", '{"id": 0, "line": 1, "verdict": "accepted"}\n')
    lost = desk.send("b")
    (desk.folder / "c1.jsonl").unlink()
    odd = desk.send("c", options=("--id-field", "name", "--code-field", "code"))
    desk.terminal.file("c2.jsonl", '[{"name": 1}]')
    with serving(settings, Recorder()):
        worker = desk.start_worker()
        assert "exists" in str(desk.reaches(there, "failed").error)
        assert "No such file" in str(desk.reaches(lost, "failed").error)
        # One bad row is no reason to fail.
        sent = desk.reaches(odd, "finished")
        assert sent.counts == {"error": 1}
        assert len(sent.bad_rows) == 1
        assert f"  bad rows  {sent.bad_rows[0]}" in desk.run("show", odd)
        desk.run("retry", odd)
        assert desk.reaches(odd, "finished").bad_rows == sent.bad_rows
        assert f"{lost}  failed (" in desk.run("list")
        # A user's own file is left alone, however often.
        desk.run("retry", there)
        assert "exists" in str(desk.reaches(there, "failed").error)
        # Once it is mended it can be taken up again.
        Path(mine).unlink()
        desk.run("retry", there)
        assert desk.reaches(there, "finished").counts == {"echoed": 1}
        # Rows are known by their places in the data.
        desk.terminal.file("c0.jsonl", '{"id": "new", "code": "b"}\n{"id": 0, "code": "a"}\n')
        desk.run("retry", there)
        text = f"{desk.folder}/c0.jsonl has changed since {mine} was written"
        assert text in str(desk.reaches(there, "failed").error)
        said = stop_worker(worker)
    assert said.count("exists") == 2
    assert [record["id"] for record in desk.results(there)] == [0]
    # What failed stays failed.
    assert desk.look(lost).state == "failed"


@pytest.mark.slow
def test_errors_say_what_to_do(desk: Desk) -> None:
    id_ = desk.send("a", options=("--in", "1h"))
    unknown = "no campaign 'unknown'; 'leanq campaign list' shows all"
    for command in ("show", "pause", "resume", "cancel", "retry"):
        done = desk.terminal.run("campaign", command, "unknown")
        assert (done.code, done.out, done.err) == (2, "", f"leanq: {unknown}\n")
    for command in ("resume", "retry"):
        done = desk.terminal.run("campaign", command, id_)
        assert done.code == 2
        assert done.err.startswith(f"leanq: the campaign {id_} is scheduled; expected ")
    desk.campaigns.cancel(id_)
    for command in ("pause", "resume", "cancel"):
        done = desk.terminal.run("campaign", command, id_)
        assert done.code == 2
        assert done.err.startswith(f"leanq: the campaign {id_} is cancelled; expected ")
    send = ("campaign", "submit", "data.jsonl", "--out", "out.jsonl")
    done = desk.terminal.run(*send, "--after", "unknown")
    assert (done.code, done.err.splitlines()[-1]) == (2, f"leanq: {unknown}")
    done = desk.terminal.run(*send, "--after", id_, "--in", "1h")
    assert done.code == 2
    assert "not both" in done.err
    # Data that is elsewhere is no mistake.
    done = desk.terminal.run(*send, "--json")
    assert (done.code, [*done.lines[0]]) == (0, ["id"])
    assert "is not on this machine; the campaign workers' machines have to have it" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("serializer", [JSONSerializer, DefaultSerializer])
def test_other_jobs_in_its_queue(desk: Desk, serializer: type) -> None:
    queue = rq.Queue(desk.campaigns.queue.name, connection=desk.connection, serializer=serializer)
    other = queue.enqueue("os.getcwd")
    mine = desk.send("a")
    assert desk.run("list") == f"{mine}  queued  c0.jsonl: 0 rows\n"
    done = desk.terminal.run("campaign", "cancel", other.id)
    assert done.err == f"leanq: no campaign {other.id!r}; 'leanq campaign list' shows all\n"
    other.delete()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("urls", "code", "text"),
    [
        ({"LEANQ_URL": "redis://a:1,b:2"}, 2, "RQ needs one Redis that is no cluster"),
        ({"LEANQ_URL": "redis://a:1 redis://b:2"}, 2, "name it with LEANQ_RQ_URL"),
        ({"LEANQ_URL": "ftp://a"}, 2, "not a Redis URL"),
        ({"LEANQ_URL": "unix:///nowhere"}, 3, "RQ's Redis"),
        ({"LEANQ_RQ_URL": "unix:///nowhere"}, 3, "RQ's Redis"),
        ({"LEANQ_PREFIX": "a b"}, 2, "LEANQ_PREFIX"),
        ({}, 2, "no queue"),
    ],
)
def test_rq_without_a_usable_redis(
    terminal: Terminal, urls: dict[str, str], code: int, text: str
) -> None:
    if urls.keys() == {"LEANQ_RQ_URL"}:
        urls = {"LEANQ_URL": "unix:///elsewhere", **urls}
    if urls.keys() == {"LEANQ_PREFIX"}:
        with own_server() as server:
            done = terminal.run(
                "campaign", "list", environ={"LEANQ_URL": server.settings.url} | urls
            )
    else:
        done = terminal.run("campaign", "worker", environ=urls)
    assert (done.code, done.out) == (code, "")
    assert text in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.slow
def test_a_cluster_is_no_redis_for_rq(terminal: Terminal) -> None:
    node = Node(terminal.folder / "node")
    try:
        for command in ("list", "worker"):
            url = {"LEANQ_URL": f"redis://127.0.0.1:{node.port}"}
            done = terminal.run("campaign", command, environ=url)
            text = "leanq: RQ needs one Redis that is no cluster; name it with LEANQ_RQ_URL\n"
            assert (done.code, done.err) == (2, text)
    finally:
        node.client.close()
        node.process.kill()
        node.process.wait(20)


@pytest.mark.slow
def test_a_worker_that_would_fail_every_campaign(desk: Desk, settings: Settings) -> None:
    urls = {"LEANQ_URL": "ftp://elsewhere", "LEANQ_RQ_URL": settings.url}
    done = desk.terminal.run("campaign", "worker", environ=urls)
    assert done.code == 2
    assert "not a Redis URL" in done.err
