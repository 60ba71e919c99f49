"""Texts as users write them: leanq says of each what plain Lean says."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.lean.libraries import Library, layouts
from support.lean.real_texts import TEXTS, RealText, ask_plain, texts_for
from support.lean.sites import check, new_site

from leanq.lean.environment import Environment
from leanq.lean.judge.judge_lean import judge_lean
from leanq.queue.requests import Reply

SLOTS = 2
# Lean's words for these, as leanq prints them, leave out types that Lean then cannot find.
NOT_READ_BACK = {
    "decide_small",
    "header_module_hides_a_lemma",
    "header_of_parts",
    "norm_cast_push",
    "rw_motive_dependent",
    "section_variables",
    "simp_functions",
    "universe_explicit",
    "universe_polymorphic_theorem",
}


def cases(layouts: tuple[str, ...], *, only: str = "") -> list[Any]:
    """Each text with each layout that it is checked on; each layout has a process of its own."""
    return [
        pytest.param(layout, name, id=f"{layout}-{name}", marks=pytest.mark.xdist_group(layout))
        for layout in layouts
        for name in texts_for(layout)
        if not only or TEXTS[name].said == only
    ]


@pytest.fixture(scope="session")
def replies(
    request: pytest.FixtureRequest,
    library: Library,
    real: Environment,
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, Reply]:
    """Returns the reply to each text that the chosen tests are about."""
    chosen = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    }
    texts = {name: TEXTS[name] for name in texts_for(library.layout) if name in chosen}

    async def ask(folder: Path) -> dict[str, Reply]:
        async with new_site(real, folder) as site:
            driver = await site.driver(slots=SLOTS)
            slots = asyncio.Semaphore(SLOTS)

            async def one(text: RealText) -> Reply:
                async with slots:
                    return await driver.run(check(text.code))

            said = await asyncio.gather(*map(one, texts.values()))
            return dict(zip(texts, said, strict=True))

    scratch = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(scratch))
        return asyncio.run(ask(scratch))


@pytest.mark.parametrize(
    ("library", "name"), cases(layouts()), indirect=["library"], scope="session"
)
def test_leanq_says_what_the_text_says(replies: Mapping[str, Reply], name: str) -> None:
    reply = replies[name]
    assert reply.error is None
    said = " ".join(filter(None, (reply.verdict, reply.reason)))
    assert said == TEXTS[name].said, reply.messages


@pytest.mark.parametrize(
    ("library", "name"),
    cases(layouts(), only="accepted"),
    indirect=["library"],
    scope="session",
)
def test_the_theorems_are_those_of_the_text(replies: Mapping[str, Reply], name: str) -> None:
    names = [theorem.name for theorem in replies[name].theorems]
    states = TEXTS[name].states
    assert [each for each in names if each in states] == list(states)


# Another layout of the same library says the same.
ASKED = [
    case
    for case in cases(layouts())
    if case.values[0] != "modular" or TEXTS[case.values[1]].is_module
]


@pytest.mark.parametrize(("library", "name"), ASKED, indirect=["library"], scope="session")
def test_plain_lean_says_what_the_text_says(
    real: Environment, replies: Mapping[str, Reply], name: str
) -> None:
    text = TEXTS[name]
    printed = {theorem.name: theorem.statement for theorem in replies[name].theorems}
    if judge_lean(real.toolchain).is_foreign:
        # Images have no notation, and some statements cannot be printed without it.
        printed = {name: statement for name, statement in printed.items() if statement}
    answer = ask_plain(real, text, {n: printed[n] for n in text.states if n in printed})
    if text.why:
        assert answer.said != text.said, "plain Lean says the same: remove the reason"
    else:
        assert answer.said == text.said
    if name not in NOT_READ_BACK:
        # Each statement as leanq prints it is what the theorem proves.
        assert answer.trouble == ()


def test_a_third_of_the_texts_are_wrong_or_unfinished() -> None:
    assert len(TEXTS) >= 120
    assert sum(text.said != "accepted" for text in TEXTS.values()) * 3 >= len(TEXTS)
