"""Alerts, dashboard and KEDA's query: what they ask for exists, and their answers are right."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from support.fleet.manifests import ROOT, named, overlay, read
from support.metrics import port_in, scrape
from support.terminals import Terminal, ended, samples, wait_for_line

from leanq.queue.metrics import CAMPAIGNS, FLEET, GATEWAY, PROCESS, SCALER, WORKER, Kind, Metric
from leanq.queue.requests import Reason, Verdict
from leanq.queue.settings import Settings

FOLDER = ROOT / "deploy" / "observability"
TESTS = sorted(FOLDER.glob("alerts*_test.yaml"))
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())


def _of_processes() -> Iterator[Metric]:
    """Yields what Prometheus' client tells of any process, but for the address space."""
    for family in ProcessCollector(registry=CollectorRegistry()).collect():
        kind: Kind = "counter" if family.type == "counter" else "gauge"
        name = f"{family.name}_total" if kind == "counter" else family.name
        if name != "process_virtual_memory_bytes":
            yield Metric(name, kind, family.documentation)


METRICS = {
    each.name: each
    for each in (*FLEET, *SCALER, *WORKER, *GATEWAY, *CAMPAIGNS, *PROCESS, *_of_processes())
}
SHARED = {each.name for each in (*FLEET, *CAMPAIGNS)}
# Prometheus adds it to each sample.
SCRAPED = {"instance"}

# Exporters tell these once they have happened: in trouble, or where a fleet uses what not all do.
SOMETIMES = {
    "leanq_fork_server_total",
    "leanq_language_server_total",
    "leanq_http_refusals_total",
    "leanq_kernels_disagree_total",
    "leanq_lean_deaths_total",
    "leanq_other_release_requests",
    "leanq_redis_errors_total",
    "leanq_scaler_errors_total",
    "leanq_scaler_unsized_requests",
    "leanq_spans_dropped_total",
    "leanq_tenant_waiting",
    "leanq_tenant_weight",
    "leanq_worker_snapshots_total",
    *(name for name in METRICS if name.startswith("leanq_replay_")),
}

_USE = re.compile(
    r"(?P<name>(?:leanq|process)_\w+)(?:\{(?P<matchers>[^}]*)\})?(?P<range>\[[^]]+\])?"
)
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_BY = re.compile(r"by \(([^)]*)\)")
_MAX = re.compile(
    r"max(?: by \((?P<by>[^)]*)\))? ?\((?:\s*(?:rate|increase|delta|\w+_over_time)\()?\s*\Z"
)


@dataclass(frozen=True)
class Query:
    """One expression, where it stands, and what its legend names."""

    where: str
    text: str
    legend: str = ""

    def plain(self) -> str:
        """Without Grafana's variables."""
        return self.text.replace("$environment", ".*").replace("$__rate_interval", "1m")


@dataclass(frozen=True)
class Use:
    """A metric in a query."""

    metric: Metric
    name: str
    matchers: tuple[tuple[str, str, str], ...]
    has_range: bool
    before: str

    @property
    def labels(self) -> set[str]:
        return {*self.metric.labels, *(["le"] if self.name.endswith("_bucket") else [])}


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for group in read("deploy/observability/alerts.yaml")["groups"]
        for rule in group["rules"]
    ]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def _queries() -> Iterator[Query]:
    for rule in rules():
        legend = " ".join(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        yield Query(rule["alert"], rule["expr"], re.sub(r"(\w+)", r"{{\1}}", legend))
    for panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], target["expr"], target["legendFormat"])


QUERIES = list(_queries())


def uses(query: str) -> list[Use]:
    """Every metric in it; fails on a name that leanq/queue/metrics.py does not have."""
    found = []
    for match in _USE.finditer(query):
        name = match["name"]
        base = METRICS.get(name)
        if base is None:
            stem, _, part = name.rpartition("_")
            base = METRICS.get(stem)
            assert base, f"leanq has no metric {name}"
            assert (base.kind, part in ("bucket", "sum", "count")) == ("histogram", True), name
        else:
            assert base.kind != "histogram", f"{name} itself is no series"
        matchers = tuple(_MATCHER.findall(match["matchers"] or ""))
        before = query[: match.start()]
        found.append(Use(base, name, matchers, bool(match["range"]), before))
    return found


def promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (.ci/run installs it)")
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Queries


def test_metrics_and_labels_exist(subtests: pytest.Subtests) -> None:
    for query in QUERIES:
        with subtests.test(query.where):
            found = uses(query.text)
            assert found
            known = set().union(*(use.labels for use in found))
            for use in found:
                for label, how, value in use.matchers:
                    assert label in use.labels, f"{use.name} has no label {label}"
                    if value != "$environment":
                        _check_values(use.metric, label, how, value)
            grouped = {
                word for words in _BY.findall(query.text) for word in re.split(r", *", words)
            }
            assert grouped <= known | SCRAPED
            assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= grouped


def _check_values(metric: Metric, label: str, how: str, value: str) -> None:
    named_states = re.search(r"by state: ([\w, ]+)\.", metric.text)
    # Any status that says that the gateway is at fault.
    known: dict[str, set[str]] = {"verdict": set(get_args(Verdict)), "status": {"5.."}}
    known["reason"] = set(get_args(Reason))
    if metric.name == "leanq_http_refusals_total":
        known["reason"] = {"no key", "unknown key"}
    if named_states:
        known["state"] = set(named_states[1].split(", "))
    values = set(value.split("|")) if "~" in how else {value}
    assert values <= known[label], f"{metric.name} has no {label} of {values - known[label]}"


@pytest.mark.slow
def test_a_living_fleet_tells_what_is_asked_for(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    worker = terminal.start("worker", "--slots", "1", "--metrics-port", "0")
    ports = [port_in(wait_for_line(worker.stderr, "metrics of this worker"))]
    wait_for_line(worker.stderr, "serves")
    assert terminal.run("submit", *samples("and_swap", "wrong")).code == 1
    gateway = terminal.start("serve", "--port", "0", "--metrics-port", "0")
    ports.append(port_in(wait_for_line(gateway.stderr, "metrics of this gateway")))
    assert scrape(port_in(wait_for_line(gateway.stderr, "is at")), "/health")[0] == 200
    campaigns = terminal.start("campaign", "worker", "--metrics-port", "0")
    ports.append(port_in(wait_for_line(campaigns.stderr, "metrics of this campaign worker")))
    scaler = terminal.start("scale", "--target", "print", "--port", "0", "--every", "1s")
    ports.append(port_in(wait_for_line(scaler.stderr, "metrics of this scaler")))
    wait_for_line(scaler.stdout, "default: ")
    told: dict[str, set[str]] = {}
    for port in ports:
        for family in text_string_to_metric_families(scrape(port)[1]):
            for sample in family.samples:
                told.setdefault(sample.name, set()).update(sample.labels)
    for each in QUERIES:
        for use in uses(each.text):
            if use.metric.name not in SOMETIMES:
                assert told.get(use.name) == use.labels, use.name
    for process in (scaler, campaigns, gateway, worker):
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == 0


def test_counters_are_rates_and_gauges_are_not(subtests: pytest.Subtests) -> None:
    for query in QUERIES:
        with subtests.test(query.where):
            for use in uses(query.text):
                if use.metric.kind == "gauge":
                    assert use.has_range is use.before.endswith(("delta(", "_over_time(")), use.name
                else:
                    assert use.has_range, use.name
                    assert re.search(r"(rate|increase)\(\Z", use.before), use.name


def test_what_every_exporter_tells_is_counted_once(subtests: pytest.Subtests) -> None:
    """By `max`, and within it by each label that can differ, or parts of it would be lost."""
    for query in QUERIES:
        with subtests.test(query.where):
            for use in uses(query.text):
                if use.metric.name in SHARED and not use.before.endswith("absent("):
                    most = _MAX.search(use.before)
                    assert most, f"{use.name} of two exporters would count twice"
                    fixed = {label for label, how, _ in use.matchers if how == "="}
                    assert use.labels - fixed <= set(re.split(r", *", most["by"] or ""))


def test_the_syntax_of_the_dashboards_queries(tmp_path: Path) -> None:
    made = [{"record": f"q{n}", "expr": each.plain()} for n, each in enumerate(QUERIES)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": made}]}))
    promtool("check", "rules", file)


# Alerts


@pytest.mark.slow
def test_alerts_by_promtool() -> None:
    promtool("check", "rules", FOLDER / "alerts.yaml")
    promtool("test", "rules", *TESTS)
    promtool("check", "config", FOLDER / "prometheus.yml")


def test_each_alert_has_a_case_that_sets_it_off_and_one_that_does_not() -> None:
    tests = [test for file in TESTS for test in read(str(file))["tests"]]
    firing = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    assert firing == set(names)
    silent = [
        test
        for test in tests
        for case in test.get("promql_expr_test", ())
        if case["expr"] == 'ALERTS{alertstate="firing"}' and not case["exp_samples"]
    ]
    # A fleet at work has every metric that an alert asks for, so its silence says something.
    told = {re.split("[{]", series["series"])[0] for series in silent[0]["input_series"]}
    assert {use.name for rule in rules() for use in uses(rule["expr"])} <= told


def test_each_alert_says_how_bad_it_is_and_what_to_do() -> None:
    page = (ROOT / "docs" / "operations" / "alerts.md").read_text()
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "runbook"}
        assert rule["alert"] in headings
        anchor = f"docs/operations/alerts.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook"] == anchor
    alerts = {rule["alert"] for rule in rules()}
    assert {heading for heading in headings if heading.startswith("LeanQ")} == alerts


# The dashboard


def test_the_dashboard_is_whole() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows[0] == DASHBOARD["panels"][0]["title"] == "Will it clear?"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        place = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not place & taken, f"{panel['title']} lies on another"
        taken |= place
    for panel in panels():
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_every_metric_is_shown() -> None:
    shown = {
        use.metric.name
        for panel in panels()
        for target in panel["targets"]
        for use in uses(target["expr"])
    }
    assert shown == set(METRICS)


def test_grafana_is_told_where_all_is() -> None:
    services = read("compose.yaml")["services"]
    (source,) = read("deploy/observability/grafana/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert any(port.endswith(":9090") for port in services["prometheus"]["ports"])
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./deploy/observability/grafana"] == "/etc/grafana/provisioning"
    (provider,) = read("deploy/observability/grafana/dashboards/leanq.yaml")["providers"]
    board = Path(mounts["./deploy/observability/dashboard.json"])
    assert str(board.parent) == provider["options"]["path"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == str(board)
    interval = read("deploy/observability/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval


# Answers


def _fleet(waiting: int, slots: int, submitted: int, ended: int, busy_s: int) -> list[Any]:
    """Series of a minute's steps: what waits, busy slots, and what was added in each minute."""
    series = {
        "leanq_up": "1x60",
        'leanq_requests{environment="m",state="waiting"}': f"{waiting}x60",
        'leanq_slots{environment="m",state="busy"}': f"{slots}x60",
        'leanq_requests_submitted_total{environment="m"}': f"0+{submitted}x60",
        'leanq_requests_finished_total{environment="m",verdict="accepted"}': f"0+{ended}x60",
        'leanq_slot_busy_seconds_total{environment="m"}': f"0+{busy_s}x60",
    }
    return [{"series": name, "values": values} for name, values in series.items()]


def _evaluate(folder: Path, query: str, cases: list[tuple[list[Any], str, list[Any]]]) -> None:
    """Each of ``cases`` has series, the labels of the sample, and its value, if there is one."""
    tests = [
        {
            "interval": "1m",
            "input_series": series,
            "promql_expr_test": [
                {
                    "expr": query,
                    "eval_time": "50m",
                    "exp_samples": [{"labels": labels, "value": value} for value in values],
                }
            ],
        }
        for series, labels, values in cases
    ]
    (folder / "none.yaml").write_text("groups: []\n")
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["none.yaml"], "tests": tests}))
    promtool("test", "rules", file)


def test_time_to_clear(tmp_path: Path) -> None:
    (panel,) = (
        each for each in panels() if each["title"] == "Time to clear" and each["type"] == "stat"
    )
    query = Query("", panel["targets"][0]["expr"]).plain()
    labels = '{environment="m"}'
    cases: list[tuple[list[Any], str, list[Any]]] = [
        # Requests of two seconds on ten slots, of which arriving ones take four: 600 / 6.
        (_fleet(300, 10, 120, 300, 600), labels, [100]),
        # More comes than can be done.
        (_fleet(300, 10, 600, 300, 600), labels, [float("inf")]),
        (_fleet(300, 0, 1, 300, 600), labels, [float("inf")]),
        # Nothing waits: at work, and at rest.
        (_fleet(0, 10, 300, 300, 600), labels, [0]),
        (_fleet(0, 10, 0, 0, 0), labels, [0]),
        # Nothing ended in a quarter of an hour: there is no share to tell.
        (_fleet(300, 10, 0, 0, 0), labels, []),
    ]
    _evaluate(tmp_path, query, cases)


def test_what_keda_is_told(tmp_path: Path) -> None:
    scaled = named(overlay("keda"), "ScaledObject", "leanq-worker")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert all(_MAX.search(use.before) for use in uses(query) if use.metric.name in SHARED)
    cases: list[tuple[list[Any], str, list[Any]]] = [
        # 6,000 requests of two seconds, in five minutes, beside ten slots that are busy.
        (_fleet(6000, 10, 300, 300, 600), "{}", [50]),
        # An empty fleet takes a request for a second's work.
        (_fleet(1200, 0, 0, 0, 0), "{}", [4]),
        (_fleet(0, 0, 0, 0, 0), "{}", [0]),
        # A queue that was never used; an exporter without Redis, and none.
        ([{"series": "leanq_up", "values": "1x60"}], "{}", [0]),
        ([{"series": "leanq_up", "values": "0x60"}], "{}", []),
        ([], "{}", []),
    ]
    _evaluate(tmp_path, query, cases)
