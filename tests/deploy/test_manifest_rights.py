"""What the pods of ``k8s`` may ask of the API server and of the network: what they need."""

from __future__ import annotations

import ipaddress

import pytest
from support.fleet.manifests import (
    EVERYTHING,
    OVERLAYS,
    Object,
    Pod,
    named,
    of_kind,
    overlay,
    pod,
    pods,
    render,
)

# Group, resource, name (or any) and verb of every call of a scaler's: with --hpa, and without.
HPA_CALLS = {
    ("autoscaling", "horizontalpodautoscalers", "leanq-worker", "patch"),
    ("coordination.k8s.io", "leases", "*", "create"),
    ("coordination.k8s.io", "leases", "leanq-scaler", "get"),
    ("coordination.k8s.io", "leases", "leanq-scaler", "update"),
    ("apps", "deployments/scale", "leanq-worker", "get"),
    ("", "pods", "*", "list"),
}
CALLS = {
    *(call for call in HPA_CALLS if call[0] != "autoscaling"),
    ("apps", "deployments/scale", "leanq-worker", "patch"),
    ("", "pods", "*", "patch"),
}


@pytest.fixture(params=EVERYTHING)
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return render(request.param)


# Rights


def _granted(objects: tuple[Object, ...]) -> set[tuple[str, str, str, str]]:
    return {
        (group, resource, name, verb)
        for role in of_kind(objects, "Role")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", ["*"])
        for verb in rule["verbs"]
    }


@pytest.mark.slow
def test_rights_are_the_calls(objects: tuple[Object, ...]) -> None:
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")
    calls: set[tuple[str, str, str, str]] = set()
    for each in pods(objects):
        if each.is_ours and each.command[0] == "scale":
            calls |= HPA_CALLS if "--hpa" in each.command[1] else CALLS
    assert _granted(objects) == calls
    roles = {each["metadata"]["name"] for each in of_kind(objects, "Role")}
    bindings = of_kind(objects, "RoleBinding")
    assert {each["roleRef"]["name"] for each in bindings} == roles
    for each in bindings:
        (subject,) = each["subjects"]
        assert subject["namespace"] == "leanq"
        assert pod(objects, subject["name"]).spec["serviceAccountName"] == subject["name"]


# The network


def test_all_is_denied_but_what_follows(objects: tuple[Object, ...]) -> None:
    deny = named(objects, "NetworkPolicy", "default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for each in of_kind(objects, "NetworkPolicy"):
        spec = each["spec"]
        behind = [other for other in pods(objects) if other.matches(spec["podSelector"])]
        assert behind, f"{each['metadata']['name']} selects no pod"
        for rule in (*spec.get("egress", ()), *spec.get("ingress", ())):
            assert rule["ports"], "any port"
            for peer in rule.get("to", ()):
                assert "ipBlock" not in peer or ipaddress.ip_network(peer["ipBlock"]["cidr"])
        for rule in spec.get("ingress", ()):
            for port in rule["ports"]:
                assert all(
                    port["port"] in {*other.ports, *other.ports.values()} for other in behind
                )


def _ways_out(objects: tuple[Object, ...], who: Pod) -> set[str]:
    return {
        each["metadata"]["name"]
        for each in of_kind(objects, "NetworkPolicy")
        if "egress" in each["spec"] and who.matches(each["spec"]["podSelector"])
    }


def test_ways_out(objects: tuple[Object, ...]) -> None:
    policies = {each["metadata"]["name"] for each in of_kind(objects, "NetworkPolicy")}
    # The base does not know where Redis is.
    of_all = {"leanq-to-redis", "dns"} & policies
    for each in pods(objects):
        ways = of_all if each.is_ours else {"dns"}
        if each.is_ours and each.command[0] == "scale":
            ways = ways | {"scaler-to-api-server"}
        assert _ways_out(objects, each) == ways


def test_the_way_to_the_api_server_stays_on_private_networks(objects: tuple[Object, ...]) -> None:
    for each in of_kind(objects, "NetworkPolicy"):
        if each["metadata"]["name"] == "scaler-to-api-server":
            (rule,) = each["spec"]["egress"]
            assert rule["to"]
            for peer in rule["to"]:
                assert ipaddress.ip_network(peer["ipBlock"]["cidr"]).is_private


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_way_to_redis(name: str) -> None:
    objects = overlay(name)
    (to_redis,) = named(objects, "NetworkPolicy", "leanq-to-redis")["spec"]["egress"]
    for peer in to_redis["to"]:
        if "ipBlock" in peer:
            # A range, and not the world.
            assert ipaddress.ip_network(peer["ipBlock"]["cidr"]).prefixlen >= 16
        else:
            (server,) = (each for each in pods(objects) if each.matches(peer["podSelector"]))
            assert [port["port"] for port in to_redis["ports"]] == list(server.ports.values())
