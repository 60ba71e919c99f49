"""The lean driver's audit: accepted means proved, whatever the candidate does."""

from __future__ import annotations

import pytest
from support.lean.sites import LOOKALIKE, Site, check, sample

# The audit


CHEAT = "prelude\nimport Core\naxiom cheat : False\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "verdict", "axioms"),
    [
        (f"{CHEAT}theorem t (p : Prop) : p := False.elim cheat", "rejected", ("cheat",)),
        (CHEAT, "rejected", ("cheat",)),
        (f"{CHEAT}example (p : Prop) : p := False.elim cheat", "rejected", ("cheat",)),
        ("prelude\nimport Core\ntheorem t : False := sorryAx False false", "incomplete", None),
        (
            "prelude\nimport Core\nset_option warn.sorry false\ntheorem t : False := sorry",
            "incomplete",
            ("sorryAx",),
        ),
        (
            "prelude\nimport Core\nset_option warn.sorry false\n"
            "example : False := sorryAx False false",
            "incomplete",
            ("sorryAx",),
        ),
        (
            "prelude\nimport Core\nexample (p : Prop) (h : p) : p := h\n"
            "example : (True ↔ True) → True = True := fun h => propext h",
            "accepted",
            ("propext",),
        ),
        # Its own command of the name, which would come alive with an import.
        (
            f'{CHEAT}syntax (name := mine) "#print" : command\ntheorem t : False := cheat',
            "rejected",
            ("cheat",),
        ),
        # A standard name that it has given to something else.
        (
            "prelude\ninductive Nothing : Prop\naxiom propext : Nothing\n"
            "theorem t : Nothing := propext",
            "rejected",
            ("propext",),
        ),
        ("prelude\ninductive Nothing : Prop\naxiom propext : Nothing", "rejected", ("propext",)),
    ],
    ids=[
        "axiom",
        "unused axiom",
        "example on an axiom",
        "sorryAx",
        "silenced sorry",
        "silenced example",
        "axiom of the environment",
        "own #print",
        "own propext",
        "own propext unused",
    ],
)
async def test_audit(either: Site, code: str, verdict: str, axioms: tuple[str, ...] | None) -> None:
    reply = await either.check(code)
    assert (reply.verdict, reply.axioms) == (verdict, axioms)
    if verdict == "rejected":
        assert reply.axioms is not None
        assert reply.messages[-1].severity == "error"
        assert reply.messages[-1].text.endswith(f"not allowed: {', '.join(reply.axioms)}")


@pytest.mark.slow
async def test_axioms_that_the_client_allows(either: Site) -> None:
    driver = await either.one()
    code = f"{CHEAT}axiom other : True\ntheorem t : False := cheat"
    reply = await driver.run(check(code, allow_axioms=("cheat", "other")))
    assert (reply.verdict, reply.axioms) == ("accepted", ("cheat", "other"))
    reply = await driver.run(check(code, allow_axioms=("cheat",)))
    assert (reply.verdict, reply.axioms) == ("rejected", ("cheat", "other"))
    assert reply.messages[-1].text.endswith("not allowed: other")


@pytest.mark.slow
async def test_without_an_audit_leans_word_stands(either: Site) -> None:
    driver = await either.one()
    for name, verdict in {"silent_sorry": "unjudged", "incomplete": "incomplete"}.items():
        reply = await driver.run(check(sample(name), audit=False))
        assert (reply.verdict, reply.axioms, reply.audit_s) == (verdict, None, 0.0)
    reply = await driver.run(check(CHEAT, audit=False))
    assert (reply.verdict, reply.reason, reply.axioms) == ("unjudged", "not_audited", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silent_sorry", "and_swap"])
async def test_printed_lookalikes_change_no_verdict(site: Site, name: str) -> None:
    # Printed by Lean's own process, but not by the one that is asked for axioms.
    printing = 'case "$*" in *" -o "*) echo "$0"; printf %s "$0";; esac; exec "$@"'
    loud = await site.driver(site.behind("/bin/sh", "-c", printing, LOOKALIKE))
    quiet = await site.check(sample(name))
    reply = await loud.run(check(sample(name)))
    assert (reply.verdict, reply.axioms) == (quiet.verdict, quiet.axioms)
    assert any("does not depend" in m.text for m in reply.messages)


async def test_a_result_that_is_no_olean_is_never_accepted(site: Site) -> None:
    driver = await site.driver(site.shell())
    reply = await driver.run(check("echo forged > LeanqSubmission.olean; exit"))
    assert reply.verdict == "rejected"
    assert "cannot be audited" in reply.messages[-1].text


async def test_a_result_that_is_a_link_does_not_tell_what_it_leads_to(site: Site) -> None:
    driver = await site.driver(site.shell())
    replies = [
        await driver.run(check(f"ln -s {path} LeanqSubmission.olean; exit"))
        for path in ("/etc/passwd", "/no/such/file", "n" * 256)  # the last cannot be looked for
    ]
    assert [reply.verdict for reply in replies] == ["crashed"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("again", "verdict"),
    [
        ("kill -ABRT $$", "crashed"),
        ("while :; do :; done", "timeout"),
        ('echo \'{"severity":"error","data":"a name is taken"}\'; exit 1', "unverified"),
    ],
)
async def test_examples_that_end_otherwise_under_names(
    site: Site, again: str, verdict: str
) -> None:
    # When it runs for the second time, the last line is a definition.
    second = 'grep -q "^def" script.sh'
    notes = """echo '{"references": {}}' > notes.ilean"""
    script = f"if {second}; then {again}; fi; {notes}; : > LeanqSubmission.olean; exit\nexample"
    driver = await site.driver(site.shell())
    reply = await driver.run(check(script, timeout_s=0.3))
    assert reply.verdict == verdict
