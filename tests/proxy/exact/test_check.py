"""The self-check at start: exact mode is off, with one line that says why, wherever it could go wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from polarq.testing.inference import Turn
from polarq_proxy.call import Answer, ModelCall
from polarq_proxy.exact.base import CannotContinue, Missed, Renderer
from polarq_proxy.exact.check import check

from .loop import Loop, looping


@asynccontextmanager
async def checking(**settings: Any) -> AsyncIterator[Loop]:
    async with looping(Turn(content="hello"), **settings) as loop:
        yield loop


@pytest.mark.parametrize("start_token", [False, True])
async def test_an_engine_that_does_both_passes(start_token: bool) -> None:
    async with checking(start_token=start_token) as loop:
        assert await check(loop.render, loop.ask) is None


class TwoStarts:
    """Renders to text and encodes that as plain text: a tokenizer that adds a start token makes two of one."""

    name = "scripted"

    def __init__(self, render: Renderer) -> None:
        self._render = render

    async def ids(self, call: ModelCall, *, generation_prompt: bool = True) -> list[int]:
        ids = await self._render.ids(call)
        return [ids[0], *ids]


async def test_a_start_token_that_is_doubled_turns_it_off() -> None:
    async with checking(start_token=True) as loop:
        reason = await check(TwoStarts(loop.render), loop.ask)
        assert reason is not None
        assert "off: the first difference is at token 1" in reason


async def test_an_engine_that_ignores_ids_turns_it_off() -> None:
    async with checking(token_in=False) as loop:
        reason = await check(loop.render, loop.ask)
        assert reason is not None
        assert "takes no prompt as ids" in reason


async def test_an_engine_that_gives_no_ids_turns_it_off() -> None:
    async with checking(token_ids=False) as loop:
        reason = await check(loop.render, loop.ask)
        assert reason is not None
        assert "does not say which prompt ids" in reason


async def test_an_echo_that_is_not_what_was_sent_turns_it_off() -> None:
    async with checking() as loop:

        async def cut(call: ModelCall, ids: list[int] | None) -> Answer:
            answer = await loop.ask(call, ids)
            if ids is not None and answer.prompt_ids is not None:
                answer.prompt_ids = answer.prompt_ids[:-1]
            return answer

        reason = await check(loop.render, cut)
        assert reason is not None
        assert "and the end)" in reason


async def test_an_engine_that_renders_nothing_turns_it_off() -> None:
    class Mute:
        name = "mute"

        async def ids(self, call: ModelCall, *, generation_prompt: bool = True) -> list[int]:
            raise CannotContinue(Missed.NOT_RENDERED, "it has no route for it")

    async with checking() as loop:
        assert await check(Mute(), loop.ask) == "exact mode is off: engine renders nothing: it has no route for it"


async def test_the_check_samples_one_token_twice() -> None:
    async with checking() as loop:
        sampled: list[int] = []

        async def counted(call: ModelCall, ids: list[int] | None) -> Answer:
            answer = await loop.ask(call, ids)
            sampled.append(answer.sampled_tokens)
            return answer

        assert await check(loop.render, counted) is None
        assert sampled == [1, 1]
