"""What somebody found who tried to break the proxy: each once, with the right answer."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.pauses import Pause
from polarq.testing.inference import SampledCall, Scenario, Script, ScriptedInference, Turn
from polarq_proxy.dialects import openai_chat
from polarq_proxy.pausing import Gate
from tests.pauses import clear_pause, set_pause

from .raw_engine import RawCall, delta, event, last, raw_engine
from .rig import HELLO, Rig, running, until

WORDS = "one two three four five six seven eight"
SLOW = Scenario(name="slow", scripts=(Script(name="a", turns=(Turn(content=WORDS, tokens_per_s=5.0),)),))
RETRY = {"X-Stainless-Retry-Count": "1"}


def sampled(inference: ScriptedInference, rollout_id: str = "task.0") -> list[SampledCall]:
    return [call for call in inference.ledger if call.session_id == rollout_id]


@pytest.mark.parametrize("status", [401, 403, 429, 500])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_server_that_repeats_its_key_does_not_bring_it_into_a_sandbox(
    redis_client: Redis, keys: Keys, caplog: pytest.LogCaptureFixture, status: int, streamed: bool
) -> None:
    async def act(call: RawCall) -> None:
        text = f"Incorrect API key provided: {call.headers.get('authorization')}"
        await call.whole({"error": {"message": text}}, status=status)

    async with raw_engine(act) as engine:
        pool = [{"alias": "pool/judge", "model": "j", "base_url": engine.url, "api_key_env": "JUDGE_KEY"}]
        options: dict[str, Any] = {"env": {"JUDGE_KEY": "sk-verysecret"}, "model_pool": pool}
        async with running(redis_client, keys, engine.url, endpoint={"api_key_env": "JUDGE_KEY"}, **options) as rig:
            for model in ("pool/judge", "m"):
                _, _, data = await rig.raw({"model": model, "messages": HELLO, "stream": streamed})
                assert b"verysecret" not in data
            assert len(engine.calls) >= 2
            assert "verysecret" not in caplog.text


async def test_several_choices_are_replayed_after_a_restart(redis_client: Redis, keys: Keys) -> None:
    body = {"model": "m", "messages": HELLO, "n": 2}
    async with ScriptedInference(scenario=Scenario.of(WORDS)) as inference:
        async with running(redis_client, keys, inference.base_url) as before:
            await before.post(body)
        async with running(redis_client, keys, inference.base_url) as after:
            rig = Rig(after.proxy, after.url, redis_client, keys, before.spec, before.secret, after.http)
            status, said = await rig.post(body, headers=RETRY)
            assert (status, len(said["choices"])) == (200, 2)
            assert len(sampled(inference)) == len(await rig.records()) == 2


async def test_every_answer_that_was_open_at_a_restart_is_given_to_who_asks_again(
    redis_client: Redis, keys: Keys
) -> None:
    bodies = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in "abc"]
    async with ScriptedInference(scenario=Scenario.of(WORDS)) as inference:
        async with running(redis_client, keys, inference.base_url) as before:
            for body in bodies:
                await before.post(body)
        async with running(redis_client, keys, inference.base_url) as after:
            rig = Rig(after.proxy, after.url, redis_client, keys, before.spec, before.secret, after.http)
            for body in bodies:
                await rig.post(body)
            assert len(sampled(inference)) == len(await rig.records()) == 3
            # One from which the conversation went on was read: asked again it is another call.
            said = {"role": "assistant", "content": WORDS}
            await rig.post({"model": "m", "messages": [*bodies[0]["messages"], said, *HELLO]})
        async with running(redis_client, keys, inference.base_url) as last:
            rig = Rig(last.proxy, last.url, redis_client, keys, before.spec, before.secret, last.http)
            await rig.post(bodies[0])
            assert len(sampled(inference)) == len(await rig.records()) == 5


async def test_an_abort_for_new_weights_costs_a_rollout_none_of_its_calls(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SLOW) as inference,
        running(redis_client, keys, inference.base_url, grant={"rules": {"max_calls": 1}}) as rig,
    ):
        asking = asyncio.create_task(rig.ask())
        await inference.ledger.wait_until(lambda _: bool(sampled(inference) and sampled(inference)[0].sampled_ids))
        await set_pause(redis_client, keys, lease_s=60, mode="abort")
        await until(lambda: rig.proxy.gate.waiting == 1)
        await clear_pause(redis_client, keys)
        assert (await asking)["choices"][0]["message"]["content"] == WORDS
        [record] = await rig.records()
        assert (record.seq, record.retry_of, record.trainable) == (0, None, True)


async def test_parallel_calls_share_the_tokens_of_their_rollout(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of(WORDS)) as inference,
        running(redis_client, keys, inference.base_url, grant={"rules": {"max_sampled_tokens": 12}}) as rig,
    ):
        bodies = [{"model": "m", "messages": [{"role": "user", "content": str(n)}]} for n in range(8)]
        answers = await asyncio.gather(*(rig.post(body) for body in bodies))
        assert {status for status, _ in answers} <= {200, 404}
        assert 0 < sum(len(call.sampled_ids) for call in sampled(inference)) <= 12


@pytest.mark.parametrize("kind", [["x"], {}, 5, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_format_of_no_known_kind_is_recorded_all_the_same(
    redis_client: Redis, keys: Keys, kind: Any, stream: bool
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of(WORDS)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        body = {"model": "m", "messages": HELLO, "response_format": {"type": kind}, "stream": stream}
        status, _, _ = await rig.raw(body)
        assert status in {200, 400}
        assert len(await rig.records()) == len(sampled(inference))


@pytest.mark.parametrize("context", ["observe", "exact"])
@pytest.mark.parametrize("deep", [300, 900, 980])
async def test_deep_json_is_the_requests_fault_and_leaves_no_trace_in_the_log(
    redis_client: Redis, keys: Keys, caplog: pytest.LogCaptureFixture, context: str, deep: int
) -> None:
    nested = '{"a":' * deep + "{}" + "}" * deep
    caplog.set_level(logging.INFO)
    async with (
        ScriptedInference(scenario=Scenario.of(WORDS)) as inference,
        running(redis_client, keys, inference.base_url, context=context) as rig,
    ):
        await rig.proxy.fleet.endpoints[0].met()
        hello = json.dumps(HELLO)
        tools = f'[{{"type":"function","function":{{"name":"f","parameters":{nested}}}}}]'
        for body in (
            f'{{"messages":{hello},"chat_template_kwargs":{nested}}}',
            f'{{"messages":{hello},"tools":{tools}}}',
            f'{{"messages":[{{"role":"user","content":"x","extra":{nested}}}]}}',
        ):
            status, _, _ = await rig.raw(body.encode())
            assert status in {200, 400}
        assert "Traceback" not in caplog.text
        await rig.ask()


async def test_a_harness_that_does_not_read_holds_up_neither_the_engine_nor_its_own_repeat(
    redis_client: Redis, keys: Keys
) -> None:
    long = "word " * 6000
    async with (
        ScriptedInference(scenario=Scenario.of(long), max_model_len=200_000) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        host, _, port = rig.url.removeprefix("http://").partition(":")
        body = json.dumps({"model": "m", "messages": HELLO, "stream": True, "logprobs": True}).encode()
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stuck, (host, int(port)))
            head = (
                f"POST /s/{rig.secret}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            await asyncio.get_running_loop().sock_sendall(stuck, head.encode() + body)
            await until(rig.records, timeout_s=60)
            assert rig.proxy.gate.in_flight == 0
            again = {"model": "m", "messages": HELLO, "logprobs": True}
            status, said = await rig.post(again, headers=RETRY)
            assert (status, said["choices"][0]["message"]["content"]) == (200, long)
            assert len(sampled(inference)) == len(await rig.records()) == 1


async def test_a_body_is_not_read_for_who_has_no_session(redis_client: Redis, keys: Keys) -> None:
    bomb = gzip.compress(b"0" * (60 << 20))
    async with running(redis_client, keys, "http://127.0.0.1:1") as rig:
        host, _, port = rig.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer nobody\r\n"
            f"Content-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
        )
        writer.write(head.encode() + bomb[:-1])
        async with asyncio.timeout(20):
            assert b" 404 " in await reader.readline()  # although the last byte never came
        writer.close()


@pytest.mark.parametrize("filler", [b"{},", b"[],"])
async def test_millions_of_empty_parts_are_refused_before_they_are_read(
    redis_client: Redis, keys: Keys, filler: bytes
) -> None:
    async with running(redis_client, keys, "http://127.0.0.1:1") as rig:
        body = b'{"messages":[' + filler * 1_000_000 + b"{}]}"
        async with rig.http.post(rig.base_url + "/v1/chat/completions", data=io.BytesIO(body)) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (413, "too_large")


async def test_calls_that_hold_too_much_together_are_told_to_come_again(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SLOW) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        rig.proxy.max_held_bytes = 100_000
        body = {"model": "m", "messages": HELLO, "metadata": {"padding": "x" * 90_000}}
        larger = {**body, "metadata": {"padding": "x" * 180_000}}
        first = asyncio.create_task(rig.post(body))
        await until(lambda: rig.proxy.counters.in_flight == 1)
        status, headers, data = await rig.raw(larger)
        assert (status, headers["retry-after"]) == (503, "2")
        assert b"hold" in data
        assert (await first)[0] == 200
        status, _ = await rig.post(larger)
        assert status == 200  # alone, a call may hold more than that


async def test_a_pause_leaves_a_call_alone_whose_own_time_is_up() -> None:
    gate, limit = Gate(hold_s=1.0), asyncio.timeout(0)
    cut = None
    with pytest.raises(TimeoutError):
        async with limit:
            gate.passed(limit, "")
            try:
                await asyncio.Event().wait()
            finally:  # it winds down, which may take a while, and meanwhile a pause begins
                gate.set({"": Pause(pause_id="p", mode="abort")})
                cut = gate.left(limit)
    assert cut is False
    assert gate.holds("")


async def test_a_look_at_the_pause_that_fails_is_not_the_last_one(
    redis_client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        failed = asyncio.Event()

        def fail(pauses: object) -> None:
            monkeypatch.undo()
            failed.set()
            raise RuntimeError("once")

        monkeypatch.setattr(rig.proxy.gate, "set", fail)
        await set_pause(redis_client, keys, lease_s=60)
        await failed.wait()
        await until(lambda: rig.proxy.gate.holds(""))


async def test_nothing_follows_a_streams_end_however_slowly_it_is_read(redis_client: Redis, keys: Keys) -> None:
    large, keepalive_s = "x" * 8_000_000, 0.1
    begun = asyncio.Event()

    async def act(call: RawCall) -> None:
        await call.head()
        first = {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}
        await call.chunk(event({"choices": [first], "model": "m", "prompt_token_ids": [1, 2]}))
        await begun.wait()
        await call.chunk(delta(large, (6,)))
        await call.chunk(delta("", (), finish="stop") + last(1))
        await call.end()

    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, keepalive_s=keepalive_s) as rig,
    ):
        loop, address = asyncio.get_running_loop(), urlsplit(rig.url)
        with socket.socket() as harness:
            harness.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            harness.setblocking(False)
            await loop.sock_connect(harness, (address.hostname, address.port))
            body = json.dumps({"model": "m", "messages": HELLO, "stream": True}).encode()
            head = (
                f"POST /s/{rig.secret}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            await loop.sock_sendall(harness, head.encode() + body)
            got = b""
            while b": waiting" not in got:  # so the first event is read, and nothing is on its way
                got += await loop.sock_recv(harness, 65536)
            begun.set()
            await until(lambda: rig.proxy.counters.calls == 1)
            for patience_s in (8 * keepalive_s, 0.0):
                await asyncio.sleep(patience_s)  # the rest waits to be read, its end too
                while len(got) < 7_400_000:
                    got += await loop.sock_recv(harness, 65536)
                await asyncio.sleep(patience_s)
            while not got.endswith(b"\r\n0\r\n\r\n"):
                piece = await loop.sock_recv(harness, 65536)
                assert piece, got[-200:]
                got += piece
            assert got.count(b"[DONE]") == 1
            await asyncio.sleep(0.5)
            with pytest.raises(BlockingIOError):
                harness.recv(1)


async def test_what_cannot_be_written_for_a_harness_is_recorded_all_the_same(
    redis_client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, piece: object) -> bytes:
        raise KeyError("boom")

    async with (
        ScriptedInference(scenario=Scenario.of(WORDS)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        monkeypatch.setattr(openai_chat._ChatStream, "piece", broken)
        status, _, data = await rig.raw({"model": "m", "messages": HELLO, "stream": True})
        assert (status, b"boom" in data) == (500, False)
        await until(lambda: rig.proxy.counters.calls == 1)
        [record] = await rig.records()
        assert (record.untrainable, record.sampled_ids) == (None, sampled(inference)[0].sampled_ids)
        assert rig.proxy.counters.in_flight == 0
