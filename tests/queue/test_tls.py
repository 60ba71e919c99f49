"""TLS, on a server program that speaks it (the wheel's does not): Debian's redis-server."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis
from support.cluster import free_ports
from support.fleets import echo_body, submission, until, working
from support.queue.queues import Queue
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.commands.doctor import server_findings
from leanq.errors import UnavailableError
from leanq.queue.operator_queue import look
from leanq.queue.settings import Settings
from leanq.queue.worker_queue import reap


@dataclass(frozen=True)
class Secure:
    """A server that asks for a certificate, and the files that lead to it."""

    port: int
    folder: Path

    def settings(self, **files: str) -> Settings:
        options = "&".join(f"ssl_{name}={self.folder}/{file}" for name, file in files.items())
        return Settings(url=f"rediss://127.0.0.1:{self.port}?{options}", lease_s=0.6)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    server, openssl = shutil.which("redis-server"), shutil.which("openssl")
    if not (server and openssl):
        pytest.skip("redis-server and openssl are not installed (.ci/run installs them)")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "theirs"):
        words = (
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=leanq"
        )
        files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
        alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
        command = [openssl, *words.split(), *alternative, *files]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    (port,) = free_ports(1)
    options = (
        f"--port 0 --tls-port {port} --tls-cert-file ours.crt --tls-key-file ours.key "
        f"--tls-ca-cert-file ours.crt --bind 127.0.0.1 --save"
    )
    made = Secure(port, folder)
    process = subprocess.Popen(
        [server, *options.split(), ""], cwd=folder, stdout=subprocess.DEVNULL
    )

    def answers() -> bool:
        assert process.poll() is None, f"{server} does not start with TLS"
        try:
            with redis.Redis.from_url(made.settings(**OURS).url) as connection:
                return bool(connection.ping())
        except redis.ConnectionError:
            return False

    try:
        until(answers)
        yield made
    finally:
        process.kill()
        process.wait(20)


OURS = {"ca_certs": "ours.crt", "certfile": "ours.crt", "keyfile": "ours.key"}


async def test_everything_works_through_tls_and_on_redis_7(secure: Secure) -> None:
    settings = replace(secure.settings(**OURS), max_attempts=1)
    # A busy machine must not be taken for a dead worker here.
    calm = replace(settings, lease_s=60.0)
    async with AsyncLeanQClient(calm) as lean, working(calm, slots=8):
        payloads = [bytes(300 * number) for number in range(300)]
        assert await asyncio.gather(*map(lean.echo, payloads)) == payloads
    queue = Queue(settings)
    await queue.submit("c", [submission("0-killer", echo_body(b""))])
    await queue.register("dying", b"", {"echo": b""})
    assert (await queue.claim("dying", ["echo"], 1, busy=0, token="n:")).jobs

    async def poisoned() -> bool:
        await queue.renew("other")
        return (await reap(queue)).poisoned == 1

    await eventually(poisoned)
    await queue.release("other", [], leave=True)
    assert await queue.dead_request_ids(9) == ["0-killer"]
    assert (await look(settings)).dead == 1
    await queue.close()


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"ca_certs": "theirs.crt", "certfile": "ours.crt", "keyfile": "ours.key"},
        {"ca_certs": "ours.crt", "certfile": "theirs.crt", "keyfile": "theirs.key"},
        {"ca_certs": "ours.crt"},
    ],
)
async def test_without_the_right_certificates_it_says_so(
    secure: Secure, files: dict[str, str]
) -> None:
    with pytest.raises(UnavailableError, match=r"no answer from rediss://127\.0\.0\.1") as refused:
        async with AsyncLeanQClient(secure.settings(**files)):
            pass
    assert "\n" not in str(refused.value)


async def test_a_certificate_without_the_servers_name_is_a_matter_of_its_own_ca(
    secure: Secure,
) -> None:
    """As docs/operations/kubernetes.md has it for certificates that name an address by CN alone."""
    (secure.folder / "both.crt").write_text(
        (secure.folder / "theirs.crt").read_text() + (secure.folder / "ours.crt").read_text()
    )

    def settings(ca: str, options: str) -> Settings:
        url = secure.settings(**{**OURS, "ca_certs": ca}).url
        # The certificate names 127.0.0.1 and nothing else.
        return Settings(url=url.replace("127.0.0.1", "localhost") + options)

    with pytest.raises(UnavailableError, match="mismatch"):
        async with AsyncLeanQClient(settings("ours.crt", "")):
            pass
    # While CAs change there are two in the file.
    for ca in ("ours.crt", "both.crt"):
        queue = Queue(settings(ca, "&ssl_check_hostname=false"))
        assert await queue.ping()
        await queue.close()
    with pytest.raises(UnavailableError, match="certificate verify failed"):
        async with AsyncLeanQClient(settings("theirs.crt", "&ssl_check_hostname=false")):
            pass


async def test_the_doctor_says_what_the_url_lacks(secure: Secure) -> None:
    files = secure.settings(**OURS).url.partition("?")[2]
    for url, hint in (
        (f"redis://127.0.0.1:{secure.port}", "the URL begins with rediss://"),
        (f"rediss://127.0.0.1:{secure.port}", "ssl_ca_certs=FILE in the URL"),
        (f"rediss://localhost:{secure.port}?{files}", "ssl_check_hostname=false"),
    ):
        (found,) = await server_findings(url)
        assert not found.works
        assert hint in found.text, found
