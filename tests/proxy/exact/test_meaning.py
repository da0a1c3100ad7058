"""Messages are the same when they mean the same, and only then."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq_proxy.exact.meaning import message_digest, thinking_of, tools_digest

from .loop import Message, result, user

CALL: Message = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a", "n": 1}'}}


def answer(**fields: Any) -> Message:
    return {"role": "assistant", **fields}


def call(arguments: Any, name: str = "read", **fields: Any) -> Message:
    return answer(tool_calls=[{**fields, "function": {"name": name, "arguments": arguments}}])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("hi"), {"content": "hi", "role": "user", "id": "msg_1", "cache_control": {"type": "ephemeral"}}),
        (user("hi"), {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"ttl": "1h"}}]}),
        (user("hi"), {"role": "user", "content": ["hi"], "name": None}),
        (user("hi"), user("hi \n")),
        (user(""), {"role": "user"}),
        (answer(content=""), answer(content=None, reasoning_content="because")),
        (answer(content=""), answer(content=[], tool_calls=[])),
        (user("hi"), {"role": "user", "content": [{"type": "text", "text": ""}, "hi"]}),
        (answer(content="yes"), answer(content="\n\nyes", reasoning="because")),
        (answer(content="yes"), answer(content=[{"type": "thinking", "thinking": "x"}, "yes"])),
        (answer(content="yes"), answer(content=[{"type": "output_text", "text": "yes", "annotations": []}])),
        (call('{"path": "a", "n": 1}'), call('{ "n":1,"p\\u0061th":"a" }', id="other", index=0)),
        (call('{"n": 1}'), call('{"n": 1.0}')),
        (call('{"n": 1}'), call({"n": 1})),
        (call("{}"), call("")),
        (call("{}"), call(None)),
        (call('{"a": "\\ud83d\\ude00"}'), call('{"a": "😀"}')),
        (call("not json"), call("not json \n")),
        (call('{"n": 1}'), answer(function_call={"name": "read", "arguments": '{"n":1}'})),
        ({**result("x", "a"), "name": "read"}, {"role": "tool", "content": [{"type": "text", "text": "x"}]}),
    ],
)  # fmt: skip
def test_spellings_of_one_message(one: Message, other: Message) -> None:
    assert message_digest(one) == message_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("hi"), user("Hi")),
        (user("hi"), user(" hi")),
        (user("hi"), {"role": "system", "content": "hi"}),
        (user("hi"), {"role": "user", "content": "hi", "name": "eve"}),
        (user("a b"), {"role": "user", "content": ["a", "b"]}),
        ({"role": "user", "content": ["a", "bc"]}, {"role": "user", "content": ["ab", "c"]}),
        (user("hi"), {"role": "user", "content": ["hi", {"type": "image_url", "image_url": {"url": "data:,x"}}]}),
        (answer(content="yes"), answer(content="yes", tool_calls=[CALL])),
        (answer(content="yes"), answer(content="no")),
        (call('{"n": 1}'), call('{"n": 2}')),
        (call('{"n": 1}'), call('{"n": "1"}')),
        (call('{"n": 1}'), call('{"n": true}')),
        (call('{"n": 0}'), call('{"n": null}')),
        (call('{"n": null}'), call("{}")),
        (call('{"n": [1, 2]}'), call('{"n": [2, 1]}')),
        (call("not json"), call('"not json"')),
        (call("not json"), call("{}")),
        (call('["text", "x"]'), call("x")),
        (call("{}"), call("{}", name="write")),
        (answer(tool_calls=[CALL]), answer(tool_calls=[CALL, CALL])),
        (call('{"a": "\\ud83d"}'), call('{"a": "\\ud83e"}')),
    ],
)
def test_other_messages(one: Message, other: Message) -> None:
    assert message_digest(one) != message_digest(other)


def test_tools_are_equal_whatever_their_keys_order_nulls_and_cache_marks() -> None:
    tool = {"type": "function", "function": {"name": "read", "parameters": {"a": {"default": None}, "b": {}}}}
    spelt = {
        "cache_control": {"type": "ephemeral"},
        "function": {"strict": None, "parameters": {"b": {}, "a": {"default": None}}, "name": "read"},
        "type": "function",
    }
    assert tools_digest([tool]) == tools_digest([spelt])
    assert tools_digest([]) == tools_digest(None)
    other = copy.deepcopy(tool)
    other["function"]["parameters"]["a"]["default"] = 0  # type: ignore[index]
    assert tools_digest([tool]) != tools_digest([other])
    assert tools_digest([tool, other]) != tools_digest([other, tool])


def test_thinking_is_found_in_every_form() -> None:
    assert thinking_of(answer(reasoning_content=" why ")) == "why"
    assert thinking_of(answer(reasoning="why")) == "why"
    assert thinking_of(answer(content=[{"type": "thinking", "thinking": "why"}])) == "why"
    assert thinking_of(answer(content="why")) is None


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 50), 1 << 50) | st.floats(allow_nan=False, width=32) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=3)


@st.composite
def messages(draw: st.DrawFn, *roles: str) -> Message:
    role = draw(st.sampled_from(roles or ("system", "user", "assistant", "tool")))
    message: Message = {"role": role, "content": draw(TEXT)}
    if role == "assistant":
        message["tool_calls"] = [
            {"id": f"call_{at}", "function": {"name": draw(st.sampled_from(["read", "write"])), "arguments": arguments}}
            for at, arguments in enumerate(draw(st.lists(ARGUMENTS.map(json.dumps), max_size=2)))
        ]
    return message


def shuffled(draw: st.DrawFn, tree: Any) -> Any:
    """The same JSON with its keys in another order."""
    if isinstance(tree, dict):
        return {key: shuffled(draw, tree[key]) for key in draw(st.permutations(list(tree)))}
    return [shuffled(draw, item) for item in tree] if isinstance(tree, list) else tree


@st.composite
def spellings(draw: st.DrawFn, message: Message) -> Message:
    """Another spelling of the same message."""
    spelt = dict(message)
    text = message["content"] + draw(st.sampled_from(["", " ", "\n\n"]))
    forms: list[Any] = [text, [text], [{"type": "text", "text": text, "cache_control": None}]]
    spelt["content"] = draw(st.sampled_from([*forms, None, []] if not text.strip() else forms))
    for call in [copy.deepcopy(call) for call in message.get("tool_calls", ())]:
        tree = shuffled(draw, json.loads(call["function"]["arguments"]))
        written = json.dumps(tree, indent=draw(st.none() | st.integers(0, 3)), ensure_ascii=draw(st.booleans()))
        call["function"]["arguments"] = draw(st.sampled_from([written, tree]))
        call["id"] = draw(TEXT)
        spelt["tool_calls"] = [*(spelt["tool_calls"] if spelt["tool_calls"] != message["tool_calls"] else []), call]
    if message["role"] == "assistant" and draw(st.booleans()):
        spelt["reasoning_content"] = draw(TEXT)
    spelt |= draw(st.sampled_from([{}, {"id": "m"}, {"cache_control": {"type": "ephemeral"}}, {"refusal": None}]))
    return {key: spelt[key] for key in draw(st.permutations(list(spelt)))}


def plain(message: Message) -> Any:
    """What a message means, told by another road than the digest's."""
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    content = content or ""
    calls = [
        (call["function"]["name"], Tree(parsed(call["function"]["arguments"])))
        for call in message.get("tool_calls") or ()
    ]
    role = message["role"]
    return role, content.strip() if role == "assistant" else content.rstrip(), calls


def parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


class Tree:
    """JSON that is equal as JSON is: true is not 1."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and same(self.tree, other.tree)

    __hash__ = None  # type: ignore[assignment]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(st.data())
def test_every_spelling_of_a_message_is_that_message(data: st.DataObject) -> None:
    message = data.draw(messages())
    spelt = data.draw(spellings(message))
    assert plain(spelt) == plain(message)
    assert message_digest(spelt) == message_digest(message)


@given(st.data())
def test_messages_are_equal_exactly_when_their_meaning_is(data: st.DataObject) -> None:
    one = data.draw(messages())
    other = data.draw(spellings(one) | messages() | messages().flatmap(lambda _: nearly(one)))
    assert (message_digest(one) == message_digest(other)) == (plain(one) == plain(other))


@st.composite
def nearly(draw: st.DrawFn, message: Message) -> Message:
    """A message changed in one place."""
    changed = copy.deepcopy(message)
    if changed.get("tool_calls") and draw(st.booleans()):
        function = changed["tool_calls"][0]["function"]
        function["arguments"] = json.dumps({**json.loads(function["arguments"]), draw(TEXT): draw(JSON)})
    else:
        changed["content"] += draw(TEXT)
    return changed
