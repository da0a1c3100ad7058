"""Paths, keys, sessions, probes and bad requests: everything is answered, in the dialect's shape."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, ScriptedInference
from polarq_proxy.app import Place, placed

from .rig import HELLO, Rig, running

SCENARIO = Scenario.of("first", "second")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/s/x/v1/chat/completions", Place("x", "/v1/chat/completions", "chat/completions", "v1")),
        ("//s//x//v1//chat/completions/", Place("x", "/v1/chat/completions", "chat/completions", "v1")),
        ("/s/x/v1/v1/chat/completions", Place("x", "/v1/v1/chat/completions", "chat/completions", "v1")),
        ("/s/x/chat/completions", Place("x", "/chat/completions", "chat/completions")),
        ("/v1beta/models/a", Place(None, "/v1beta/models/a", "models/a", "v1beta")),
        ("/s", Place("", "/", "")),
        ("/", Place(None, "/", "")),
    ],
)
def test_a_path_is_taken_apart(path: str, place: Place) -> None:
    assert placed(path, {}) == place


def test_the_query_is_kept_and_a_key_in_it_is_not() -> None:
    assert (
        placed("/s/x/v1/chat/completions", {"beta": "true", "key": "pq-secret"}).shown
        == "/v1/chat/completions?beta=true"
    )


@pytest.mark.parametrize(
    "path",
    [
        "/s/{}/v1/chat/completions",
        "/s/{}/chat/completions",
        "/s/{}/v1/v1/chat/completions",
        "//s/{}//v1//chat/completions",
        "/s/{}/v1/chat/completions?beta=true&alt=sse",
    ],
)
async def test_any_path_to_the_route_works_and_the_record_has_no_secret(
    redis_client: Redis, keys: Keys, path: str
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        body = {"model": "m", "messages": HELLO}
        status, answer = await rig.post(body, path.format(rig.secret), base=rig.url)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "first")
        [record] = await rig.records()
        assert rig.secret not in record.model_dump_json()
        assert record.path.endswith("?beta=true&alt=sse") == ("?" in path)


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "X-Goog-Api-Key", None])
async def test_the_session_is_also_a_key(redis_client: Redis, keys: Keys, header: str | None) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        key = f"Bearer {rig.secret}" if header == "Authorization" else rig.secret
        query = "" if header else f"?key={rig.secret}"
        status, _ = await rig.post(
            {"messages": HELLO}, f"/v1/chat/completions{query}", base=rig.url, headers={header: key} if header else {}
        )
        assert status == 200
        assert len(await rig.records()) == 1


async def test_the_path_wins_over_the_key(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await rig.post({"messages": HELLO}, headers={"Authorization": "Bearer sk-whatever"})
        assert len(await rig.records()) == 1


@pytest.mark.parametrize("key", ["pq-unknown", "", None])
async def test_a_session_that_is_not_there_gets_a_final_answer(
    redis_client: Redis, keys: Keys, key: str | None
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        status, answer = await rig.post({"messages": HELLO}, base=rig.url, headers=headers)
        assert status == 404
        assert answer["error"]["code"] == "no_session"
        assert "session" in answer["error"]["message"]
        assert [call for call in inference.ledger if call.session_id == "task.0"] == []


async def test_a_session_that_closes_gets_nothing_more_recorded_or_shown(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await rig.ask()
        await close_grant(redis_client, keys, rig.secret)
        status, answer = await rig.post({"messages": HELLO})
        assert (status, answer["error"]["code"]) == (404, "no_session")
        closed = await rig.stream()
        assert closed.finish_reasons == []
        assert len(await rig.records()) == 1
        assert len(rig.proxy.sessions) == 0


async def test_a_rollout_may_make_only_so_many_calls(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url, grant={"rules": {"max_calls": 2}}) as rig,
    ):
        await rig.ask()
        await rig.ask()
        status, answer = await rig.post({"messages": HELLO})
        assert (status, answer["error"]["code"]) == (404, "too_many_calls")
        assert "2 model calls" in answer["error"]["message"]


async def test_probes_are_answered_and_not_recorded(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO, served_model_name="demo") as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await rig.ask()
        for path in ("", "/v1", "/v1/anything", "/v1/chat/completions"):
            async with rig.http.head(rig.base_url + path) as answer:
                assert answer.status == 200
        for path in ("", "/", "/v1"):
            async with rig.http.get(rig.base_url + path) as answer:
                assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        async with rig.http.get(rig.base_url + "/v1/models") as answer:
            models = (await answer.json())["data"]
            assert [model["id"] for model in models] == ["demo"]
            assert models[0]["max_model_len"] == 32768
        async with rig.http.get(rig.base_url + "/v1/models/openai/gpt-x") as answer:
            assert (await answer.json())["id"] == "openai/gpt-x"
        assert len(await rig.records()) == 1


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/nonsense"), ("GET", "/v1/responses"), ("PUT", "/v1/models")]
)
async def test_an_unknown_route_is_named(redis_client: Redis, keys: Keys, method: str, path: str) -> None:
    async with (
        running(redis_client, keys, "http://127.0.0.1:1") as rig,
        rig.http.request(method, rig.base_url + path) as answer,
    ):
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["type"]) == (404, "no_such_route", "not_found_error")
        assert path in error["message"]
        assert rig.secret not in error["message"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": ["hi"]}', "messages"),
        (b'{"messages": [{}], "tools": [1]}', "tools"),
        (b'{"messages": [{}], "n": 0}', "'n'"),
        (b'{"messages": [{}], "n": 65}', "'n'"),
        (b'{"messages": ' + b"[" * 100_000, "not JSON"),
    ],
)
async def test_a_bad_body_is_told_what_is_wrong_with_it(
    redis_client: Redis, keys: Keys, body: bytes, names: str
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, answer = await rig.post(body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert names in answer["error"]["message"]
        assert "\n" not in answer["error"]["message"]
        assert await rig.records() == []


async def test_unknown_fields_and_odd_shapes_are_passed_on(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        messages: list[Any] = [
            {"role": "developer", "content": [{"type": "text", "text": "be kind", "cache_control": {"type": "x"}}]},
            {"role": "user", "content": "hi", "name": None},
        ]
        await rig.ask(
            messages,
            session_id="abc",
            metadata={"a": 1},
            store=True,
            tools=[],
            tool_choice="auto",
            stop=None,
            stream_options={"include_usage": True},
            context_management={},
        )
        [record] = await rig.records()
        assert record.messages[0]["role"] == "system"
        assert record.messages[1] == {"role": "user", "content": "hi"}


async def test_a_number_beyond_64_bits_is_passed_on_and_recorded(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}]
        await rig.ask(tools=tools, metadata={"n": 10**40})
        [record] = await rig.records()
        assert record.tools == tools


async def test_a_half_character_of_a_harness_does_not_stop_it(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, _ = await rig.post(rb'{"messages": [{"role": "user", "content": "cut \ud83e"}]}')
        assert status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_packed_bodies_are_read_or_refused_in_the_dialects_shape(
    redis_client: Redis, keys: Keys, encoding: str
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url, max_body_bytes=100_000) as rig,
    ):
        headers = {"Content-Encoding": encoding}
        plain = json.dumps({"messages": HELLO}).encode()
        if encoding == "gzip":
            status, _ = await rig.post(gzip.compress(plain), headers=headers)
            assert status == 200
            status, answer = await rig.post(gzip.compress(plain)[:-5], headers=headers)
            assert (status, answer["error"]["code"]) == (400, "bad_request")
            status, answer = await rig.post(gzip.compress(bytes(50_000_000)), headers=headers)
            assert (status, answer["error"]["code"]) == (413, "too_large")
        else:
            status, answer = await rig.post(plain, headers=headers)
            assert (status, answer["error"]["type"]) == (415 if encoding == "br" else 400, "invalid_request_error")
        assert len(await rig.records()) == (encoding == "gzip")


async def test_a_body_beyond_the_limit_is_refused_before_it_is_read(redis_client: Redis, keys: Keys) -> None:
    async with running(redis_client, keys, "http://127.0.0.1:1", max_body_bytes=1000) as rig:
        status, answer = await rig.post(b"x" * 1001)
        assert (status, answer["error"]["code"]) == (413, "too_large")


async def test_no_log_line_holds_a_secret(redis_client: Redis, keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await rig.ask()
        await rig.stream()
        await rig.post(b"{")
        await rig.post({}, "/v1/nonsense")
        await close_grant(redis_client, keys, rig.secret)
        await rig.post({"messages": HELLO})
        assert rig.secret not in caplog.text
        assert rig.secret not in repr(await _session(rig))


async def _session(rig: Rig) -> Any:
    other = await rig.session(5)
    return await rig.proxy.sessions.find(other.secret)


@pytest.mark.parametrize(
    "target",
    ["/v1/%0Ax", "/%ff%fe", "/s/%2F..%2F/v1/nothing", "/v1/" + "x" * 9000, "/s/a%00b/v1/chat/completions?key=%zz"],
)
@pytest.mark.parametrize("method", ["POST", "PATCH", "GET", "OPTIONS"])
async def test_odd_targets_get_an_error_in_the_dialects_shape(
    redis_client: Redis, keys: Keys, method: str, target: str
) -> None:
    async with running(redis_client, keys, "http://127.0.0.1:1") as rig:
        host, _, port = rig.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()
        )
        answered = await reader.read()
        writer.close()
        assert answered.startswith(b"HTTP/1.1 404 ")
        body = answered.partition(b"\r\n\r\n")[2]
        assert json.loads(body)["error"]["code"] in {"no_such_route", "no_session"}


@pytest.mark.parametrize(
    ("path", "headers", "key"),
    [
        ("/v1/models", {}, "data"),
        ("/v1beta/models?key=x", {}, "models"),
        ("/v1/models", {"x-goog-api-key": "x"}, "models"),
        ("/v1/models", {"anthropic-version": "2023-06-01"}, "has_more"),
    ],
)
async def test_the_models_are_listed_in_the_shape_of_who_asks(
    redis_client: Redis, keys: Keys, path: str, headers: dict[str, str], key: str
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await rig.ask()
        async with rig.http.get(rig.base_url + path, headers=headers) as answer:
            listed = await answer.json()
        assert key in listed
        assert ("scripted" in json.dumps(listed)) is True
