"""Lean's options of an environment: in every text of it, however Lean reads that, and in its
fingerprint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.lean.eager_forks import EagerForkServer
from support.lean.sites import Site, check
from support.terminals import Terminal, new_fleet

from leanq.errors import ToolchainError
from leanq.lean import driver as lean_driver
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment, open_environment
from leanq.lean.run import toolchain
from leanq.lean.run.documents import DocumentRules
from leanq.local import EmbeddedServer
from leanq.queue.metrics import COUNTS
from leanq.queue.requests import Request

OPTIONS = ("-DautoImplicit=false", "-Dpp.unicode.fun=true", "-Dweak.linter.nobodys=true")
HEAD = "prelude\nimport Core\n"
IMPLICIT = f"{HEAD}def f (x : α) : α := x\n"
OWN = f"{HEAD}set_option autoImplicit true in\ndef f (x : α) : α := x\n"
SHOWN = f"{HEAD}theorem t (p : Prop) (h : p) : p := h\n#check fun (p : Prop) => p\n"
GOAL = f"{HEAD}theorem t (f : (Prop → Prop) → Prop) (p : Prop) (h : f fun p => p) (k : p) :\n"
GOAL += "    And (f fun p => p) p := by\n  sorry\n"
WAYS = ["started", "forked", "server"]


def opened(site: Site, cache: Path, *options: str) -> Environment:
    made = open_environment("default", None, cache=cache, environ={}, options=options)
    # The site finds its processes by its own.
    return replace(made, options=(*made.options, *site.core.options))


async def driver_of(
    site: Site, environment: Environment, way: str, monkeypatch: pytest.MonkeyPatch
) -> LeanDriver:
    if way == "forked":
        monkeypatch.setattr(lean_driver, "ForkServer", EagerForkServer)
        return await site.driver(environment)
    rules = DocumentRules(served_from=1 if way == "server" else 1 << 30)
    return await site.driver(environment, forks=None, documents=rules)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_they_act_on_each_text_however_lean_reads_it(
    site: Site, cache: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await driver_of(site, opened(site, cache, *OPTIONS), way, monkeypatch)
    before = COUNTS["leanq_language_server_total", "read"]
    refused = await driver.run(check(IMPLICIT))
    assert (refused.verdict, refused.reason) == ("rejected", "lean_error")
    assert "`autoImplicit` option is set to `false`" in refused.messages[0].text
    assert refused.spent
    assert refused.spent.is_forked is (way != "started")
    assert COUNTS["leanq_language_server_total", "read"] - before == (way == "server")
    own = await driver.run(check(OWN))
    assert own.verdict == "accepted", own.messages
    shown = await driver.run(check(SHOWN))
    assert shown.verdict == "accepted"
    assert shown.messages[0].text == "fun p ↦ p : Prop → Prop"

    for code, verdict in (
        (f"{HEAD}example (x : α) : True := True.intro\n", "rejected"),
        (f"{HEAD}example (p : Prop) (h : p) : p := h\n", "accepted"),
    ):
        reply = await driver.run(check(code))
        assert reply.verdict == verdict, reply.messages

    reply = await driver.run(check(GOAL, goals=True))
    [sorry] = reply.sorries
    assert "f fun p ↦ p" in (sorry.goal or "")
    assert "f fun p ↦ p" in reply.tactics[0].goals[0]
    step = await driver.run(Request("step", state=sorry.state or "", tactic="constructor"))
    assert step.verdict == "incomplete", step
    assert "f fun p ↦ p" in step.goals[0]
    again = await driver.run(Request("step", state=step.state or "", tactic="exact nope"))
    assert again.verdict == "rejected", again
    last = await driver.run(Request("step", state=step.state or "", tactic="exact h\nexact k"))
    assert last.verdict == "accepted", last

    stated = "theorem u (p : Prop) (h : p) : p := "
    for target, code in ((IMPLICIT, OWN), (OWN, IMPLICIT)):
        end = await driver.run(
            Request("verify", target=f"{target}{stated}sorry", code=f"{code}{stated}h")
        )
        said = end.error or end.messages[0].text
        assert "autoImplicit" in said, end
    target = SHOWN.replace(":= h", ":= sorry")
    assert (await driver.run(Request("verify", target=target, code=SHOWN))).verdict == "accepted"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_without_them_texts_are_read_as_before(
    site: Site, cache: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await driver_of(site, opened(site, cache), way, monkeypatch)
    assert (await driver.run(check(IMPLICIT))).verdict == "accepted"
    reply = await driver.run(check(SHOWN))
    assert reply.messages[0].text == "fun p => p : Prop → Prop"


async def test_no_state_of_other_options_goes_on(site: Site, cache: Path) -> None:
    one = await site.driver(opened(site, cache))
    other = await site.driver(opened(site, cache, *OPTIONS))
    [sorry] = (await one.run(check(GOAL))).sorries
    exported = await one.run(Request("export", state=sorry.state or ""))
    assert exported.payload
    reply = await other.run(Request("import", payload=exported.payload))
    assert "the state is of an environment with the fingerprint" in (reply.error or "")
    told = {each.opened.lean.environment.fingerprint for each in (one, other)}
    assert len(told) == 2
    assert "autoImplicit=false" in str(other.opened.lean.environment)


def test_the_last_of_a_name_counts_and_their_order_does_not(cache: Path) -> None:
    def made(*options: str) -> Environment:
        return open_environment("default", None, cache=cache, environ={}, options=options)

    one, other = "-DautoImplicit=false", "-Dpp.unicode.fun=true"
    assert made(one, other).fingerprint == made(other, "-DautoImplicit=true", one).fingerprint
    assert made(one).fingerprint != made("-DautoImplicit=true").fingerprint != made().fingerprint


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("-DautoImplict=false", r"unknown configuration option 'autoImplict'.*weak\.OPTION"),
        ("-DautoImplicit=maybe", r"autoImplicit=maybe: .*'maybe' value, it must be true/false"),
        ("-Dweak.autoImplicit=maybe", "it must be true/false"),
        ("-DmaxRecDepth=-3", "it must be a natural number"),
        ("-DwarningAsError=true", "cannot serve warningAsError=true: a sorry has to be a warning"),
        ("-Dweak.warn.sorry=false", "cannot serve weak.warn.sorry=false"),
        ("-Dprofiler=true", "use leanq profile"),
        ("autoImplicit=false", "write -Dname=value"),
        ("-D=false", "write -Dname=value"),
    ],
)
def test_what_lean_does_not_take_is_refused_at_once(cache: Path, option: str, said: str) -> None:
    with pytest.raises(ToolchainError, match=said):
        open_environment("default", None, cache=cache, environ={}, options=(option,))


# A Lake project's own


def test_a_projects_are_read_as_lake_reads_them(tmp_path: Path) -> None:
    lakefile = tmp_path / "lakefile.toml"
    for text, found in (
        ('name = "p"\n', []),
        ("leanOptions = {autoImplicit = false}\n", ["-DautoImplicit=false"]),
        (
            '[leanOptions]\npp.unicode.fun = true\n"weak.linter.x" = true\nmaxRecDepth = 9\n',
            ["-Dpp.unicode.fun=true", "-Dweak.linter.x=true", "-DmaxRecDepth=9"],
        ),
        ('[[leanOptions]]\nname = "a.b"\nvalue = "text"\n', ["-Da.b=text"]),
        # Those of one library are not for other texts.
        ('[[lean_lib]]\nname = "P"\nleanOptions = {a = 1}\n', []),
    ):
        lakefile.write_text(text)
        assert toolchain.of_project("p", tmp_path) == found, text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("leanOptions = 3\n", "expected a table, got 3"),
        ("leanOptions = {a = -1}\n", "expected a = true, false, a natural number or a text"),
        ("leanOptions = {a = [1]}\n", r"expected a = .*, got \[1\]"),
        ('leanOptions = ["a"]\n', "expected a name and a value, got 'a'"),
        ("leanOptions = \n", "cannot be read"),
    ],
)
def test_what_is_wrong_in_a_lakefile_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "lakefile.toml").write_text(text)
    with pytest.raises(ToolchainError, match=said):
        toolchain.of_project("p", tmp_path)


def test_a_lakefile_that_is_a_program_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "lakefile.toml").write_text("leanOptions = {autoImplicit = false}\n")
    (tmp_path / "lakefile.lean").write_text("import Lake\n")
    for folder, said in ((tmp_path, "has a lakefile.lean"), (None, "and this is none")):
        with pytest.raises(ToolchainError, match=f"{said}.*--env-option p:OPTION=VALUE"):
            toolchain.of_project("p", folder)


# Commands


@pytest.mark.parametrize("command", ["worker", "up", "env prepare", "env show", "doctor"])
def test_commands_refuse_what_is_no_option(terminal: Terminal, command: str) -> None:
    url = ("--url", "unix:///nowhere") if command == "worker" else ()
    for option, code, said in (
        ("default", 2, "is not NAME:OPTION=VALUE, such as default:autoImplicit=false"),
        ("default:autoImplicit", 2, "is not NAME:OPTION=VALUE"),
        ("default:=false", 2, "is not NAME:OPTION=VALUE"),
        ("mathlib:a=1", 2, "an environment 'mathlib' that --env does not name; named are default"),
        ("default:autoImplict=false", 3, "unknown configuration option 'autoImplict'"),
    ):
        done = terminal.run(*command.split(), *url, "--env-option", option)
        assert (done.code, said in done.out + done.err) == (code, True), done
    done = terminal.run(*command.split(), *url, "--env-options-of-project")
    assert (done.code, "--env-options-of-project reads" in done.out + done.err) == (3, True), done


def test_a_worker_without_lean_has_none(terminal: Terminal) -> None:
    words = ("worker", "--url", "unix:///nowhere", "--driver", "echo")
    for more in (("--env-option", "echo:a=1"), ("--env-options-of-project",)):
        assert terminal.run(*words, *more).code == 2


@pytest.mark.slow
def test_a_fleet_with_options_shows_them(
    terminal: Terminal, server: EmbeddedServer, cache: Path
) -> None:
    options = ("--env-option", "default:autoImplicit=false")
    options += ("--env-option", "default:pp.unicode.fun=true")
    shown = ["autoImplicit=false", "pp.unicode.fun=true"]
    [line] = terminal.run("env", "show", "--json", *options).lines
    assert line["options"] == shown
    [plain] = terminal.run("env", "show", "--json").lines
    assert (plain["options"], plain["fingerprint"] != line["fingerprint"]) == ([], True)
    assert f", with {', '.join(shown)}" in terminal.run("env", "show", *options).out
    with new_fleet(cache, server.url, "--slots", "1", *options) as settings:
        terminal.use(settings)
        done = terminal.run("submit", terminal.file("f.lean", IMPLICIT))
        assert (done.code, "autoImplicit" in done.out) == (1, True)
        [environment] = terminal.run("env", "list", "--json").lines
        assert (environment["options"], environment["fingerprints"]) == (
            shown,
            [line["fingerprint"]],
        )
        assert f"default: {', '.join(shown)}" in terminal.run("status").out
        [status] = terminal.run("status", "--json").lines
        assert status["environments"]["default"]["options"] == shown
        assert ", autoImplicit=false, pp.unicode.fun=true" in terminal.run("env", "list").out
