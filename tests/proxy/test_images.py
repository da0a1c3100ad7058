"""Pictures in records: by reference, with the ids that stand for them, whatever engine and mode."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn
from polarq.testing.inference.images import IMAGE_TOKENS
from polarq.testing.inference.tokenizer import load_tokenizer
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.pictures import image, shown

from .rig import HELLO, Rig, running

PAD = load_tokenizer().image_token_id
SCENARIO = Scenario(name="looks", scripts=(Script(name="a", turns=(Turn(content="one"), Turn(content="two"))),))


async def looked(rig: Rig, *, streamed: bool = False) -> list[Completion]:
    """Two calls: a picture, then two more in one message."""
    first = [shown(b"a")]
    said = (await rig.stream(first)).text() if streamed else (await rig.ask(first))["choices"][0]["message"]["content"]
    await rig.ask([*first, {"role": "assistant", "content": said}, shown(b"b", b"a")])
    return await rig.records()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("context", ["observe", "exact"])
@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
async def test_a_record_says_which_ids_stand_for_which_picture(
    redis_client: Redis, keys: Keys, engine: str, context: str, streamed: bool
) -> None:
    endpoint: dict[str, Any] = {"engine": engine, "image_token_id": PAD}
    async with (
        ScriptedInference(scenario=SCENARIO, engine=engine) as inference,
        running(redis_client, keys, inference.base_url, endpoint=endpoint, context=context) as rig,
    ):
        first, second = await looked(rig, streamed=streamed)
        for record, pictures in ((first, [b"a"]), (second, [b"a", b"b", b"a"])):
            spans = [(one.start or 0, one.end or 0) for one in record.images]
            assert record.images == [image(data, *span) for data, span in zip(pictures, spans, strict=True)]
            assert [record.prompt_ids[start:end] for start, end in spans] == [[PAD] * IMAGE_TOKENS] * len(pictures)
            assert record.prompt_ids.count(PAD) == IMAGE_TOKENS * len(pictures)
            assert record.untrainable is None
        (trace,) = PrefixMergingBuilder({}).build([first, second]).traces
        assert trace.images == second.images


async def test_a_call_with_pictures_that_was_cut_is_sampled_anew_and_not_without_them(
    redis_client: Redis, keys: Keys
) -> None:
    turn = Turn.model_validate({"content": "one two", "fault": {"kind": "abort", "after_tokens": 1, "times": 1}})
    aborting = Scenario(name="cut", scripts=(Script(name="a", turns=(turn,)),))
    async with (
        ScriptedInference(scenario=aborting, scale_out=True) as inference,
        running(redis_client, keys, inference.base_url, endpoint={"image_token_id": PAD}) as rig,
    ):
        await rig.proxy.fleet.endpoints[0].met()
        assert rig.proxy.fleet.endpoints[0].report()["continues"] is True
        await rig.ask([shown(b"a")])
        aborted, whole = await rig.records()
        assert (aborted.label, whole.continued, whole.retry_of) == (CompletionLabel.ABORTED, 0, 0)
        assert [one.images for one in (aborted, whole)] == [whole.images] * 2
        seen = [call.images for call in inference.ledger if call.session_id == "task.0"]
        assert seen == [(image(b"a").sha256,)] * 2


async def test_without_the_repeated_id_the_pictures_are_named_and_their_places_are_not(
    redis_client: Redis, keys: Keys
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        records = await looked(rig)
        assert [record.images for record in records] == [[image(b"a")], [image(b"a"), image(b"b"), image(b"a")]]
        fidelity = PrefixMergingBuilder({}).build(records).fidelity
        assert (fidelity.images, fidelity.unplaced_images) == (3, 3)


async def test_a_placeholder_that_a_text_forges_gives_no_picture_a_place(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url, endpoint={"image_token_id": PAD}) as rig,
    ):
        await rig.ask([shown(b"a", text="as in <|image_pad|>")])
        await rig.ask(HELLO)
        forged, plain = await rig.records()
        assert forged.images == [image(b"a")]
        assert plain.images == []
