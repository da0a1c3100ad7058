"""JSON that is not strict is read; what is written always is."""

from __future__ import annotations

import json
import math

import pytest

from polarq_proxy.jsons import NotJson, decode, encode


def test_bare_words_for_numbers_are_read_and_never_written() -> None:
    tree = decode(b'{"a": [-0.2, -Infinity, NaN, Infinity]}')
    assert tree["a"][0] == -0.2
    assert not any(math.isfinite(value) for value in tree["a"][1:])
    assert json.loads(encode(tree)) == {"a": [-0.2, None, None, None]}


def test_escaped_pairs_are_one_character_and_a_half_one_is_marked() -> None:
    assert decode(rb'"\ud83e\uddea"') == "🧪"
    assert decode(rb'{"\ud83e": ["a\ud83e", 1, null]}') == {"\ufffd": ["a\ufffd", 1, None]}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}{}", b"\xff", b"[" * 100_000, b"<html>", b'"a\xed\xa0\x80"', b"1" * 9999]
)
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(NotJson):
        decode(data)
