"""Gemini through a running proxy: answers, streams and errors as its clients read them, and the record behind them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn
from polarq.testing.inference.faults import HttpStatus, StreamError
from polarq_proxy.dialects.google_names import thinking_in
from polarq_proxy.dialects.messages_arguments import UNPARSED

from .google_client import HELLO, PIXEL, array, events, model, parts, streamed, text, user, whole
from .raw_engine import FIRST, RawCall, answer, delta, event, last, raw_engine
from .rig import Rig, running

TOOLS = [{"functionDeclarations": [{"name": "bash", "parameters": {"type": "OBJECT"}}]}]
LOOK = Turn(
    reasoning="I look first.",
    content="Let me look. \U0001f9ea \u0939",
    tool_calls=(
        ToolCall(name="bash", arguments={"command": "ls", "deep": {"a": [1, 2.5, None]}}),
        ToolCall(name="bash", arguments={"command": "pwd"}),
    ),
)
THINK = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
MODES = pytest.mark.parametrize("stream_upstream", [True, False], ids=["passed_on", "made_up"])
FORMS = pytest.mark.parametrize("form", ["whole", "events", "array"])


def scenario(*turns: Turn) -> Scenario:
    return Scenario(name="google", scripts=(Script(name="a", turns=turns),))


async def answers(rig: Rig, form: str, contents: Any = HELLO, **fields: Any) -> list[dict[str, Any]]:
    if form == "whole":
        return [await whole(rig, contents, **fields)]
    return await streamed(rig, contents, sse=form == "events", **fields)


@MODES
@FORMS
async def test_an_answer_is_parts_with_whole_calls(
    redis_client: Redis, keys: Keys, stream_upstream: bool, form: str
) -> None:
    async with (
        ScriptedInference(scenario=scenario(LOOK)) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        found = await answers(rig, form, tools=TOOLS, **THINK)
        [record] = await rig.records()
        shown = parts(*found)
        thoughts = [part for part in shown if part.get("thought")]
        assert "".join(part["text"] for part in thoughts).strip() == "I look first."
        assert shown[: len(thoughts)] == thoughts
        assert text(*found).strip() == "Let me look. \U0001f9ea \u0939"
        calls = [part["functionCall"] for part in shown if "functionCall" in part]
        assert [(call["name"], call["args"]) for call in calls] == [
            ("bash", {"command": "ls", "deep": {"a": [1, 2.5, None]}}),
            ("bash", {"command": "pwd"}),
        ]
        assert len({call["id"] for call in calls}) == 2
        [signed] = [part for part in shown if "thoughtSignature" in part]
        assert thinking_in(signed["thoughtSignature"]) == record.reply["reasoning_content"]
        assert "thought" not in signed
        end = found[-1]
        assert [candidate["finishReason"] for candidate in end["candidates"]] == ["STOP"]
        thought = record.usage.reasoning_tokens
        assert thought
        assert end["usageMetadata"] == {
            "promptTokenCount": len(record.prompt_ids),
            "candidatesTokenCount": len(record.sampled_ids) - thought,
            "thoughtsTokenCount": thought,
            "totalTokenCount": len(record.prompt_ids) + len(record.sampled_ids),
        }
        assert {one["modelVersion"] for one in found} == {"asked"}
        assert {one["responseId"] for one in found} == {record.completion_id}
        assert not any("finishReason" in candidate for one in found[:-1] for candidate in one["candidates"])
        assert record.trainable
        assert (record.dialect, record.streamed) == ("google_generate", form != "whole")


@FORMS
async def test_thoughts_are_shown_only_if_asked_for(redis_client: Redis, keys: Keys, form: str) -> None:
    async with (
        ScriptedInference(scenario=scenario(LOOK)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        found = await answers(rig, form)
        assert not any(part.get("thought") for part in parts(*found))
        [signature] = [part["thoughtSignature"] for part in parts(*found) if "thoughtSignature" in part]
        assert thinking_in(signature)


@FORMS
@pytest.mark.parametrize("keeps", ["all", "no_ids", "no_thoughts", "no_ids_no_thoughts"])
async def test_what_comes_back_extends_the_sample(redis_client: Redis, keys: Keys, form: str, keeps: str) -> None:
    async with (
        ScriptedInference(scenario=scenario(LOOK, Turn(content="done"))) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        found = await answers(rig, form, tools=TOOLS, **THINK)
        said = [candidate["content"] for one in found for candidate in one["candidates"]]
        calls = [part["functionCall"] for content in said for part in content["parts"] if "functionCall" in part]
        results = [
            {"functionResponse": {"id": call["id"], "name": call["name"], "response": {"output": "x"}}}
            for call in calls
        ]
        if "no_ids" in keeps:
            for inner in (*calls, *(part["functionResponse"] for part in results)):
                del inner["id"]
        if "no_thoughts" in keeps:
            said = [model(*(part for part in content["parts"] if not part.get("thought"))) for content in said]
        await answers(rig, form, [*HELLO, *said, user(*results)], tools=TOOLS, **THINK)
        first, second = await rig.records()
        assert second.parent == 0
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        ids = first.prompt_ids + first.sampled_ids
        assert second.prompt_ids[: len(ids)] == ids
        assert second.messages[1]["reasoning_content"].strip() == "I look first."


@FORMS
@pytest.mark.parametrize(("limit", "said", "reason"), [(3, "one two three four five", "MAX_TOKENS"), (100, "", "STOP")])
async def test_every_end_has_its_reason(
    redis_client: Redis, keys: Keys, form: str, limit: int, said: str, reason: str
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of(said)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        found = await answers(rig, form, generationConfig={"maxOutputTokens": limit})
        assert found[-1]["candidates"][0]["finishReason"] == reason
        assert parts(*found)
        assert text(*found) == (await rig.records())[0].reply.get("content", "")


@FORMS
async def test_several_candidates_are_told_apart(redis_client: Redis, keys: Keys, form: str) -> None:
    scripts = tuple(Script(name=name, turns=(Turn(content=f"it is {name}"),)) for name in ("a", "b"))
    async with (
        ScriptedInference(scenario=Scenario(name="two", scripts=scripts)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        found = await answers(rig, form, generationConfig={"candidateCount": 2})
        assert [text(*found, index=index) for index in (0, 1)] == ["it is a", "it is b"]
        assert [candidate["finishReason"] for candidate in found[-1]["candidates"]] == ["STOP", "STOP"]
        assert len(await rig.records()) == 2


@FORMS
async def test_log_probabilities_go_to_who_asked(redis_client: Redis, keys: Keys, form: str) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("one two")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        plain = await answers(rig, form)
        assert "logprobsResult" not in plain[-1]["candidates"][0]
        found = await answers(rig, form, generationConfig={"responseLogprobs": True, "logprobs": 2})
        result = found[-1]["candidates"][0]["logprobsResult"]
        record = (await rig.records())[1]
        assert [entry["logProbability"] for entry in result["chosenCandidates"]] == record.logprobs
        assert all(len(entry["candidates"]) == 2 for entry in result["topCandidates"])


@MODES
@FORMS
async def test_arguments_that_do_not_parse_are_not_lost(
    redis_client: Redis, keys: Keys, stream_upstream: bool, form: str
) -> None:
    function = {"name": "bash", "arguments": '{"command": "ls'}
    call = {"index": 0, "id": "c1", "type": "function", "function": function}

    async def act(raw: RawCall) -> None:
        if raw.body["stream"]:
            change = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls", "token_ids": [11]}
            change["logprobs"] = {"content": [{"token": "t", "logprob": -0.5}]}
            await raw.head()
            await raw.chunk(FIRST + event({"model": "raw", "choices": [change]}) + last(1))
            await raw.end()
            return
        tree = answer(ids=(11,))
        tree["choices"][0] |= {"finish_reason": "tool_calls", "message": {"content": None, "tool_calls": [call]}}
        await raw.whole(tree)

    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, stream_upstream=stream_upstream) as rig,
    ):
        found = await answers(rig, form, tools=TOOLS)
        [part] = parts(*found)
        assert part["functionCall"] == {"id": "c1", "name": "bash", "args": {UNPARSED: '{"command": "ls'}}
        await answers(rig, form, [*HELLO, model(part)], tools=TOOLS)
        record = (await rig.records())[1]
        assert record.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls'


@pytest.mark.parametrize("escaped", [False, True])
async def test_a_character_cut_by_a_read_is_whole(redis_client: Redis, keys: Keys, escaped: bool) -> None:
    change = {"index": 0, "delta": {"content": "go \U0001f9ea \u0939"}, "token_ids": [11, 12, 13]}
    change["logprobs"] = {"content": [{"token": token, "logprob": -0.1} for token in "abc"]}
    data = event(json.dumps({"choices": [change]}, ensure_ascii=escaped).encode())
    cuts = iter(range(1, len(data)))

    async def act(call: RawCall) -> None:
        cut = next(cuts)
        await call.head()
        await call.chunk(FIRST)
        await call.chunk(data[:cut])
        await asyncio.sleep(0)
        await call.chunk(data[cut:])
        await call.chunk(delta(finish="stop") + last(3))
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        for _ in range(1, len(data)):
            assert text(*await streamed(rig)) == "go \U0001f9ea \u0939"
        for record in await rig.records():
            assert (record.sampled_ids, record.reply["content"]) == ([11, 12, 13], "go \U0001f9ea \u0939")


@pytest.mark.parametrize("sse", [True, False])
@pytest.mark.parametrize("end", ["error", "reset", "close"])
async def test_an_error_inside_a_stream_is_an_error_object(
    redis_client: Redis, keys: Keys, sse: bool, end: str
) -> None:
    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(FIRST + delta("half", (1, 2)))
        if end == "error":
            await call.chunk(event({"error": {"message": "queue full", "type": "overloaded", "code": 503}}))
            await call.end()
        elif end == "reset":
            await call.chunk(b'data: {"choices":[{"ind')
            call.reset()
        else:
            await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        path = "/v1beta/models/m:streamGenerateContent" + ("?alt=sse" if sse else "")
        status, _, raw = await rig.raw({"contents": HELLO}, path)
        assert status == 200
        if sse:
            begun, _, ended = raw.partition(b"\n\n")
            bare, _, framed = ended.partition(b"\n")
            # A bare line of JSON for Google's SDKs, an event for readers of events, and both the same.
            assert framed.endswith(b"\n\n")
            assert bare == framed.strip().removeprefix(b"data: ")
            found = [*events(begun), json.loads(bare)]
        else:
            found = array(raw)
        assert text(*found[:-1]) == "half"
        error = found[-1]["error"]
        assert error["code"] == (503 if end == "error" else 502)
        assert error["status"] == "UNAVAILABLE"
        assert not any("finishReason" in candidate for one in found[:-1] for candidate in one["candidates"])
        [record] = await rig.records()
        assert (record.sampled_ids, record.incomplete, record.trainable) == ([1, 2], True, False)
        assert record.usage.completion_tokens is None


@MODES
@pytest.mark.parametrize("sse", [True, False])
async def test_a_waiting_stream_is_kept_alive_by_blanks(
    redis_client: Redis, keys: Keys, stream_upstream: bool, sse: bool
) -> None:
    go_on = asyncio.Event()

    async def act(call: RawCall) -> None:
        await go_on.wait()
        if call.body["stream"]:
            await call.head()
            await call.chunk(FIRST + delta("late", (11,), "stop") + last(1))
            await call.end()
        else:
            await call.whole(answer("late"))

    path = "/v1beta/models/m:streamGenerateContent" + ("?alt=sse" if sse else "")
    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, keepalive_s=0.05, stream_upstream=stream_upstream) as rig,
        rig.http.post(rig.base_url + path, json={"contents": HELLO}) as answered,
    ):
        first = await answered.content.readexactly(3)
        assert first == b"\n\n\n"
        go_on.set()
        rest = await answered.content.read()
        assert text(*(events(rest) if sse else array(first + rest))) == "late"


async def test_pictures_behind_a_result_reach_the_engine_as_pictures(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    inline = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
    contents = [
        *HELLO,
        model({"functionCall": {"name": "shot"}}),
        user({"functionResponse": {"name": "shot", "response": {"output": "shot"}}}, inline),
    ]
    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        await whole(rig, contents)
        sent = engine.calls[0].body["messages"][-1]
        assert sent["role"] == "tool"
        assert sent["content"] == [
            {"type": "text", "text": "shot"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        ]


@FORMS
async def test_overflow_is_said_in_the_apis_words(redis_client: Redis, keys: Keys, form: str) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("x"), max_model_len=64) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        method = "generateContent" if form == "whole" else "streamGenerateContent"
        path = f"/v1beta/models/m:{method}" + ("?alt=sse" if form == "events" else "")
        status, tree = await rig.post({"contents": [user({"text": "word " * 200})]}, path)
        assert (status, tree["error"]["code"], tree["error"]["status"]) == (400, 400, "INVALID_ARGUMENT")
        words = tree["error"]["message"]
        assert words.startswith("The input token count")
        assert words.endswith("exceeds the maximum number of tokens allowed (64).")


async def test_errors_have_the_apis_shape(redis_client: Redis, keys: Keys) -> None:
    fault = HttpStatus(kind="http_status", status=429, retry_after_s=7, times=1)
    async with (
        ScriptedInference(scenario=scenario(Turn(content="x", fault=fault))) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        path = "/v1beta/models/m:generateContent"
        status, headers, raw = await rig.raw({"contents": HELLO}, path)
        error = json.loads(raw)["error"]
        assert (status, error["code"], error["status"]) == (429, 429, "RESOURCE_EXHAUSTED")
        assert headers["retry-after"] == "7"
        assert error["details"][0]["retryDelay"] == "7s"
        status, tree = await rig.post(b"{", path)
        assert (status, tree["error"]["status"]) == (400, "INVALID_ARGUMENT")
        status, tree = await rig.post({"contents": HELLO}, "/v1beta/models/m:embedContent")
        assert (status, tree["error"]["status"]) == (404, "NOT_FOUND")


async def test_a_dead_session_is_answered_so_that_the_harness_stops(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("x")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await close_grant(rig.redis, rig.keys, rig.secret)
        for method in ("generateContent", "streamGenerateContent"):
            status, tree = await rig.post({"contents": HELLO}, f"/v1beta/models/m:{method}")
            assert (status, tree["error"]["status"]) == (400, "FAILED_PRECONDITION")


async def test_a_stream_that_breaks_before_its_first_token_is_a_plain_error(redis_client: Redis, keys: Keys) -> None:
    fault = StreamError(kind="stream_error", after_tokens=0)
    async with (
        ScriptedInference(scenario=scenario(Turn(content="x", fault=fault))) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, tree = await rig.post({"contents": HELLO}, "/v1beta/models/m:streamGenerateContent?alt=sse")
        assert status >= 500
        assert tree["error"]["code"] == status


async def test_tokens_are_counted_without_sampling(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("x")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, counted = await rig.post({"contents": HELLO}, "/v1beta/models/m:countTokens")
        assert status == 200
        assert await rig.records() == []
        answered = await whole(rig)
        assert counted == {"totalTokens": answered["usageMetadata"]["promptTokenCount"]}


async def test_models_are_listed_in_the_apis_shape(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("x")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        headers = {"x-goog-api-key": rig.secret}
        async with rig.http.get(rig.url + "/v1beta/models", headers=headers) as listed:
            [shown] = (await listed.json())["models"]
        async with rig.http.get(rig.url + "/v1beta/models/any", headers=headers) as one:
            assert (await one.json())["name"] == "models/any"
        assert shown["name"] == "models/scripted"
        assert "generateContent" in shown["supportedGenerationMethods"]


@pytest.mark.parametrize("where", ["header", "query", "path"])
async def test_the_key_may_be_anywhere(redis_client: Redis, keys: Keys, where: str) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("x")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        base = rig.base_url if where == "path" else rig.url
        path = "//v1beta/models/m:generateContent" + (f"?key={rig.secret}" if where == "query" else "")
        headers = {"x-goog-api-key": rig.secret} if where == "header" else {}
        status, _, raw = await rig.raw({"contents": HELLO}, path, base=base, headers=headers)
        assert status == 200, raw
        [record] = await rig.records()
        assert rig.secret not in record.path
