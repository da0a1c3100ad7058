"""Tool arguments while they come: whatever was sampled, what is shown is a JSON object or the beginning of one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jiter import from_json

from polarq_proxy.dialects.messages_arguments import MAX_DEPTH, UNPARSED, ArgumentStream, said_arguments, shown_input
from polarq_proxy.jsons import decode, encode

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=12
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)
SPELT = st.builds(
    lambda tree, ascii_only, gap: json.dumps(tree, ensure_ascii=ascii_only, indent=gap),
    OBJECTS,
    st.booleans(),
    st.sampled_from([None, 1]),
)
NOT_QUITE = st.text(alphabet='{}[]",:\\\n u0ad8-.1etrfn \u0939', max_size=24)


def streamed(text: str, seed: int = 0, *, cut_off: bool = False) -> list[str]:
    """What is shown of a text that comes in pieces of 1 to 5 characters."""
    stream, at, shown = ArgumentStream(), 0, []
    dice = random.Random(seed)
    while at < len(text):
        step = dice.randint(1, 5)
        shown.append(stream.feed(text[at : at + step]))
        at += step
    return [*shown, stream.finish(cut_off=cut_off)]


@given(SPELT, st.integers())
@example('{"a": "\\ud83e\\uddea", "b": [1.5e-3, -0, true, null], "c": {}, "d": []}', 1)
def test_an_object_goes_through_as_it_was_sampled(text: str, seed: int) -> None:
    pieces = streamed(text, seed)
    assert "".join(pieces) == text
    assert encode({"input": shown_input(text)}) == b'{"input":' + text.encode() + b"}"


@given(SPELT, st.integers())
def test_every_part_that_was_shown_can_be_read(text: str, seed: int) -> None:
    """SDKs read what came so far after each piece."""
    seen = ""
    for piece in streamed(text, seed):
        seen += piece
        if seen:
            assert isinstance(from_json(seen.encode(), partial_mode=True), dict)


@given(NOT_QUITE | st.builds(lambda text, at, odd: text[:at] + odd + text[at:], SPELT, st.integers(0, 40), NOT_QUITE))
@example('{"a": 1} and more')
@example('{"a": {"b": [1, "x')
@example('{"a": [1, ')
@example('{"a": {"b": 1, ')
@example('{"a": {"b')
@example('{"a" ')
@example('{"a": 1, ')
@example('{"a": "line\nbreak"}')
@example('{"a": "\\ud83e"}')
@example('{"a": "\\ud83e\\u0041"}')
@example('{"a": tru, "b": 1}')
@example("[1, 2]")
@example("ls -la")
@example("{'a': 1}")
@example("\u00a0{}")
def test_what_is_no_object_is_shown_as_one_that_holds_the_text(text: str) -> None:
    for seed in range(3):
        shown = json.loads("".join(streamed(text, seed)))
        assert isinstance(shown, dict)
        whole = decode(encode(shown_input(text)))
        if UNPARSED in whole:
            assert (shown[UNPARSED], said_arguments(shown), said_arguments(whole)) == (text, text, text)
        else:
            assert shown == whole == json.loads(text.strip(" \t\n\r") or "{}")


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_no_arguments_are_an_empty_object(text: str) -> None:
    assert "".join(streamed(text)) == "{}"
    assert shown_input(text) == {}


@given(SPELT, st.integers(0, 60))
def test_arguments_that_were_cut_off_by_the_length_stay_half(text: str, at: int) -> None:
    """As the API itself does it: closing them would make of half a command a whole one."""
    half = text[:at]
    if not half.strip():
        return
    shown = "".join(streamed(half, cut_off=True))
    assert shown == half or (len(half) == len(text) and shown == text)
    assert isinstance(from_json(shown.encode(), partial_mode=True), dict)
    assert said_arguments(decode(encode(shown_input(half)))) == half or json.loads(half) is not None


def test_too_deep_an_object_is_none() -> None:
    deep = '{"a":' * (MAX_DEPTH - 1) + "{}" + "}" * (MAX_DEPTH - 1)
    assert "".join(streamed(deep)) == deep
    deeper = '{"a":' + deep + "}"
    assert json.loads("".join(streamed(deeper)))[UNPARSED] == deeper


def test_the_first_part_of_a_long_string_is_shown_at_once() -> None:
    stream = ArgumentStream()
    assert stream.feed('{"command": "ec') == '{"command": "ec'
    assert stream.feed("ho") == "ho"
    assert stream.feed(" \\") == " "
    assert stream.feed('n"') == '\\n"'
    assert not stream.complete
    assert stream.feed("} ") == ""
    assert stream.complete
    assert stream.finish() == "}"


@pytest.mark.parametrize(
    ("shown", "arguments"), [(None, "{}"), ({"a": 1e999}, '{"a": null}'), ("ls", '"ls"'), ({UNPARSED: "ls"}, "ls")]
)
def test_inputs_that_come_back(shown: Any, arguments: str) -> None:
    assert said_arguments(shown) == arguments
