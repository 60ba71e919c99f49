"""The file of keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from support.gateway.gateways import key_file

from leanq.errors import UsageError
from leanq.gateway.keys import KeyFile, read_keys

DIGEST = hashlib.sha256(b"x").hexdigest()


def test_keys_change_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    path = key_file(tmp_path, {"secret": "one"})
    keys = KeyFile(path, clock=lambda: now_s)
    assert keys.find("one")
    assert keys.find("two") is None
    key_file(tmp_path, {"secret": "two", "tenant": "bob", "environments": ["e"]})
    assert keys.find("two") is None
    now_s = 1.5
    found = keys.find("two")
    assert found
    assert (found.tenant, found.environments) == ("bob", ("e",))
    assert keys.find("one") is None
    # A mistake locks no caller out.
    path.write_text("[[key]]\nname = 1\n")
    now_s = 3.0
    assert keys.find("two")
    assert "the keys before this change stay" in caplog.text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "missing required field `key`"),
        ("key = []", "there are none"),
        ("[[key]", "Expected"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"', "missing required field `tenant`"),
        ('[[key]]\nname = "a"\nsha256 = "x"\ntenant = "t"', "64 hexadecimal digits"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\ntenant = "a b"', "not a valid name"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\ntenant = "t"\nextra = 1', "unknown field"),
        (
            f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\ntenant = "t"\nenvironments = []',
            "may use no environment",
        ),
        (2 * f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\ntenant = "t"\n', "the same name"),
    ],
)
def test_a_file_that_is_none_of_keys_is_refused_with_the_reason(
    text: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'secret = "{"5" * 32}"\n{text}')
    with pytest.raises(UsageError, match=why) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)
