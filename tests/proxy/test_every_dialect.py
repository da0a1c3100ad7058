"""What holds in every dialect alike: where the session may stand, odd paths, probes, websockets, dead sessions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.registry import names
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, ScriptedInference

from .raw_engine import FIRST, RawCall, delta, last, raw_engine
from .rig import running

SAID = "go 🧪 ह"


@dataclass(frozen=True)
class Tongue:
    """One dialect's way to ask the simplest thing."""

    name: str
    version: str
    path: str
    body: dict[str, Any]
    streamed_path: str = ""
    """Where streaming is chosen by the path."""

    def asked(self, *, stream: bool) -> tuple[str, dict[str, Any]]:
        """(path below the version, body)."""
        if self.streamed_path:
            return (self.streamed_path if stream else self.path), self.body
        return self.path, {**self.body, "stream": stream}

    def text(self, data: bytes, *, stream: bool) -> str:
        """What a harness reads out of an answer."""
        if not stream:
            return _whole_text(json.loads(data))
        events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]
        return "".join(_delta_text(event) for event in events)


TONGUES = [
    Tongue("openai_chat", "v1", "chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    Tongue("openai_responses", "v1", "responses", {"model": "m", "input": "x"}),
    Tongue(
        "anthropic_messages", "v1", "messages",
        {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "x"}]},
    ),
    Tongue(
        "google_generate", "v1beta", "models/m:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}, "models/m:streamGenerateContent?alt=sse",
    ),
    Tongue("openai_completions", "v1", "completions", {"model": "m", "prompt": "x", "max_tokens": 64}),
]  # fmt: skip
every_dialect = pytest.mark.parametrize("tongue", TONGUES, ids=[tongue.name for tongue in TONGUES])
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
CARRIERS = {
    "bearer": {"Authorization": "Bearer {}"},
    "x-api-key": {"X-Api-Key": "{}"},
    "x-goog-api-key": {"x-goog-api-key": "{}"},
}


def _whole_text(tree: dict[str, Any]) -> str:
    if "choices" in tree:
        choice = tree["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    if "candidates" in tree:
        return "".join(part.get("text", "") for part in tree["candidates"][0]["content"]["parts"])
    parts = tree.get("content") or [part for item in tree["output"] for part in item.get("content", ())]
    return "".join(part.get("text", "") for part in parts)


def _delta_text(event: dict[str, Any]) -> str:
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    for choice in event.get("choices", ()):
        return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    for candidate in event.get("candidates", ()):
        return "".join(part.get("text", "") for part in (candidate.get("content") or {}).get("parts", ()))
    return ""


def test_every_installed_dialect_is_spoken_here() -> None:
    assert {tongue.name for tongue in TONGUES} == set(names("dialects"))


@every_dialect
@both_ways
@pytest.mark.parametrize("upstream", [True, False], ids=["streaming engine", "whole from the engine"])
async def test_the_same_answer_is_read_and_recorded(
    redis_client: Redis, keys: Keys, tongue: Tongue, stream: bool, upstream: bool
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of(SAID)) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=upstream) as rig,
    ):
        path, body = tongue.asked(stream=stream)
        status, headers, data = await rig.raw(body, f"/{tongue.version}/{path}")
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream" if stream else "application/json")
        assert tongue.text(data, stream=stream) == SAID
        [record], [call] = await rig.records(), [c for c in inference.ledger if c.session_id == "task.0"]
        assert (record.dialect, record.streamed, record.trainable) == (tongue.name, stream, True)
        assert record.sampled_ids == call.sampled_ids
        assert b"token_ids" not in data
        assert b'"logprob":' not in data


@pytest.mark.parametrize("tongue", TONGUES[:-1], ids=[tongue.name for tongue in TONGUES[:-1]])
async def test_a_character_cut_by_a_chunk_is_whole(redis_client: Redis, keys: Keys, tongue: Tongue) -> None:
    async def act(call: RawCall) -> None:
        data = FIRST + delta(SAID, (11, 12, 13)) + delta(finish="stop") + last(3)
        await call.head()
        for at in range(len(data)):
            await call.chunk(data[at : at + 1])
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        path, body = tongue.asked(stream=True)
        status, _, data = await rig.raw(body, f"/{tongue.version}/{path}")
        assert status == 200
        assert tongue.text(data, stream=True) == SAID
        assert "\ufffd" not in data.decode()
        [record] = await rig.records()
        assert record.sampled_ids == [11, 12, 13]
        assert record.reply["content"] == SAID


@every_dialect
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_the_session_may_be_any_harnesss_key(
    redis_client: Redis, keys: Keys, tongue: Tongue, carrier: str
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        headers = {name: value.format(rig.secret) for name, value in CARRIERS[carrier].items()}
        path, body = tongue.asked(stream=False)
        status, _, data = await rig.raw(body, f"/{tongue.version}/{path}", base=rig.url, headers=headers)
        assert status == 200, data
        assert len(await rig.records()) == 1


@every_dialect
@pytest.mark.parametrize("shape", ["/{v}/{p}", "/{v}/{v}/{p}", "//{v}//{p}", "/{p}"])
async def test_any_path_that_ends_in_its_route_works(
    redis_client: Redis, keys: Keys, tongue: Tongue, shape: str
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        path, body = tongue.asked(stream=False)
        status, _, data = await rig.raw(body, shape.format(v=tongue.version, p=path) + "?beta=true")
        assert status == 200, data
        [record] = await rig.records()
        assert record.path.endswith("?beta=true")


@every_dialect
async def test_a_websocket_is_refused_at_once(redis_client: Redis, keys: Keys, tongue: Tongue) -> None:
    async with running(redis_client, keys, "http://127.0.0.1:1") as rig:
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        }
        async with rig.http.get(f"{rig.base_url}/{tongue.version}/{tongue.path}", headers=headers) as answer:
            assert answer.status == 426
            assert "plain HTTP" in await answer.text()


@every_dialect
async def test_a_probe_is_answered(redis_client: Redis, keys: Keys, tongue: Tongue) -> None:
    async with running(redis_client, keys, "http://127.0.0.1:1") as rig:
        for path in ("", "/api/hello", f"/{tongue.version}/{tongue.path}", "/any/thing"):
            async with rig.http.head(rig.base_url + path) as answer:
                assert answer.status == 200


@every_dialect
@both_ways
async def test_a_dead_session_stops_the_harness(redis_client: Redis, keys: Keys, tongue: Tongue, stream: bool) -> None:
    async with running(redis_client, keys, "http://127.0.0.1:1") as rig:
        await close_grant(redis_client, keys, rig.secret)
        path, body = tongue.asked(stream=stream)
        status, headers, data = await rig.raw(body, f"/{tongue.version}/{path}")
        assert status in {400, 404}
        assert "retry-after" not in headers
        assert "closed" in json.dumps(json.loads(data)["error"])


@every_dialect
@both_ways
async def test_a_node_that_cannot_answer_now_says_when_to_ask_again(
    redis_client: Redis, keys: Keys, tongue: Tongue, stream: bool
) -> None:
    async with running(redis_client, keys, "http://127.0.0.1:1") as rig:
        path, body = tongue.asked(stream=stream)
        status, headers, data = await rig.raw(body, f"/{tongue.version}/{path}")
        assert (status, headers["retry-after"]) == (503, "2")
        assert "error" in json.loads(data)
        assert await rig.records() == []
