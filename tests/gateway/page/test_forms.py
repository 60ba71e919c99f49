"""Forms, as browsers send them and as nobody should."""

from __future__ import annotations

import time
from urllib.parse import parse_qs, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.gateway.page.forms import fields_of

NASTY = st.lists(st.sampled_from("=%&+ \n\r\t;_0aA3Dé∀"), max_size=12).map("".join)


@given(st.dictionaries(st.one_of(NASTY, st.text(max_size=5)), NASTY, max_size=4))
def test_a_form_is_read_as_it_was_written(fields: dict[str, str]) -> None:
    assert fields_of(urlencode(fields).encode()) == fields


@given(st.one_of(NASTY.map(str.encode), st.binary(max_size=20)))
def test_whatever_is_read_at_all_is_read_as_the_standard_library_reads_it(body: bytes) -> None:
    try:
        read = fields_of(body)
    except ValueError:
        return
    known = parse_qs(body.decode(), keep_blank_values=True, errors="strict")
    assert read == {name: values[0] for name, values in known.items()}


@pytest.mark.parametrize(
    "body", [b"a=%", b"a=%4", b"a=%zz", b"%%41=", b"a=%\n", b"a=\xff", b"a&" * 21]
)
def test_what_is_malformed_is_no_form(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        fields_of(body)


def test_escapes_cost_little() -> None:
    # So many took the standard library two seconds.
    body = b"code=" + b"%41" * 2_800_000
    began_s = time.process_time()
    assert len(fields_of(body)["code"]) == 2_800_000
    plain_s = time.process_time()
    parse_qs(b"code=" + b"%41" * 280_000)
    # A tenth of them there takes as long as all of them here, or longer.
    assert plain_s - began_s < 5 * (time.process_time() - plain_s)
