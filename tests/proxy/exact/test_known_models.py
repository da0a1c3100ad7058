"""Models that the `renderers` package knows by heart, and what happens where it does not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from polarq.testing.inference import Turn, load_tokenizer
from polarq_proxy.exact.base import CannotContinue, Extension, Missed
from polarq_proxy.exact.known_models import KnownModelBridge, ModelNotKnown, known_bridge

from .loop import TOOLS, looping, reading, result, user


class OwnTokenizer:
    """The scripted server's tokenizer under the interface that the package asks for."""

    unk_token_id = None

    def __init__(self, name_or_path: str = "Qwen/Qwen3-8B") -> None:
        self.name_or_path = name_or_path
        self._own = load_tokenizer()
        self.eos_token_id = self._own.turn_end_id

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._own.encode(text)

    def decode(self, token_ids: Sequence[int], *args: Any, **kwargs: Any) -> str:
        return self._own.decode(token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            ids = self._own.encode(tokens)
            return ids[0] if len(ids) == 1 else None
        return [self.convert_tokens_to_ids(token) for token in tokens]


@pytest.fixture
def bridge() -> KnownModelBridge:
    return KnownModelBridge(OwnTokenizer())


class Watched:
    """A bridge, and which of its answers were given."""

    def __init__(self, bridge: KnownModelBridge) -> None:
        self._bridge = bridge
        self.given: list[bool] = []

    async def suffix(self, extension: Extension) -> list[int]:
        try:
            ids = await self._bridge.suffix(extension)
        except CannotContinue:
            self.given.append(False)
            raise
        self.given.append(True)
        return ids


async def test_a_known_model_goes_on_without_asking_the_engine_for_the_suffix(bridge: KnownModelBridge) -> None:
    watched = Watched(bridge)
    turns = [reading(f"{at}", thinking="hm" if at % 2 else "") for at in range(8)]
    async with looping(*turns, Turn(content="done"), known=watched, keep_thinking=False) as loop:
        asked = 0
        ids = loop.render.ids

        async def counted(*args: Any, **how: Any) -> list[int]:
            nonlocal asked
            asked += 1
            return await ids(*args, **how)

        loop.render.ids = counted  # type: ignore[method-assign]
        messages = [user("go")]
        for at in range(9):
            turn = await loop.say(messages, TOOLS)
            messages.append(turn.message)
            messages += [result(f"found {at}", call["id"]) for call in turn.message.get("tool_calls", ())]
        await loop.say([*messages, user("thanks")], TOOLS)
        assert loop.missed == []
        assert watched.given == [True] * 9
        assert asked <= 6, "only the comparisons, ever more seldom"


async def test_what_it_writes_otherwise_than_the_engine_is_found_and_not_used(
    bridge: KnownModelBridge, caplog: pytest.LogCaptureFixture
) -> None:
    """It puts the results of one turn together; the scripted server's template gives each a turn of its own."""
    watched = Watched(bridge)
    async with looping(*[reading("x", calls=2)] * 4, known=watched) as loop:
        messages = [user("go")]
        with caplog.at_level(logging.WARNING, "polarq.proxy"):
            for _ in range(4):
                turn = await loop.say(messages, TOOLS)
                messages.append(turn.message)
                messages += [result("found", call["id"]) for call in turn.message["tool_calls"]]
        assert loop.missed == []
        assert [turn.plan.ids is not None for turn in loop.turns] == [False, True, True, True]
        assert watched.given == [True], "asked once, and not again for turns like that"
        assert len([line for line in caplog.messages if "otherwise than the engine" in line]) == 1


async def test_what_it_cannot_bridge_goes_the_generic_way(bridge: KnownModelBridge) -> None:
    watched = Watched(bridge)
    async with looping(Turn(content="hello"), known=watched) as loop:
        first = await loop.say([user("go")])
        marked = {"role": "user", "content": "on", "name": "eve"}
        second = await loop.say([user("go"), first.message, marked], reasoning_effort="low")
        assert second.plan.missed is Missed.OPTIONS_DIFFER
        third = await loop.say([*second.call.messages, second.message, user("on")], reasoning_effort="low")
        assert third.plan.ids is not None, "an option that only the engine knows"
        assert watched.given == [False]


def test_a_model_that_it_does_not_know_is_said_in_one_line() -> None:
    with pytest.raises(ModelNotKnown, match="does not know the model 'someone/their-model'") as raised:
        KnownModelBridge(OwnTokenizer("someone/their-model"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("tokenizer", ["/nowhere/at/all", "no/such-model"])
def test_a_tokenizer_that_cannot_be_loaded_leaves_the_generic_way(
    tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "polarq.proxy"):
        assert known_bridge(tokenizer) is None
    (line,) = caplog.messages
    assert line.startswith("exact mode goes by the engine's template: ")
    assert "\n" not in line


def test_without_the_package_or_a_tokenizer_there_is_only_the_generic_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert known_bridge(None) is None
    assert caplog.messages == []
    monkeypatch.setitem(__import__("sys").modules, "renderers.base", None)
    with caplog.at_level(logging.WARNING, "polarq.proxy"):
        assert known_bridge("any") is None
    assert "pip install 'polarq[renderers]'" in caplog.text
