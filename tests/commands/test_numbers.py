"""Numbers and durations given to any command: what does not fit is told with what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from leanq.cli import cli
from leanq.commands.options import WholeRange

WRONG = ("5m", "4g", "1e99", "-1", "", "nan", "inf", "x", "0x10")
# A duration has a unit, so 5m is one.
WRONG_DURATIONS = ("5", "4g", "1e9s", "-1m", "", "nan", "m", "1 h")
_EXPECTED = r"expected a (whole )?number (between|above|of at least) \S.*, got '(?P<got>[^']*)'$"
_DURATION = r": '(?P<got>[^']*)' is not a duration; expected 90s, 30m, 24h or 1d$"


def _all(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, click.Parameter]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below
            yield from _all(below, (*words, name))
        return
    for parameter in command.params:
        yield " ".join(words), parameter


def _numbers() -> Iterator[tuple[str, str, str]]:
    for words, parameter in _all(cli, ()):
        kind = parameter.type.name
        if "integer" in kind or "float" in kind or kind == "duration":
            yield words, parameter.opts[0], kind


NUMBERS = list(_numbers())


def test_there_are_such_options() -> None:
    assert {("submit", "--timeout"), ("worker", "--slots"), ("scale", "--every")} <= {
        (words, option) for words, option, _ in NUMBERS
    }


@pytest.mark.parametrize(("words", "option", "kind"), NUMBERS)
def test_what_does_not_fit_is_told_with_what_was_expected(
    words: str, option: str, kind: str
) -> None:
    if not option.startswith("--"):
        pytest.skip("an argument")
    for value in WRONG_DURATIONS if kind == "duration" else WRONG:
        # Options are read before anything is asked for or missing.
        done = CliRunner().invoke(cli, [*words.split(), f"{option}={value}"])
        last = done.output.splitlines()[-1]
        found = re.search(_DURATION if kind == "duration" else _EXPECTED, last)
        assert found, last
        assert (done.exit_code, found["got"]) == (2, value)
        assert f"'{option}'" in last


def test_a_weight_that_does_not_fit() -> None:
    for value in ("5m", "-1", "nan"):
        done = CliRunner().invoke(cli, ["tenant", "weight", "--", "a", value])
        assert f"expected a number between 0.01 and 1000, got '{value}'" in done.output
        assert done.exit_code == 2


def test_a_whole_number_may_be_larger_than_any_float() -> None:
    assert WholeRange(1).convert("9" * 400, None, None) == 10**400 - 1


def test_an_interval_of_no_time_is_none() -> None:
    for value in ("0s", "0.05s"):
        done = CliRunner().invoke(cli, ["scale", "--target", "print", "--every", value])
        assert f"'--every': expected 0.1s or more, got '{value}'" in done.output
        assert done.exit_code == 2
