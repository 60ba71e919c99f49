"""The overlays of ``k8s``: their schemas, and what no schema says."""

from __future__ import annotations

import base64
import os
import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import click
import kubernetes_validate
import pytest
from support.fleet.manifests import (
    EVERYTHING,
    OVERLAYS,
    RELEASE,
    ROOT,
    Object,
    check_pinned,
    named,
    of_kind,
    overlay,
    pod,
    pods,
    quantity,
    read,
    render,
    request_bytes,
    settings,
    strings,
)

from leanq.cli import cli
from leanq.lean.run.headers_memory import LEAST_BYTES, WORKER_BYTES

# The oldest that docs/operations/kubernetes.md promises, and that of the pods' user namespaces.
VERSIONS = ("1.27", "1.33")
CLUSTER_WIDE = {"Namespace", "PriorityClass"}
ARCH = "kubernetes.io/arch"
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject"}
# What the operator provides, as docs/operations/kubernetes.md says.
PROVIDED = {("Secret", "leanq-redis"): {"worker-url", "scaler-url", "ca.pem"}}
SPOT = "cloud.google.com/gke-spot"
SPOT_GRACE_S = 15
RELEASE_S = 5


@pytest.fixture(params=EVERYTHING)
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return render(request.param)


def test_the_overlays_are_these() -> None:
    assert OVERLAYS == ["gke-hpa", "gke-spot", "keda", "local"]


# Schemas and names


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_schemas(objects: tuple[Object, ...], version: str) -> None:
    if _has_walls(objects) and version != VERSIONS[-1]:
        return
    for each in objects:
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(dict(each), version, strict=True)


def test_the_oldest_versions_are_named() -> None:
    said = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    assert f"Kubernetes {VERSIONS[0]} or newer" in said
    assert "KEDA 2." in said


def test_each_object_is_there_once_and_in_the_namespace(objects: tuple[Object, ...]) -> None:
    names = Counter((each["kind"], each["metadata"]["name"]) for each in objects)
    assert not [name for name, count in names.items() if count > 1]
    for each in objects:
        assert each["kind"] in CLUSTER_WIDE or each["metadata"]["namespace"] == "leanq"
    (namespace,) = of_kind(objects, "Namespace")
    labels = namespace["metadata"]["labels"]
    enforced = "privileged" if _has_walls(objects) else "restricted"
    assert labels["pod-security.kubernetes.io/enforce"] == enforced


def test_selectors_match(objects: tuple[Object, ...]) -> None:
    for each in of_kind(objects, "Deployment"):
        name = each["metadata"]["name"]
        selector = each["spec"]["selector"]
        assert [other.name for other in pods(objects) if other.matches(selector)] == [name]
        for constraint in each["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"] == selector
            # A zone without spot machines must not hold up the others.
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    for each in of_kind(objects, "PodDisruptionBudget"):
        matched = [other.name for other in pods(objects) if other.matches(each["spec"]["selector"])]
        assert matched == ["leanq-worker"]
    for each in of_kind(objects, "Service"):
        selector = {"matchLabels": each["spec"]["selector"]}
        (behind,) = (other for other in pods(objects) if other.matches(selector))
        assert all(port["targetPort"] in behind.ports for port in each["spec"]["ports"])


def test_one_scaler_alone_sizes_the_workers(objects: tuple[Object, ...]) -> None:
    assert "replicas" not in named(objects, "Deployment", "leanq-worker")["spec"]
    scalers = [each for each in pods(objects) if each.is_ours and each.command[0] == "scale"]
    hpas, scaled = (of_kind(objects, kind) for kind in ("HorizontalPodAutoscaler", "ScaledObject"))
    for each in (*hpas, *scaled):
        assert each["spec"]["scaleTargetRef"]["name"] == "leanq-worker"
    for scaler in scalers:
        options = scaler.command[1]
        assert options["--deployment"] == "leanq-worker"
        # Neither more nor less, or requests wait for workers that nobody orders.
        worker = pod(objects, "leanq-worker")
        assert scaler.environments == worker.environments
        # Until a worker is there to say so.
        assert options["--slots"] == worker.command[1]["--slots"]
        assert int(options["--min-workers"]) <= int(options["--max-workers"])
        hpa = [each["metadata"]["name"] for each in hpas]
        assert [options[word] for word in ("--hpa",) if word in options] == hpa
        for each in hpas:
            # The least size is the scaler's word, and has to be one that is allowed.
            assert "minReplicas" not in each["spec"]
            assert int(options["--min-workers"]) >= 1
            assert int(options["--max-workers"]) <= each["spec"]["maxReplicas"]
    assert len(scalers) + len(scaled) == 1


def test_every_reference_leads_somewhere(objects: tuple[Object, ...]) -> None:
    there: dict[tuple[str, str], set[str]] = dict(PROVIDED)
    for each in of_kind(objects, "ConfigMap", "Secret"):
        there[each["kind"], each["metadata"]["name"]] = set(each["data"])
    accounts = {each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount")}
    for each in pods(objects):
        env = each.container.get("env", [])
        keys = [item["valueFrom"]["secretKeyRef"] for item in env if "secretKeyRef" in str(item)]
        assert all(ref["key"] in there["Secret", ref["name"]] for ref in keys)
        for source in each.container.get("envFrom", ()):
            assert ("ConfigMap", source["configMapRef"]["name"]) in there
        volumes = {volume["name"]: volume for volume in each.spec["volumes"]}
        assert set(volumes) == {mount["name"] for mount in each.container["volumeMounts"]}
        for volume in volumes.values():
            if secret := volume.get("secret"):
                known = there["Secret", secret["secretName"]]
                # Never the whole Secret: its URLs would be files.
                assert {item["key"] for item in secret["items"]} <= known - {"worker-url"}
        assert each.spec.get("serviceAccountName", "default") in {*accounts, "default"}
        if name := each.spec.get("priorityClassName"):
            assert named(objects, "PriorityClass", name)
    said = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    for (_, name), keys_ in PROVIDED.items():
        assert all(f"`{word}`" in said for word in (name, *keys_))


def test_no_secrets_are_kept_here(objects: tuple[Object, ...]) -> None:
    for each in of_kind(objects, "Secret"):
        for value in each["data"].values():
            url = urlsplit(base64.b64decode(value).decode())
            assert (url.netloc, url.query) == (f"{url.hostname}:{url.port}", "")
    for text in strings(list(objects)):
        assert not re.search(r"rediss?://[^/]*:[^/]*@|BEGIN |password", text)


# Pods


def test_images_are_pinned_and_of_one_release(objects: tuple[Object, ...]) -> None:
    for each in pods(objects):
        check_pinned(each.container["image"])
        if each.is_ours:
            assert each.container["image"].endswith(f":{RELEASE}")
        assert each.container.get("imagePullPolicy", "IfNotPresent") != "Always"


def test_our_pods_are_where_the_image_runs_and_workers_go_first(
    objects: tuple[Object, ...],
) -> None:
    values = {each["metadata"]["name"]: each["value"] for each in of_kind(objects, "PriorityClass")}
    for each in pods(objects):
        if each.is_ours:
            assert each.spec["nodeSelector"][ARCH] == "amd64"
            value = values[each.spec["priorityClassName"]]
            # The cluster's autoscaler adds no machine for what is below -10.
            assert -10 < value < 0 if each.name == "leanq-worker" else value > 0


def test_nothing_runs_with_privileges(objects: tuple[Object, ...]) -> None:
    bound = {
        subject["name"] for each in of_kind(objects, "RoleBinding") for subject in each["subjects"]
    }
    for each in pods(objects):
        context = each.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert min(context["runAsUser"], context["runAsGroup"]) > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        walls = {"procMount", "seccompProfile", "appArmorProfile"}
        has_walls = each.name == "leanq-worker" and _has_walls(objects)
        own = each.container["securityContext"]
        assert set(own) & walls == (walls if has_walls else set())
        assert {name: value for name, value in own.items() if name not in walls} == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(each.spec)
        assert all(set(volume) & {"emptyDir", "secret"} for volume in each.spec["volumes"])
        # A token for accounts with rights to use it, and for no others.
        account = each.spec.get("serviceAccountName", "default")
        assert each.spec["automountServiceAccountToken"] is (account in bound)
        assert each.spec["enableServiceLinks"] is False
    for each in of_kind(objects, "ServiceAccount"):
        assert each["automountServiceAccountToken"] is False


def _with_component(folder: Path, name: str) -> tuple[Object, ...]:
    """gke-spot with a component, as an operator's own overlay has it."""
    # kubectl takes paths relative to a kustomization, even to one outside of the repository.
    base, component = (
        os.path.relpath(ROOT / "k8s" / each, folder.resolve())
        for each in ("overlays/gke-spot", f"components/{name}")
    )
    text = f"resources: [{base}]\ncomponents: [{component}]\n"
    (folder / "kustomization.yaml").write_text(text)
    return render(str(folder))


COMPONENTS = sorted(path.name for path in (ROOT / "k8s" / "components").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPONENTS)
def test_schemas_of_components(tmp_path: Path, name: str) -> None:
    for each in _with_component(tmp_path, name):
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(dict(each), VERSIONS[-1], strict=True)


def test_spot_machines_are_preferred_where_there_is_a_fallback(tmp_path: Path) -> None:
    worker = pod(_with_component(tmp_path, "spot-fallback"), "leanq-worker")
    assert worker.spec["nodeSelector"] == {ARCH: "amd64"}
    affinity = worker.spec["affinity"]["nodeAffinity"]
    assert set(affinity) == {"preferredDuringSchedulingIgnoredDuringExecution"}
    (wanted,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    (expression,) = wanted["preference"]["matchExpressions"]
    assert expression == {"key": SPOT, "operator": "In", "values": ["true"]}
    # Without it they could not go there.
    assert worker.spec["tolerations"][0]["key"] == SPOT


def test_campaign_workers_have_what_the_page_says(tmp_path: Path) -> None:
    worker = pod(_with_component(tmp_path, "campaigns"), "leanq-campaigns")
    metrics = [f"--metrics-port={worker.ports['metrics']}", "--metrics-host=0.0.0.0"]
    assert worker.container["args"] == ["campaign", "worker", "--json", *metrics]
    campaign = cli.get_command(click.Context(cli), "campaign")
    assert isinstance(campaign, click.Group)
    found = campaign.get_command(click.Context(campaign), "worker")
    assert found
    known = {word for param in found.params for word in param.opts}
    assert known >= {"--json", "--metrics-port", "--metrics-host"}
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    (url,) = (item["valueFrom"]["secretKeyRef"] for item in worker.container["env"])
    (claim,) = (
        v["persistentVolumeClaim"]
        for v in worker.spec["volumes"]
        if len(v) > 1 and "persistentVolumeClaim" in v
    )
    for word in (url["key"], claim["claimName"], "/campaigns"):
        assert f"`{word}`" in page
    # It is one of those that the policies let out to Redis.
    assert worker.is_ours


def test_gateways_have_what_the_page_says(tmp_path: Path) -> None:
    objects = _with_component(tmp_path, "gateway")
    gateway = pod(objects, "leanq-gateway")
    command, options = gateway.command
    assert command == "serve"
    assert gateway.ports == {
        "http": int(options["--port"]),
        "metrics": int(options["--metrics-port"]),
    }
    # The last words take 2 s.
    sleep_s = int(gateway.container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed_s = sleep_s + float(options["--grace"]) + RELEASE_S
    assert needed_s <= gateway.spec["terminationGracePeriodSeconds"]
    assert gateway.container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert gateway.container["livenessProbe"]["tcpSocket"] == {"port": "http"}
    (url,) = (item["valueFrom"]["secretKeyRef"] for item in gateway.container["env"])
    volumes = {volume["name"]: volume.get("secret") for volume in gateway.spec["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in gateway.container["volumeMounts"]}
    keys = volumes["keys"]
    assert keys
    assert options["--keys"] == f"{mounts['keys']}/{keys['items'][0]['path']}"
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    for word in (url["key"], keys["secretName"], keys["items"][0]["key"], "leanq-gateway-client"):
        assert f"`{word}`" in page
    for kind in ("Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"):
        assert named(objects, kind, "leanq-gateway")
    scaled = named(objects, "HorizontalPodAutoscaler", "leanq-gateway")["spec"]
    assert scaled["scaleTargetRef"]["name"] == "leanq-gateway"
    assert scaled["minReplicas"] >= 2
    assert "replicas" not in named(objects, "Deployment", "leanq-gateway")["spec"]
    # It is one of those that the policies let out to Redis, and in to it on one port alone.
    assert gateway.is_ours
    (rule,) = named(objects, "NetworkPolicy", "gateway-from-clients")["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": "http"}]
    for name in ("PodDisruptionBudget", "Service"):
        selector = named(objects, name, "leanq-gateway")["spec"]["selector"]
        selector = selector if "matchLabels" in selector else {"matchLabels": selector}
        assert [each.name for each in pods(objects) if each.matches(selector)] == ["leanq-gateway"]


def test_the_component_of_walls_has_all_that_they_need() -> None:
    worker = pod(render("overlays/gke-spot"), "leanq-worker")
    assert "--require-walls" in worker.container["args"]
    assert worker.spec["hostUsers"] is False
    context = worker.container["securityContext"]
    assert context["procMount"] == "Unmasked"
    profile = context["seccompProfile"]
    assert profile["type"] == "Localhost"
    nodes = render("nodes")
    (daemons,) = of_kind(nodes, "DaemonSet")
    spec = daemons["spec"]["template"]["spec"]
    (folder,) = (each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each)
    assert f"{folder}/seccomp.json" == f"/var/lib/kubelet/seccomp/{profile['localhostProfile']}"
    (config,) = of_kind(nodes, "ConfigMap")
    assert config["data"]["seccomp.json"] == (ROOT / "deploy" / "seccomp.json").read_text()


@pytest.mark.slow
def test_schemas_of_what_runs_on_nodes() -> None:
    for each in render("nodes"):
        kubernetes_validate.validate(dict(each), VERSIONS[-1], strict=True)


def _has_walls(objects: tuple[Object, ...]) -> bool:
    return "hostUsers" in pod(objects, "leanq-worker").spec


@pytest.mark.parametrize("name", OVERLAYS)
def test_walls_are_required_wherever_strangers_texts_run(name: str) -> None:
    objects = render(f"overlays/{name}")
    worker = pod(objects, "leanq-worker")
    _, options = worker.command
    runs_texts = options["--driver"] != "echo"
    assert ("--require-walls" in worker.container["args"]) is runs_texts
    # Else no worker would begin to serve.
    assert _has_walls(objects) is runs_texts


# vCPUs and memory (GiB) of machines that the pages name, and how many workers are to run on one.
MACHINES = {"n2d-highmem-8": (8, 64, 2), "c3-highmem-8": (8, 64, 2), "n2d-highmem-16": (16, 128, 4)}
# What the platform's own pods ask for on each machine.
PLATFORM_CPUS, PLATFORM_BYTES = 0.45, 600 << 20


def allocatable(cpus: int, gib: float) -> tuple[float, float]:
    """The CPUs and the bytes that GKE leaves to pods, as its page on node sizes says."""
    reserved = 0.06 + 0.01 * min(cpus - 1, 1) + 0.005 * min(max(cpus - 2, 0), 2)
    reserved += 0.0025 * max(cpus - 4, 0)
    kept, left = 0.1, gib
    for size, share in ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06)):
        kept += share * min(left, size)
        left -= min(left, size)
    return cpus - reserved, (gib - kept - 0.02 * left) * (1 << 30)


@pytest.mark.parametrize("name", MACHINES)
def test_workers_fill_their_machines(name: str) -> None:
    cpus, gib, count = MACHINES[name]
    worker = pod(render("overlays/gke-spot"), "leanq-worker")
    wants = worker.container["resources"]["requests"]
    free_cpus, free_bytes = allocatable(cpus, gib)
    fit = min(
        (free_cpus - PLATFORM_CPUS) // quantity(wants["cpu"]),
        (free_bytes - PLATFORM_BYTES) // quantity(wants["memory"]),
    )
    _, options = worker.command
    assert fit == count
    assert fit * int(options["--slots"]) == cpus


def test_the_pages_name_machines_that_workers_fill() -> None:
    for page in ("operations/kubernetes.md", "mathlib.md"):
        text = (ROOT / "docs" / page).read_text()
        pools = re.findall(r"--spot\b[^`]*?--machine-type=(\S+)", text)
        assert pools
        assert {*pools} <= {*MACHINES}


def test_resources(objects: tuple[Object, ...]) -> None:
    for each in pods(objects):
        resources = each.container["resources"]
        for what in ("cpu", "memory"):
            wanted, most = (quantity(resources[part][what]) for part in ("requests", "limits"))
            assert 0 < wanted <= most
        sizes = [
            quantity(volume["emptyDir"]["sizeLimit"])
            for volume in each.spec["volumes"]
            if "emptyDir" in volume
        ]
        if most_disk := resources["limits"].get("ephemeral-storage"):
            assert quantity(resources["requests"]["ephemeral-storage"]) <= quantity(most_disk)
            assert sum(sizes) <= quantity(most_disk)


def test_a_worker_has_room_for_what_its_requests_may_take(objects: tuple[Object, ...]) -> None:
    worker = pod(objects, "leanq-worker")
    _, options = worker.command
    limits = worker.container["resources"]["limits"]
    if options["--driver"] != "echo":
        slots = int(options["--slots"])
        beside = WORKER_BYTES + LEAST_BYTES
        assert slots * request_bytes() + beside <= quantity(limits["memory"])
        assert 0.9 * slots <= quantity(worker.container["resources"]["requests"]["cpu"])
        assert slots <= quantity(limits["cpu"])
    env = {item["name"]: item.get("value", "") for item in worker.container["env"]}
    (cache,) = (volume for volume in worker.spec["volumes"] if volume["name"] == "cache")
    cache_bytes = int(env["LEANQ_CACHE_MB"]) << 20
    assert cache_bytes * 1.25 <= quantity(cache["emptyDir"]["sizeLimit"])
    mounts = {mount["name"]: mount["mountPath"] for mount in worker.container["volumeMounts"]}
    image = (ROOT / "Dockerfile").read_text()
    assert f"LEANQ_CACHE={mounts['cache']}" in image
    assert mounts["tmp"] == "/tmp"


def test_probes(objects: tuple[Object, ...]) -> None:
    for each in pods(objects):
        probes = {word: probe for word, probe in each.container.items() if word.endswith("Probe")}
        assert {"readinessProbe", "livenessProbe"} <= set(probes)
        for probe in probes.values():
            for how in ("httpGet", "tcpSocket"):
                assert how not in probe or probe[how]["port"] in each.ports
        # An outage of Redis must not kill a pod: only what a process knows of itself counts.
        liveness = probes["livenessProbe"]
        own = liveness.get("httpGet", {}).get("path") == "/metrics" and each.name == "leanq-worker"
        assert own or "tcpSocket" in liveness
    worker = pod(objects, "leanq-worker").container
    startup = worker["startupProbe"]
    assert startup["httpGet"]["path"] == "/healthz"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert worker["readinessProbe"]["httpGet"]["path"] == "/healthz"


def test_commands_and_settings_are_leanqs(objects: tuple[Object, ...]) -> None:
    for each in pods(objects):
        if not each.is_ours:
            continue
        command, options = each.command
        port = "--metrics-port" if command == "worker" else "--port"
        assert each.ports == {"metrics": int(options[port])}
        assert options["--metrics-host"] == "0.0.0.0"  # Prometheus and probes come from outside.
        variables = {item["name"] for item in each.container["env"]}
        assert "LEANQ_URL" in variables
        used = {word for value in options.values() for word in re.findall(r"\$\((\w+)\)", value)}
        assert variables <= settings() | used
    for each in of_kind(objects, "ConfigMap"):
        assert set(each["data"]) <= settings()


def test_graces(objects: tuple[Object, ...]) -> None:
    worker = pod(objects, "leanq-worker")
    grace_s = float(worker.command[1]["--grace"])
    assert grace_s + RELEASE_S <= worker.spec["terminationGracePeriodSeconds"]
    assert "lifecycle" not in worker.container
    if SPOT in worker.spec.get("nodeSelector", {}):
        assert worker.spec["terminationGracePeriodSeconds"] <= SPOT_GRACE_S


@pytest.mark.parametrize("name", ["gke-spot", "gke-hpa", "keda"])
def test_workers_alone_are_on_spot_machines(name: str) -> None:
    for each in pods(overlay(name)):
        if each.name == "leanq-worker":
            assert each.spec["nodeSelector"] == {ARCH: "amd64", SPOT: "true"}
            (toleration,) = each.spec["tolerations"]
            assert toleration == {
                "key": SPOT,
                "operator": "Equal",
                "value": "true",
                "effect": "NoSchedule",
            }
        else:
            assert "tolerations" not in each.spec
            needed = each.spec["affinity"]["nodeAffinity"]
            (term,) = needed["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
            assert term["matchExpressions"] == [{"key": SPOT, "operator": "DoesNotExist"}]
        (mount,) = (
            mount for mount in each.container["volumeMounts"] if mount["name"] == "redis-ca"
        )
        assert (
            f"ssl_ca_certs={mount['mountPath']}/ca.pem"
            in (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
        )


# What Kubernetes itself has no schema for


def test_custom_resources(objects: tuple[Object, ...]) -> None:
    for each in of_kind(objects, "PodMonitor"):
        assert each["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(each["spec"]) == {"selector", "podMetricsEndpoints"}
        watched = [other for other in pods(objects) if other.matches(each["spec"]["selector"])]
        assert watched == [other for other in pods(objects) if other.is_ours]
        for endpoint in each["spec"]["podMetricsEndpoints"]:
            assert set(endpoint) == {"port", "interval"}
            assert all(endpoint["port"] in other.ports for other in watched)
    for each in of_kind(objects, "ScaledObject"):
        assert each["apiVersion"] == "keda.sh/v1alpha1"
        spec = each["spec"]
        assert spec["minReplicaCount"] == 0 < spec["maxReplicaCount"]
        (trigger,) = spec["triggers"]
        assert trigger["type"] == "prometheus"
        # All of KEDA's metadata are strings.
        assert all(isinstance(value, str) for value in trigger["metadata"].values())
        slots = pod(objects, "leanq-worker").command[1]["--slots"]
        assert trigger["metadata"]["threshold"] == slots


def test_the_rules_are_those_of_the_file() -> None:
    rule = named(render("base"), "PrometheusRule", "leanq")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["spec"] == read("deploy/observability/alerts.yaml")
