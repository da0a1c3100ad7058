"""What many sessions begin with is held once, and changes nothing of what each of them says."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.beginnings import LEAST_BYTES, Beginnings
from polarq.store.completions import CompletionLog
from polarq.store.grants import GrantSpec
from polarq.store.token_text import Line, text_of

SYSTEM = list(range(100_000, 103_000))
"""A prompt of some length, as every rollout of a harness begins with."""


def line(ids: list[int]) -> Line:
    return Line().plus(text_of(ids), len(ids))


def spec(name: str) -> GrantSpec:
    return GrantSpec(rollout_id=f"{name}.0", task_id=name, attempt=1, token=1, node_id="node0")


def test_equal_prompts_are_one_object() -> None:
    beginnings = Beginnings()
    first = beginnings.line(line(SYSTEM))
    second = beginnings.line(line(SYSTEM))
    assert second == first and second.parts[0] is first.parts[0]


def test_a_common_beginning_is_one_object_from_the_third_session_on() -> None:
    beginnings = Beginnings()
    beginnings.line(line([*SYSTEM, 1]))
    second, third = beginnings.line(line([*SYSTEM, 2, 3])), beginnings.line(line([*SYSTEM, 4]))
    assert (second.text, second.count) == (text_of([*SYSTEM, 2, 3]), len(SYSTEM) + 2)
    assert (third.text, third.count) == (text_of([*SYSTEM, 4]), len(SYSTEM) + 1)
    assert second.parts[0] is third.parts[0] and len(second.parts[0]) > LEAST_BYTES


def test_a_session_that_grows_leaves_the_others_as_they_are() -> None:
    beginnings = Beginnings()
    beginnings.line(line([*SYSTEM, 1]))
    second, third = beginnings.line(line([*SYSTEM, 2])), beginnings.line(line([*SYSTEM, 3]))
    grown = second.plus(text_of(SYSTEM), len(SYSTEM)).plus(text_of(SYSTEM), len(SYSTEM))
    assert grown.text == text_of([*SYSTEM, 2, *SYSTEM, *SYSTEM]) and grown.count == 3 * len(SYSTEM) + 1
    assert third.text == text_of([*SYSTEM, 3])


@given(st.lists(st.lists(st.sampled_from([0, 1, 12, 123]), max_size=4), min_size=1, max_size=12))
def test_every_line_keeps_its_ids(endings: list[list[int]]) -> None:
    beginnings = Beginnings()
    for ending in endings:
        ids = [*SYSTEM, *ending]
        shared = beginnings.line(line(ids))
        assert (shared.text, shared.count, shared.length) == (text_of(ids), len(ids), len(text_of(ids)))
        assert shared.common(text_of([*ids, 5]), 0, len(text_of([*ids, 5]))).length == shared.length


def test_equal_messages_are_one_object_and_different_ones_are_not() -> None:
    beginnings = Beginnings()
    first = beginnings.messages([_said("system", "be good"), _said("user", "one")])
    second = beginnings.messages([_said("system", "be good"), _said("user", "two")])
    assert second[0] is first[0]
    assert [message["content"] for message in second] == ["be good", "two"]


def test_numbers_that_python_calls_equal_are_told_apart() -> None:
    beginnings = Beginnings()
    messages: list[list[dict[str, Any]]] = [[{"role": "user", "n": value}] for value in (1, True, 1.0)]
    for given_messages in messages:
        [found] = beginnings.messages(given_messages)
        assert type(found["n"]) is type(given_messages[0]["n"])


async def test_sessions_of_one_log_share_what_they_begin_with(redis_client: Redis, keys: Keys) -> None:
    log = CompletionLog(redis_client, keys)
    text = text_of(SYSTEM)
    first, second = (log.prompt(spec(name), text, 0, len(text)).line for name in ("a", "b"))
    assert first.parts[0] is second.parts[0]


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
