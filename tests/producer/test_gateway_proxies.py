"""Clients of a gateway with something else in between: proxies, and answers of others."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest
from support.cluster import free_ports
from support.gateway.gateways import Scripted, new_gateway
from support.gateway.proxies import COMMANDS, proxy
from support.terminals import Terminal
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.errors import InvalidRequestError, LeanQError, UnavailableError, UsageError
from leanq.queue.settings import Settings

SECRET = "the-key-of-a-tenant"
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
Answer = Callable[[bytes], bytes]


@contextlib.asynccontextmanager
async def answering(answer: Answer, seen: list[bytes] | None = None) -> AsyncIterator[int]:
    """A server that answers each request with bytes, and ends the connection; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if seen is not None:
                seen.append(head)
            writer.write(answer(head))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def page(status: str, body: bytes = b"<html>no</html>", kind: str = "text/html") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


async def test_no_proxy_gets_the_key_of_a_gateway_on_this_machine(
    settings: Settings, scripted: Scripted, monkeypatch: pytest.MonkeyPatch, no_proxies: None
) -> None:
    seen: list[bytes] = []
    async with answering(lambda _: page("502 Bad Gateway"), seen) as port:
        for name in PROXIES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        async with new_gateway(settings) as gateway:
            for host in ("127.0.0.1", "localhost"):
                url = gateway.url.replace("127.0.0.1", host)
                with contextlib.suppress(UnavailableError):  # where localhost is ::1 alone
                    async with AsyncLeanQClient(url, key=SECRET) as lean:
                        assert (await lean.check("-- accepted")).verdict == "accepted"
            monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
            async with AsyncLeanQClient(gateway.url, key=SECRET) as lean:
                assert (await lean.check("-- accepted")).verdict == "accepted"
    assert seen == []


async def test_a_proxy_that_is_in_the_way_is_named(
    monkeypatch: pytest.MonkeyPatch, no_proxies: None
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"by the proxy http://user:\*\*\*@127") as caught:
        await AsyncLeanQClient("https://lean.example", key=SECRET).__aenter__()
    assert "secret@" not in str(caught.value)
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(LeanQError, match="NO_PROXY"):
        await AsyncLeanQClient("https://lean.example", key=SECRET).__aenter__()
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    with pytest.raises(UsageError, match="SSL_CERT_FILE"):
        await AsyncLeanQClient("https://lean.example").__aenter__()


async def test_another_server_at_the_url_is_named_and_its_page_is_not_shown(
    no_proxies: None,
) -> None:
    for answer in (page("200 OK"), page("404 Not Found"), page("302 Found")):
        async with answering(lambda _, answer=answer: answer) as port:  # type: ignore[misc]
            with pytest.raises(UnavailableError, match="other than a gateway of leanq") as caught:
                await AsyncLeanQClient(f"http://127.0.0.1:{port}").__aenter__()
        assert "<html>" not in str(caught.value)


def _random_answer(rng: random.Random) -> bytes:
    status = rng.choice([*range(200, 206), 301, 302, 304, 400, 401, 403, 404, 407, 429])
    status = rng.choice([status, 500, 502, 503, 504, 520, 599])
    kinds = ("text/html", "application/json", "application/problem+json", "text/event-stream", "")
    bodies = (
        *(b"", b"<html>", b"{", b"[]", b"null", b'{"status": 1}', b'{"status": "x", "type": 3}'),
        *(b'data: {"index": 99}\n\n', b'data: {"index": 0}\n\n', b'data: {"index": null}\n\n'),
        *(
            b'data: {"index": 0, "result": []}\n\n',
            b'data: {"index": 0, "result": {"messages": 1}}\n\n',
        ),
        *(b'data: {"index": 0, "problem": 7}\n\n', b'data: {"index"', b"\0\xff" * 40, b"[" * 5000),
        b'{"type": "urn:leanq:unavailable", "status": %d, "detail": "x"}' % status,
    )
    body = rng.choice(bodies) * rng.choice((1, 1, 2))
    length = len(body) + rng.choice((0, 0, 0, -1, 5))
    heads = [f"HTTP/1.1 {status} X", f"Content-Type: {rng.choice(kinds)}"]
    heads += rng.sample(
        ["Location: /x", "Content-Encoding: gzip", "Retry-After: x"], rng.choice((0, 0, 1))
    )
    if rng.random() < 0.9:
        heads.append(f"Content-Length: {max(0, length)}")
    data = "\r\n".join(heads).encode() + b"\r\n\r\n" + body
    return data[: rng.choice((len(data), len(data), len(data), rng.randrange(len(data))))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_no_answer_of_any_kind_ends_a_client(
    settings: Settings, scripted: Scripted, no_proxies: None, seed: int
) -> None:
    rng = random.Random(seed)
    async with new_gateway(settings) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        left = 8

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal left
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                if b"/v1/requests/0" not in head and left:
                    left -= 1
                    writer.write(_random_answer(rng))
                    await writer.drain()
                else:
                    theirs, ours = await asyncio.open_connection("127.0.0.1", port)
                    ours.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                    pumps = [
                        asyncio.create_task(_pump(reader, ours)),
                        asyncio.create_task(_pump(theirs, writer)),
                    ]
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                    await pumps[1]
                    pumps[0].cancel()
                    ours.close()
            writer.close()

        server = await asyncio.start_server(between, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with AsyncLeanQClient(url) as lean:
                checks = [lean.check(f"-- {n} accepted") for n in range(30)]
                for end in await asyncio.gather(*checks, return_exceptions=True):
                    # One that a made-up problem is about may end by it, as an error of leanq's.
                    assert isinstance(end, LeanQError) or end.verdict == "accepted", end
                left = 0
                assert (await lean.check("-- accepted")).verdict == "accepted"


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


# Real proxies

CONFIGS = {
    "nginx": """daemon off; pid {folder}/pid; error_log stderr; events {{}}
http {{ access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
server {{ listen 127.0.0.1:{port}; proxy_buffering off;
location /leanq/ {{ proxy_pass http://127.0.0.1:{gateway}/; }}
location / {{ proxy_pass http://127.0.0.1:{gateway}; }} }} }}
""",
    "caddy": """{{
    admin off
    auto_https off
}}
http://127.0.0.1:{port} {{
    handle_path /leanq/* {{
        reverse_proxy 127.0.0.1:{gateway}
    }}
    reverse_proxy 127.0.0.1:{gateway}
}}
""",
    "haproxy": """defaults
  mode http
  timeout connect 2s
  timeout client 60s
  timeout server 60s
frontend f
  bind 127.0.0.1:{port}
  http-request replace-path /leanq(/.*) \\1
  default_backend b
backend b
  server g 127.0.0.1:{gateway}
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
async def test_a_gateway_restarts_behind_a_proxy_and_nothing_is_lost(
    settings: Settings, scripted: Scripted, no_proxies: None, name: str
) -> None:
    port, gateway_port = free_ports(2)
    config = CONFIGS[name].format(folder="{folder}", port=port, gateway=gateway_port)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(proxy(name, config, port))
        async with new_gateway(settings, port=gateway_port, grace_s=0.1):
            url = f"http://127.0.0.1:{port}/leanq"
            lean = await stack.enter_async_context(AsyncLeanQClient(url))
            checks = [asyncio.create_task(lean.check(f"-- held {n}")) for n in range(4)]
            checks += [asyncio.create_task(lean.check(f"-- {n} accepted")) for n in range(100)]
            await eventually(lambda: sum(check.done() for check in checks) >= 100)
        # Nobody answers behind the proxy for as long as these take to notice it.
        late = [asyncio.create_task(lean.check(f"-- late {n} accepted")) for n in range(50)]
        await asyncio.wait(late, timeout=1.0)
        assert not any(each.done() for each in late)
        async with new_gateway(settings, port=gateway_port):
            scripted.gate.set()
            replies = await asyncio.gather(*checks, *late)
            assert {reply.verdict for reply in replies} == {"accepted"}
            if name == "nginx":  # which takes 1 MB
                long = "-- accepted" + " " * 3_000_000
                ends = await asyncio.gather(
                    *(lean.check(text) for text in (long, "-- short accepted")),
                    return_exceptions=True,
                )
                assert isinstance(ends[0], InvalidRequestError)
                assert "413" in str(ends[0])
                assert "client_max_body_size" in str(ends[0])
                assert ends[1].verdict == "accepted"  # type: ignore[union-attr]
            await lean.__aexit__(None, None, None)


@pytest.mark.slow
async def test_commands_reach_a_gateway_behind_a_path(
    settings: Settings, scripted: Scripted, terminal: Terminal, no_proxies: None
) -> None:
    port, gateway_port = free_ports(2)
    config = CONFIGS["nginx"].format(folder="{folder}", port=port, gateway=gateway_port)
    files = [terminal.file(f"{word}.lean", f"-- {word}") for word in ("accepted", "rejected")]
    async with proxy("nginx", config, port), new_gateway(settings, port=gateway_port):
        for url in (f"http://127.0.0.1:{port}/leanq", f"http://localhost:{port}/leanq/"):
            sent = await asyncio.to_thread(terminal.run, "submit", "--json", "--url", url, *files)
            assert [line["verdict"] for line in sent.lines] == ["accepted", "rejected"], sent.err
            environ = {"LEANQ_URL": url}
            words = ("verify", "--target", files[1], files[0], "--json")
            done = await asyncio.to_thread(terminal.run, *words, environ=environ)
            assert (done.code, done.lines[0]["verdict"]) == (0, "accepted"), done.err
        wrong = await asyncio.to_thread(
            terminal.run, "submit", "--url", f"http://127.0.0.1:{port}/leanq?a=1", *files
        )
    assert wrong.code == 2
    assert "https://HOST:PORT/PATH" in wrong.err
