"""What a session's record takes: bytes in Redis over 40 turns, and CPU per turn as the session grows.

    python benchmarks/proxy_records.py

A turn brings 500 new prompt ids and 300 sampled ones, spread as a tokenizer's are; the prompt is all that came before.
Text (messages, replies) is left out of the first figure and shown apart, because it compresses as the text does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import numpy as np
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.completions import LASTING, CompletionLog, Draft, read_completions
from polarq.store.grants import GrantSpec, open_grant
from polarq.store.token_text import text_of
from polarq.testing.redis import EmbeddedRedis

NEW, SAMPLED = 500, 300
LASTING_VALUES: dict[str, str | bool | None] = {
    **dict.fromkeys(sorted(LASTING), ""), "streamed": False, "exact": False, "incomplete": False, "label": "train",
    "untrainable": None, "rollout_id": "b.0",
}  # fmt: skip


def turns(count: int, *, text: bool) -> Iterator[tuple[bytes, list[int], list[float], list[dict[str, str]]]]:
    """(an answer's prompt as JSON, sampled ids, log-probabilities, messages)."""
    random = np.random.default_rng(3)
    prompt = b""
    messages: list[dict[str, str]] = []
    for turn in range(count):
        new, sampled = (np.minimum(random.zipf(1.25, size), 151_000).tolist() for size in (NEW, SAMPLED))
        prompt = b",".join(filter(None, (prompt, text_of(new))))
        if text:
            messages = [*messages, {"role": "user", "content": " ".join(f"word{id_ % 3000}" for id_ in new)}]
        numbers = (-random.exponential(0.4, SAMPLED)).astype(np.float32).tolist()
        yield b"[" + prompt + b"]", sampled, numbers, messages or [{"role": "user", "content": str(turn)}]
        prompt += b"," + text_of(sampled)


async def record(redis: Redis, name: str, count: int, *, text: bool) -> tuple[int, list[float]]:
    """Bytes of all records, and CPU seconds of each turn."""
    spec, keys = GrantSpec(rollout_id=name, task_id="b", attempt=1, token=1, node_id="n"), Keys()
    secret = await open_grant(redis, keys, spec, 3600)
    log, took = CompletionLog(redis, keys), []
    for seq, (prompt, sampled, numbers, messages) in enumerate(turns(count, text=text)):
        began = time.process_time()
        found = log.prompt(spec, prompt, 1, len(prompt) - 1)
        fields = {
            "seq": seq, "completion_id": f"{seq:024}", "attempt": 1, "requested_at": "2026-11-29T00:00:00+00:00",
            "answered_at": "2026-11-29T00:00:00+00:00", "latency_s": 0.1, "request_digest": f"{seq:032x}",
        }  # fmt: skip
        draft = Draft(seq, f"{seq:024}", LASTING_VALUES, fields, found, sampled, numbers, [dict(m) for m in messages])
        await log.write([draft], spec, secret)
        took.append(time.process_time() - began)
    raw = await redis.lrange(keys.completions(name, 1, 1), 0, -1)
    back = await read_completions(redis, keys, name, 1, 1)
    assert text_of(back[-1].prompt_ids) == prompt[1:-1]
    return sum(map(len, raw)), took


async def run() -> None:
    with EmbeddedRedis() as server:
        async with Redis.from_url(server.url) as redis:
            full = sum(
                len(json.dumps({"p": json.loads(prompt), "o": sampled, "l": numbers}, separators=(",", ":")))
                for prompt, sampled, numbers, _ in turns(40, text=False)
            )
            bare, _ = await record(redis, "b.900", 40, text=False)
            whole, _ = await record(redis, "b.901", 40, text=True)
            print(f"40 turns, bytes: {bare:,} ({whole:,} with messages); full JSON of the numbers: {full:,}")
            runs = [(await record(redis, f"b.{repeat}", 205, text=True))[1] for repeat in range(5)]
            for turn in (2, 20, 50, 100, 200):
                cost = min(sum(run[turn - 1 : turn + 4]) / 5 for run in runs)
                print(
                    f"turn {turn:3}: {cost * 1e6:6.0f} us of CPU, {cost / (NEW + SAMPLED) * 1e9:4.0f} ns per new token"
                )


if __name__ == "__main__":
    asyncio.run(run())
