"""Whatever harnesses, engine, trainer and operator do in whatever order: what is recorded is exactly what the engine
sampled and somebody could have read.

`make test` plays the same few plans each time, one a seed. For a long run: POLARQ_PROPERTY_SEEDS=1000-2999, for one
plan again: POLARQ_PROPERTY_SEEDS=1234, and then pytest with this file. A failure shows its plan and what came of it."""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from polarq.contracts.completion import Completion
from polarq.ledger.keys import Keys
from polarq.testing.inference import SampledCall
from polarq.testing.inference.faults import (
    Abort,
    CloseAfterSampling,
    CloseBefore,
    CutAtByte,
    Fault,
    HttpStatus,
    StreamError,
)
from polarq.testing.redis import EmbeddedRedis

from .disorder import Question, Then, World, world
from .tongues import TONGUES, Tongue

FIRST, _, LAST = os.environ.get("POLARQ_PROPERTY_SEEDS", "0-29").partition("-")
SEEDS = range(int(FIRST), int(LAST or FIRST) + 1)
FAULTS: list[Fault] = [
    HttpStatus(kind="http_status", status=500),
    HttpStatus(kind="http_status", status=503),
    CloseBefore(kind="close_before"),
    CloseAfterSampling(kind="close_after_sampling"),
    CutAtByte(kind="cut_at_byte", byte=900),
    StreamError(kind="stream_error", after_tokens=3),
    Abort(kind="abort", after_tokens=3),
]


@dataclass(frozen=True)
class Step:
    """One thing that happens in one conversation, or in all of them."""

    what: Literal["turn", "again", "cut", "cut again", "overlap", "twins", "pause", "restart", "interrupt", "refuse"]
    conversation: int
    stream: bool
    marked: bool
    where: Literal["head", "middle", "last"]
    abort: bool
    then: Then
    fork: int | None
    """Back to so many earlier turns, instead of going on."""
    fault: int | None
    beside: bool
    """The other conversations ask something meanwhile."""


def some_step(dice: random.Random) -> Step:
    return Step(
        what=dice.choice(
            ["turn", "again", "again", "cut", "cut", "cut again", "overlap", "twins", "pause", "restart", "interrupt",
             "refuse"]
        ),
        conversation=dice.randrange(2),
        stream=dice.random() < 0.5,
        marked=dice.random() < 0.5,
        where=dice.choice(["head", "middle", "last"]),
        abort=dice.random() < 0.6,
        then=dice.choice(["", "", "whole", "streamed", "abort"]),
        fork=dice.choice([None, None, None, 0, 1]),
        fault=dice.randrange(len(FAULTS)) if dice.random() < 0.3 else None,
        beside=dice.random() < 0.3,
    )  # fmt: skip


@dataclass
class Conversation:
    tongue: Tongue
    history: list[tuple[str, str]] = field(default_factory=list)
    last: Question | None = None


class Play:
    """One plan, played in one world."""

    def __init__(self, made: World, tongues: Sequence[Tongue]) -> None:
        self.world = made
        self.conversations = [Conversation(tongue) for tongue in tongues]
        self.questions: list[Question] = []

    def next_question(self, talker: Conversation, fork: int | None) -> Question:
        if fork is not None:
            talker.history = talker.history[: 2 * fork]
        talk = (*talker.history, ("user", f"question {len(self.questions)}?"))
        talker.last = Question(talker.tongue, talk)
        self.questions.append(talker.last)
        return talker.last

    def went_on(self) -> None:
        """Who has read an answer goes on from it."""
        for talker in self.conversations:
            for reading in self.world.readings:
                if reading.question is talker.last and reading.whole:
                    talker.history = [*talker.last.talk, ("assistant", reading.text)]

    async def step(self, step: Step) -> None:
        made, talker = self.world, self.conversations[step.conversation % len(self.conversations)]
        if step.fault is not None and step.what not in {"restart", "interrupt", "overlap"}:
            made.model.planned.append(FAULTS[step.fault])
        again = talker.last if step.what in {"again", "cut again"} and talker.last is not None else None
        asked = again or self.next_question(talker, step.fork)
        doing: list[Any] = []
        match step.what:
            case "turn" | "again":
                doing.append(made.ask(asked, stream=step.stream, marked=step.marked and again is not None))
                if step.beside:
                    others = [other for other in self.conversations if other is not talker]
                    doing += [made.ask(self.next_question(other, None), stream=not step.stream) for other in others]
            case "cut" | "cut again":
                marked = step.marked and again is not None
                doing.append(made.cut(asked, stream=step.stream, marked=marked, where=step.where, then=step.then))
            case "overlap":
                doing.append(made.overlapped(asked, stream=step.stream))
            case "twins":
                doing.append(made.twins(asked, stream=step.stream))
            case "pause":
                doing.append(made.paused(asked, stream=step.stream, mode="abort" if step.abort else "drain"))
            case "restart":
                doing.append(made.restart())
            case "interrupt":
                doing.append(made.interrupted(asked, stream=step.stream))
            case "refuse":
                doing.append(made.unstored(asked, stream=step.stream, again=step.marked))
        await asyncio.gather(*doing)
        made.model.planned.clear()
        self.went_on()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_record_is_what_was_sampled_and_could_be_read(redis_server: EmbeddedRedis, seed: int) -> None:
    dice = random.Random(seed)
    tongues = dice.choices(TONGUES, k=2)
    grace_s = dice.choice([60.0, 60.0, 0.01])
    stream_upstream = dice.random() < 0.7
    plan = [some_step(dice) for _ in range(dice.randint(4, 10))]
    print(f"{[tongue.name for tongue in tongues]}, {grace_s=}, {stream_upstream=}")
    print(*plan, sep="\n")

    async def played() -> None:
        keys = Keys(f"test-{secrets.token_hex(6)}")
        async with world(redis_server.url, keys, grace_s=grace_s, stream_upstream=stream_upstream) as made:
            play = Play(made, tongues)
            for step in plan:
                await play.step(step)
            await judged(made)

    asyncio.run(played())


# What must hold


async def judged(made: World) -> None:
    """The record against the engine's ledger and against what harnesses read."""
    await made.at_rest()
    records, samples = await made.records(), made.samples
    for record in records:
        print(f"record {record.seq} {record.completion_id} {record.incomplete=} {record.reply.get('content')!r}")
    for sample in samples:
        print(f"sample {sample.request_id} {sample.aborted=} {sample.delivered=} {len(sample.sampled_ids)} ids")
    for reading in made.readings:
        print(f"reading {reading.question.talk[-1][1]} {reading.status} {reading.whole=} {reading.text!r}")
    each_record_is_of_one_sample(records, samples)
    each_sample_is_recorded(records, samples, made)
    each_reading_is_recorded(records, made)
    none_is_sampled_twice(records, made)
    nothing_is_left(made, records)


def completion_of(sample: SampledCall) -> str:
    return sample.request_id.partition("-")[2]


def each_record_is_of_one_sample(records: list[Completion], samples: list[SampledCall]) -> None:
    assert len({record.seq for record in records}) == len(records)
    assert len({record.completion_id for record in records}) == len(records)
    for record in records:
        # A call that the engine took and dropped without a byte is sent once more: two samples, one of them delivered.
        found = [sample for sample in samples if completion_of(sample) == record.completion_id]
        if record.incomplete:
            ids = record.sampled_ids
            assert not ids or any(sample.sampled_ids[: len(ids)] == ids for sample in found)
            assert not record.trainable
            continue
        [sample] = [sample for sample in found if sample.delivered]
        assert not sample.aborted
        assert record.sampled_ids == sample.sampled_ids
        assert record.prompt_ids == list(sample.prompt_ids)
        assert record.logprobs == [pytest.approx(value) for value in sample.logprobs]
        assert record.finish_reason == sample.finish_reason
        assert record.trainable, record.untrainable


def each_sample_is_recorded(records: list[Completion], samples: list[SampledCall], made: World) -> None:
    recorded = {record.completion_id for record in records}
    for sample in samples:
        excused = sample.request_id in made.refused | made.cut_short
        if sample.delivered and not sample.aborted and not excused:
            assert completion_of(sample) in recorded, sample


def each_reading_is_recorded(records: list[Completion], made: World) -> None:
    texts = {str(record.reply.get("content")) for record in records if not record.incomplete}
    recorded = [(asked_in(record), str(record.reply.get("content") or "")) for record in records]
    reads: Counter[str] = Counter()
    before: dict[Question, set[str]] = {}
    for reading in made.readings:
        earlier = before.setdefault(reading.question, set())
        if reading.whole:
            assert reading.text in texts, reading
            assert not (reading.new and reading.text in earlier), f"answered with an old sample: {reading}"
            earlier.add(reading.text)
            reads[reading.text] += 1
        elif reading.text:
            asked = reading.question.talk[-1][1]
            shown = any(about == asked and text.startswith(reading.text) for about, text in recorded)
            assert shown or reading.question in made.untaken, reading
    replays = made.replays + made.proxy.counters.replays
    assert sum(count - 1 for count in reads.values()) <= replays


def none_is_sampled_twice(records: list[Completion], made: World) -> None:
    whole = Counter(asked_in(record) for record in records if not record.incomplete)
    for asked, known in made.asked.items():
        assert whole[asked.talk[-1][1]] <= known.calls, asked


def asked_in(record: Completion) -> str:
    """The last question of its prompt."""
    found = re.findall(r"question \d+\?", str(record.messages))
    assert found
    return str(found[-1])


def nothing_is_left(made: World, records: list[Completion]) -> None:
    proxy = made.proxy
    assert proxy.sessions.under_way() == []
    assert proxy.counters.in_flight == proxy.gate.in_flight == proxy.gate.waiting == 0
    assert [endpoint.in_flight for endpoint in proxy.fleet.endpoints] == [0]
    assert not made.engine.gate.running
    tokens = made.sampled_tokens + proxy.counters.sampled_tokens
    assert tokens == sum(len(record.sampled_ids) for record in records)
    # The first time that a question is asked, there is nothing to replay.
    assert made.replays + proxy.counters.replays <= made.requests - len(made.asked)
