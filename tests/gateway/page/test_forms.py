"""Forms, as browsers send them and as nobody should."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import parse_qs, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from leanq.gateway.page.forms import _PIECE_BYTES, fields_of, read_form

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


@pytest.mark.parametrize("left", range(8))
def test_an_escape_may_stand_anywhere_in_a_long_form(left: int) -> None:
    text = "a" * (_PIECE_BYTES - left) + "é%+ é" * 3
    assert fields_of(urlencode({"code": text}).encode()) == {"code": text}


@pytest.mark.slow
def test_a_long_form_leaves_the_loop_to_others() -> None:
    body = b"code=" + b"%41" * (8 << 20)
    began_s = time.thread_time()
    fields_of(body)
    alone_s = time.thread_time() - began_s

    async def longest_pause_s() -> float:
        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        reading = asyncio.create_task(read_form(request, len(body)))
        longest_s, seen_s = 0.0, time.thread_time()
        while not reading.done():
            await asyncio.sleep(0)
            # Of this thread alone, since others on the machine do not lengthen that.
            now_s = time.thread_time()
            longest_s, seen_s = max(longest_s, now_s - seen_s), now_s
        assert (await reading)["code"] == "A" * (8 << 20)
        return longest_s

    assert asyncio.run(longest_pause_s()) < alone_s / 3
