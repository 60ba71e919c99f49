"""Settings: what is accepted, and that what is refused is told in one line without secrets."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from urllib.parse import unquote, urlsplit

import pytest
from support.paths import ROOT

from leanq.errors import UsageError
from leanq.queue.settings import (
    Settings,
    check_name,
    check_url,
    each_cluster,
    each_host,
    variables,
    without_password,
)

GOOD_URLS = [
    "redis://localhost",
    "redis://localhost:6379/0",
    "rediss://:pw@one:6379,two:6380,[::1]:6379/2",
    "redis://:pw@10.0.0.1:6379/2",
    "redis://user:pw@[::1]:6379",
    "rediss://redis.example:6380/0?ssl_cert_reqs=none",
    "unix:///run/valkey/server.sock",
    "unix://:pw@/run/valkey/server.sock?db=1",
]

BAD_URLS = [
    "",
    "localhost:6379",
    "http://localhost",
    "redis:",
    "redis://",
    "redis://:hunter2@",
    "redis://host:6379,:6380",
    "redis://:hunter2@host:port",
    "redis://:hunter2@host:99999",
    "redis://:hun/ter2@host",
    "user:hunter2@host:6379",
    "redis:hunter2@host",
    "redist://user:hunter2@host?password=hunter2&db=0",
    "unix://relative.sock",
    "redis://[::1",
    "redis://:hun\nter2@",
    "redis://host:6379,:6380",
    "redis://:hunter2@host:6379,",
    "redis://:hunter2@host*3",
    "redis://:hunter2@host other",
]


@pytest.mark.parametrize("url", GOOD_URLS)
def test_good_urls(url: str) -> None:
    assert Settings(url).url == url


@pytest.mark.parametrize("url", BAD_URLS)
def test_bad_urls_are_refused_in_one_line_without_the_password(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_url(url)
    text = str(refused.value)
    assert "redis://HOST:PORT/DB" in text
    assert "\n" not in text
    assert "hunter2" not in text
    assert "ter2" not in text


@pytest.mark.parametrize(
    ("urls", "each"),
    [
        ("redis://a*3 redis://b*0.5", [("redis://a", 3.0), ("redis://b", 0.5)]),
        (" redis://a:1,b:2/3\n\trediss://c ", [("redis://a:1,b:2/3", None), ("rediss://c", None)]),
        ("unix:///a b/c*2 unix:///d", [("unix:///a b/c", 2.0), ("unix:///d", None)]),
        ("redis://a*x redis://b*-1", [("redis://a*x", None), ("redis://b*-1", None)]),
        # Nothing of a single URL is taken for anything else.
        ("unix:///a b/c*2", [("unix:///a b/c*2", None)]),
        ("redis://a?password=b*2", [("redis://a?password=b*2", None)]),
    ],
)
def test_several_clusters_in_one_text(urls: str, each: list[tuple[str, float | None]]) -> None:
    assert each_cluster(urls) == each


def test_what_is_about_one_cluster_takes_one() -> None:
    with pytest.raises(UsageError, match=r"names 2 clusters; only clients") as refused:
        Settings("redis://:hunter2@a redis://:hunter2@b")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("redis://user:secret@host", "redis://user:***@host"),
        ("redis://:sec@ret@host", "redis://:***@host"),
        ("redis://:sec/ret@host", "redis://:***@host"),
        ("redis://:sec:ret@host", "redis://:***@host"),
        ("unix://:secret@/run/server.sock", "unix://:***@/run/server.sock"),
        ("user:secret@host:6379", "user:***@host:6379"),
        ("redis://host?password=secret&db=1", "redis://host?password=***&db=1"),
        ("redis://user:x@host?password=sec@ret", "redis://user:***@host?password=***"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("unix:///run/valkey@1/server.sock", "unix:///run/valkey@1/server.sock"),
    ],
)
def test_password_is_hidden_and_the_rest_is_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_settings_do_not_show_the_password() -> None:
    assert "secret" not in repr(Settings("redis://:secret@host"))


@pytest.mark.parametrize("name", ["a", "A9", "lean-4.32", "x@y+z_1", "0" * 64])
def test_good_names(name: str) -> None:
    assert check_name("tenant", name) == name


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "a:b", "a b", "a\n", "a{b}", "ä", "0" * 65, "a/b", "a*"]
)
def test_bad_names(name: str) -> None:
    with pytest.raises(UsageError, match="tenant") as refused:
        check_name("tenant", name)
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="LEANQ_PREFIX"):
        Settings("redis://host", prefix=name)


def test_settings_come_from_the_environment() -> None:
    environ = {
        "LEANQ_PREFIX": "other",
        "LEANQ_SHARDS": "3",
        "LEANQ_LEASE_S": "2.5",
        "LEANQ_REPLY_TTL_S": "60",
        "LEANQ_MAX_ATTEMPTS": "5",
        "LEANQ_MAX_WAITING": "10",
        "LEANQ_REMEMBER_S": "1.5",
        "PATH": "/bin",
    }
    assert Settings.load("redis://host", environ) == Settings(
        "redis://host", "other", 3, 2.5, 60, 5, 10, 1.5
    )
    assert Settings.load("redis://host", {}) == Settings("redis://host")


@pytest.mark.parametrize(
    "name", ["LEANQ_LEASE_S", "LEANQ_REPLY_TTL_S", "LEANQ_MAX_ATTEMPTS", "LEANQ_MAX_WAITING"]
)
@pytest.mark.parametrize(
    "value", ["", "ten", "0", "-1", "nan", "inf", "-inf", "1e400", "1\n2", "9" * 30]
)
def test_bad_numbers_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name) as refused:
        Settings.load("redis://host", {name: value})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["LEANQ_MAX_ATTEMPTS", "LEANQ_MAX_WAITING"])
def test_counts_are_whole_numbers(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} must be an integer, got '2.5'$"):
        Settings.load("redis://host", {name: "2.5"})


# Declarations


def test_each_setting_has_a_variable_that_sets_it() -> None:
    default = Settings("redis://host")
    for item in (each for each in fields(Settings) if each.metadata):
        value = getattr(default, item.name)
        other = "other" if isinstance(value, str) else value + 1
        environ = {f"LEANQ_{item.name.upper()}": str(other)}
        assert Settings.load("redis://host", environ) == replace(default, **{item.name: other})


def test_every_variable_that_the_package_reads_is_declared() -> None:
    # A campaign worker tells the processes that it forks apart from itself, and a worker tells its
    # scaler which job it is.
    internal = {"LEANQ_CAMPAIGN_WORKER", "LEANQ_JOB"}
    text = "".join(path.read_text() for path in (ROOT / "leanq").rglob("*.py"))
    found = set(re.findall(r"LEANQ_[A-Z][A-Z_]*[A-Z]", text)) - internal
    assert found <= {name for name, _, _ in variables()}


def test_each_variable_has_a_meaning_and_a_default_for_the_table() -> None:
    assert all("|" not in text for row in variables() for text in row)
    meaning = "workers that a request may take down before it is poisoned"
    assert ("LEANQ_MAX_ATTEMPTS", meaning, "6") in variables()
    assert any(default == "1000000" for _, _, default in variables())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LEANQ_SHARD", "LEANQ_SHARDS"),
        ("LEANQ_PREFX", "LEANQ_PREFIX"),
        ("LEANQ_MAX_ATEMPTS", "LEANQ_MAX_ATTEMPTS"),
        ("LEANQ_LEASE", "LEANQ_LEASE_S"),
        ("LEANQ_CACHE_DIR", "LEANQ_CACHE"),
        ("LEANQ_REDIS_URL", "LEANQ_RQ_URL"),
    ],
)
def test_a_mistyped_variable_is_named_once_with_the_nearest_right_one(
    name: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        Settings.load("redis://host", {name: "x"})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"{name} is not a variable of leanq and has no effect; did you mean {meant}?"
    )


def test_a_variable_that_is_like_none_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    Settings.load("redis://host", {"LEANQ_TIMOUT": "3"})
    (record,) = caplog.records
    assert record.getMessage() == "LEANQ_TIMOUT is not a variable of leanq and has no effect"


@pytest.mark.parametrize("url", ["https://host", "http://localhost:8000"])
def test_a_gateway_is_named_where_a_redis_is_needed(url: str) -> None:
    with pytest.raises(UsageError, match=r"is a gateway, and this needs the queue's Redis"):
        Settings(url)


def test_no_word_about_the_right_variables_or_those_of_a_kubernetes_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = dict(Settings.load("redis://host", {}).__dict__)
    right = {item.name: right[item.name] for item in fields(Settings) if item.metadata}
    environ = {f"LEANQ_{name.upper()}": str(value) for name, value in right.items()}
    links = ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_6379_TCP", "PORT_6379_TCP_ADDR")
    environ |= {f"LEANQ_{name}": "x" for name in (*links, "URL", "RQ_URL", "LEAN", "PASSWORD")}
    Settings.load("redis://host", {**environ, "SHARDS": "x"})
    assert not caplog.records


# The password


SIGNS = "a/b#c%d?e@f:g&h=i j"


@pytest.mark.parametrize(
    ("url", "user"),
    [
        ("redis://host", ""),
        ("redis://host:6379/2?protocol=3", ""),
        ("rediss://one:1,two:2", ""),
        ("redis://leanq-worker@host", "leanq-worker"),
    ],
)
def test_a_url_without_a_password_gets_that_of_the_environment(url: str, user: str) -> None:
    settings = Settings.load(url, {"LEANQ_PASSWORD": SIGNS})
    for each in each_host(settings.url):
        parts = urlsplit(each)
        assert (parts.username, unquote(parts.password or "")) == (user, SIGNS)
    assert SIGNS not in without_password(settings.url)
    assert urlsplit(settings.url).query == urlsplit(url).query


@pytest.mark.parametrize(
    "url",
    [
        "redis://:own@host",
        "redis://user:own@host",
        "redis://host?password=own",
        "unix:///tmp/server.sock",
    ],
)
def test_a_url_with_a_password_and_a_socket_keep_what_they_have(url: str) -> None:
    assert Settings.load(url, {"LEANQ_PASSWORD": SIGNS}).url == url


def test_an_empty_password_is_none() -> None:
    assert Settings.load("redis://host", {"LEANQ_PASSWORD": ""}).url == "redis://host"
