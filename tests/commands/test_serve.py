"""``leanq serve`` as a process."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner
from support.fleets import look, until
from support.gateway.gateways import key_file
from support.gateway.kimina_reading import reading
from support.metrics import parsed, port_in, scrape
from support.terminals import Process, Terminal, ended, own_server_of, samples, wait_for_line

from leanq.cli import cli
from leanq.errors import UnavailableError, UsageError
from leanq.gateway import server
from leanq.queue.settings import Settings

LONG = "theorem t (p : Prop) (h : p) : p := h\n" + "".join(
    f"theorem t{number} : 1 = 1 := rfl\n" for number in range(1000)
)


def serve(client: Terminal, *options: str) -> str:
    """Starts a gateway on a free port; where it is."""
    process = client.start("serve", "--port", "0", *options)
    found = re.search(r"http://\S+", wait_for_line(process.stderr, "the gateway is at"))
    assert found
    return found[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--host", "0.0.0.0"), "without keys the gateway listens on loopback alone"),
        (("--hostname", "a*"), "is not a name, *.NAME or *"),
        (("--keys", "nowhere.toml"), "cannot read the keys in nowhere.toml"),
        (("--host", "203.0.113.1", "--keys", "keys.toml"), "cannot listen on 203.0.113.1"),
    ],
)
@pytest.mark.slow
def test_wrong_usage_is_one_line_and_code_2(
    client: Terminal, options: tuple[str, ...], text: str
) -> None:
    client.file("keys.toml", key_file(client.folder, {"secret": "s"}).read_text())
    done = client.run("serve", "--port", "0", *options)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert text in done.err


@pytest.mark.slow
def test_a_gateway_that_others_reach_says_which_hosts_it_takes(client: Terminal) -> None:
    key_file(client.folder, {"secret": "s"})
    options = ("--host", "0.0.0.0", "--port", "0", "--keys", str(client.folder / "keys.toml"))
    process = client.start("serve", *options)
    assert "name the hosts" in wait_for_line(process.stderr, "only requests to localhost")
    process.send_signal(signal.SIGTERM)
    ended(process)
    process = client.start("serve", *options, "--hostname", "lean.example")
    wait_for_line(process.stderr, "the gateway is at")
    process.send_signal(signal.SIGTERM)
    assert "only requests" not in ended(process).err


def test_an_environment_that_nobody_would_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LEANQ_URL", raising=False)
    # No server of `leanq up` is found there.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = CliRunner().invoke(cli, ["serve", "--port", "0", "--env", "mathlib"])
    assert isinstance(done.exception, UsageError)
    assert "which needs the environment's folder: --env mathlib=FOLDER" in str(done.exception)


def test_a_port_in_use_is_said_once() -> None:
    with server.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            server.listen("127.0.0.1", port)
    assert str(caught.value).startswith(
        f"cannot listen on 127.0.0.1, port {port}: Address already in use; name another address"
    )


def test_a_grace_that_is_no_number() -> None:
    done = CliRunner().invoke(cli, ["serve", "--grace", "nan"])
    assert done.exit_code == 2
    assert "expected a number between 1 and 3600 seconds, got 'nan'" in done.output


@pytest.mark.slow
def test_a_gateway_without_a_queue_says_so(terminal: Terminal) -> None:
    done = terminal.run("serve", "--port", "0", "--url", "redis://127.0.0.1:1")
    assert (done.code, done.err.count("\n")) == (3, 1), done.err


@pytest.mark.slow
def test_it_serves_and_ends_in_order_once_what_is_under_way_has_ended(
    client: Terminal, fleet: Settings
) -> None:
    url = serve(client)
    body = {"snippets": [{"id": "a", "code": LONG}], "timeout": 60}
    process = client.processes[-1]
    with httpx2.Client(base_url=url, timeout=100) as http, ThreadPoolExecutor() as threads:
        assert http.get("/health").json() == {"status": "ok"}
        asked = threads.submit(http.post, "/api/check", json=body)
        until(lambda: any(row.held for row in look(fleet).workers))
        process.send_signal(signal.SIGTERM)
        answer = asked.result(timeout=100)
    assert reading(answer.json()["results"][0]) == "valid"
    assert ended(process).code == 0


@pytest.mark.slow
def test_commands_of_operations_take_a_gateway_for_a_queue(client: Terminal) -> None:
    url = serve(client)
    done = client.run("submit", "--json", "--url", url, *samples("and_swap", "incomplete"))
    assert done.code == 1
    assert {line["verdict"] for line in done.lines} == {"accepted", "incomplete"}
    [state] = [sorry["state"] for line in done.lines for sorry in line["sorries"]][:1]
    assert client.run("state", "export", "--url", url, state, "--output", "kept").code == 0
    short = client.run("step", "--url", url, state[:8], "exact h")
    assert (short.code, "expected 64 hexadecimal digits" in short.err) == (2, True)
    looked = client.run("status", "--url", url)
    assert (looked.code, "is a gateway, and this needs the queue's Redis" in looked.err) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    "command",
    [
        ("submit", "t.lean"),
        ("verify", "--target", "t.lean", "t.lean"),
        ("step", "a" * 64, "rfl"),
        ("state", "show", "a" * 64),
        ("state", "export", "a" * 64),
        ("state", "import", "t.lean"),
        ("campaign", "run", "t.jsonl", "--out", "out.jsonl"),
    ],
    ids=" ".join,
)
def test_a_gateway_without_tls_has_to_be_allowed(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.lean").write_text("theorem t : 1 = 1 := sorry")
    Path("t.jsonl").write_text('{"code": "theorem t : 1 = 1 := rfl"}')
    # An address of this machine that a URL does not show to be one; nothing listens there.
    called = [*command, "--url", "http://127.0.0.2:1"]
    refused = CliRunner().invoke(cli, called).exception
    assert isinstance(refused, UsageError)
    assert "--insecure-http" in str(refused)
    tried = CliRunner().invoke(cli, [*called, "--insecure-http"]).exception
    assert isinstance(tried, UnavailableError)
    assert "no gateway answers" in str(tried)


@pytest.mark.slow
def test_what_cannot_be_finished_within_the_grace_is_handed_back(
    client: Terminal, fleet: Settings
) -> None:
    url = serve(client, "--grace", "1", "--metrics-port", "0")
    process = client.processes[-1]
    body = {"code": LONG * 5, "request_id": "kept"}
    with httpx2.Client(base_url=url, timeout=100) as http, ThreadPoolExecutor() as threads:
        asked = threads.submit(http.post, "/v1/check", json=body)
        until(lambda: any(row.held for row in look(fleet).workers))
        process.send_signal(signal.SIGTERM)
        answer = asked.result(timeout=100)
    assert (answer.status_code, answer.json()["title"]) == (503, "Service Unavailable")
    assert int(answer.headers["Retry-After"]) >= 1
    assert ended(process).code == 0
    # It runs on, and another gateway knows it.
    with httpx2.Client(base_url=serve(client), timeout=200) as http:
        assert http.get("/v1/requests/kept?wait=100").status_code == 200


@pytest.mark.slow
def test_metrics_and_readiness_have_a_port_of_their_own(client: Terminal) -> None:
    process = client.start("serve", "--port", "0", "--metrics-port", "0")
    port = port_in(wait_for_line(process.stderr, "metrics of this gateway"))
    found = re.search(r"http://\S+", wait_for_line(process.stderr, "the gateway is at"))
    assert found
    with httpx2.Client(base_url=found[0]) as http:
        assert http.get("/ready").json() == {"status": "ready"}
        # Where they would be read by whoever may call.
        assert http.get("/metrics").status_code == 404
    assert scrape(port, "/healthz")[0] == 200
    # It is where the gateway is, and no other machine reaches it.
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"http://127.0.0.2:{port}/healthz")
    status, page = scrape(port)
    assert status == 200
    assert parsed(page)['leanq_http_requests_total{route="/ready",status="200"}'] == 1


@pytest.mark.slow
def test_metrics_can_have_an_address_of_their_own(client: Terminal) -> None:
    where = ("--metrics-port", "0", "--metrics-host", "127.0.0.2")
    process = client.start("serve", "--port", "0", *where)
    port = port_in(wait_for_line(process.stderr, "metrics of this gateway"))
    assert "leanq_build_info" in httpx2.get(f"http://127.0.0.2:{port}/metrics").text
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"http://127.0.0.1:{port}/metrics")


@pytest.mark.slow
def test_without_a_queue_it_has_one_of_its_own_with_a_worker(terminal: Terminal) -> None:
    url = serve(terminal)
    process = terminal.processes[-1]
    body = {
        "snippets": [
            {"id": "good", "code": "theorem t (p : Prop) (h : p) : p := h"},
            {"id": "library", "code": "import Mathlib\ntheorem t (p : Prop) (h : p) : p := h"},
        ]
    }
    with httpx2.Client(base_url=url, timeout=100) as http:
        good, library = http.post("/api/check", json=body).json()["results"]
    assert (reading(good), reading(library)) == ("valid", "server_error")
    assert "Mathlib" in library["error"]
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0


@pytest.mark.slow
def test_it_ends_with_its_own_server(terminal: Terminal) -> None:
    url = serve(terminal, "--grace", "600")
    process = terminal.processes[-1]
    with httpx2.Client(base_url=url, timeout=100) as http, ThreadPoolExecutor() as threads:
        until(lambda: http.get("/ready").status_code == 200)
        asked = threads.submit(http.post, "/v1/check", json={"code": LONG})
        until(lambda: http.get("/v1/status").json()["outstanding"] == 1)
        os.kill(own_server_of(process), signal.SIGKILL)
        assert asked.result(timeout=100).status_code == 503
    done = ended(process)
    assert done.code == 3
    said = done.err.splitlines()[-1]
    assert said.startswith("leanq: the server of this command has died"), done.err
    assert said.endswith("; run the command again")
    assert terminal.is_clean()


@pytest.mark.slow
def test_a_lost_queue_is_told_at_once_and_followed_to_its_next_place(terminal: Terminal) -> None:
    def up() -> Process:
        process = terminal.start("up", "--driver", "echo")
        wait_for_line(process.stderr, "leanq is up")
        return process

    first = up()
    url = serve(terminal)
    gateway = terminal.processes[-1]
    with httpx2.Client(base_url=url, timeout=100) as http:
        until(lambda: http.get("/ready").status_code == 200)
        first.send_signal(signal.SIGTERM)
        assert ended(first).code == 0
        wait_for_line(gateway.stderr, "the queue is lost")
        asked = http.post("/v1/check", json={"code": "-- x"})
        assert (asked.status_code, asked.json()["type"]) == (503, "urn:leanq:unavailable")
        assert int(asked.headers["Retry-After"]) >= 1
        snippets = [{"id": "a", "code": "-- x"}]
        told = http.post("/api/check", json={"snippets": snippets}).json()["results"]
        assert reading(told[0]) == "server_error"
        second = up()
        wait_for_line(gateway.stderr, "the queue answers again")
        until(lambda: http.get("/ready").status_code == 200)
        # It is the new one, which offers nothing but an echo.
        asked = http.post("/v1/check", json={"code": "-- x"})
        assert asked.json()["type"] == "urn:leanq:unknown-environment"
    for process in (gateway, second):
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == 0


@pytest.mark.slow
def test_the_first_start_makes_a_key_and_shows_it_once(client: Terminal) -> None:
    file = client.folder / "made.toml"
    for start in range(2):
        process = client.start("serve", "--port", "0", "--keys", str(file), "--make-key")
        if start == 0:
            line = wait_for_line(process.stderr, "shown this once")
            key = line.split()[-1]
        found = re.search(r"http://\S+", wait_for_line(process.stderr, "the gateway is at"))
        assert found
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx2.get(f"{found[0]}/v1/status", headers=headers).status_code == 200
        assert httpx2.get(f"{found[0]}/v1/status").status_code == 401
        process.send_signal(signal.SIGTERM)
        ended(process)
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o77 == 0
