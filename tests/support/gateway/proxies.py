"""Real proxies in front of a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from support.paths import ROOT
from support.required import missing
from support.waiting import eventually

COMMANDS = {
    "nginx": ("nginx", "-c"),
    "caddy": ("caddy", "run", "--adapter", "caddyfile", "--config"),
    "haproxy": ("haproxy", "-f"),
}
CADDYFILE = ROOT / "deploy" / "Caddyfile"


@contextlib.asynccontextmanager
async def proxy(name: str, config: str, port: int, **environ: str) -> AsyncIterator[None]:
    """Debian's proxy of this name with a configuration in which ``{folder}`` is a folder of its
    own, while it listens at ``port``."""
    program, *arguments = COMMANDS[name]
    found = shutil.which(program, path="/usr/sbin:/usr/bin:/usr/local/bin")
    if found is None:
        missing(f"Debian's {name}")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="leanq-proxy-"))
        # nginx's own processes run as another user.
        Path(folder).chmod(0o755)
        path = Path(folder, "config")
        path.write_text(config.replace("{folder}", folder))
        log = stack.enter_context(Path(folder, "log").open("wb"))
        process = await asyncio.create_subprocess_exec(
            *(found, *arguments, str(path)),
            stdout=log,
            stderr=log,
            env={"HOME": folder, "PATH": "/usr/bin:/usr/sbin", **environ},
        )

        def listens() -> bool:
            assert process.returncode is None, Path(folder, "log").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        try:
            await eventually(listens)
            yield
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


@contextlib.asynccontextmanager
async def caddy(
    gateway: str, port: int, head_s: int = 20, connections: int = 7000
) -> AsyncIterator[None]:
    """The Caddyfile that is shipped, without TLS, and ``head_s`` seconds for a head.

    ``connections``: the most to the gateway.
    """
    config = CADDYFILE.read_text().replace("read_header 20s", f"read_header {head_s}s")
    config = config.replace("grace_period 30s", "grace_period 1s")
    config = config.replace("max_conns_per_host 7000", f"max_conns_per_host {connections}")
    where = {"SITE": f"http://127.0.0.1:{port}", "GATEWAY": gateway}
    async with proxy("caddy", config, port, **where):
        yield
