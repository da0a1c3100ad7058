"""New weights in a real vLLM: every token is attributed to the weights that sampled it, or honestly to none.

The other weights are a model of the same shape with another seed, so that a token of one is nowhere near as likely
under the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from redis.asyncio import Redis

from polarq.client import AsyncClient
from polarq.contracts.completion import Completion, CompletionLabel
from polarq.contracts.trajectory import Trace
from polarq.ledger.keys import Keys
from polarq.testing.tiny_model import TinyModel, make_tiny_model
from tests.pauses import clear_pause, set_pause

from .chat import Answer, ask, says
from .conftest import Note
from .proxied import ProxyOnEngine, Session, proxy_on
from .reference import ReferenceModel
from .server import TOLERANCE, Server
from .test_proxy_records import EVENTUALLY_S, read, until
from .test_rollout import EngineStack, calculator_task, run, trajectory_of

T = TypeVar("T")
OLD, NEW = "step-1", "step-2"
LONG = 1500
"""Tokens of an answer in whose middle the weights change."""
COMPARED = 2000
"""A forward pass over more takes much memory."""
SOME = 20
"""Tokens after which a call is surely under way."""
CALLS = 14
TRIES = 5
HARNESS = f"""python3 - <<'PY'
import json, os, urllib.request

for turn in range({CALLS}):
    body = json.dumps({{"model": "m", "max_tokens": 64, "temperature": 1.0, "ignore_eos": True, "stream": turn % 2 == 1,
        "messages": [{{"role": "user", "content": "Step %d." % turn}}]}})
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(),
        {{"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}})
    urllib.request.urlopen(request).read()
PY
"""


@pytest.fixture(autouse=True)
def vllm_here(engine: Server) -> None:
    """Other weights are put into the server, from a folder that it must see."""
    if engine.engine != "vllm" or not engine.base_url.startswith("http://127.0.0.1:") or engine.checkpoint is None:
        engine.lacks("this changes the weights of a vLLM on this machine that serves the tiny model")


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other-model"), TinyModel(seed=1))


@pytest.fixture(scope="module")
def other(other_dir: Path) -> ReferenceModel:
    return ReferenceModel(other_dir)


def swap(engine: Server, weights: Path, version: str) -> None:
    """As a trainer does it: what is being sampled stands still meanwhile, and goes on with the new weights."""
    engine.hold()
    try:
        load(engine, weights, version)
    finally:
        engine.release()


def load(engine: Server, weights: Path, version: str) -> None:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    engine.control("/collective_rpc", reload)
    engine.control("/reset_prefix_cache")
    engine.control("/update_weight_version", {"new_version": version})


@pytest.fixture
def swappable(engine: Server, other_dir: Path) -> Iterator[Server]:
    """The server under the old weights' name; they are back at the end, whatever happened."""
    assert engine.checkpoint is not None
    before = engine.weight_version()
    engine.set_weight_version(OLD)
    try:
        yield engine
    finally:
        engine.release()
        load(engine, engine.checkpoint, before)


@pytest.fixture
async def proxy(swappable: Server, redis_client: Redis, keys: Keys) -> AsyncIterator[ProxyOnEngine]:
    async with proxy_on(swappable, redis_client, keys, retry_grace_s=0.2) as running:
        yield running


def differences(model: ReferenceModel, call: Completion | Trace) -> list[float]:
    """Of each token's log-probability from the forward pass of `model`; of the first ones, where there are many."""
    sampled = (call.sampled_ids if isinstance(call, Completion) else call.response_ids)[:COMPARED]
    assert len(call.logprobs) >= len(sampled)
    expected = model.log_probs(call.prompt_ids, sampled)
    given = call.logprobs[: len(sampled)]
    return [abs(a - b) if a is not None else 99.0 for a, b in zip(given, expected, strict=True)]


async def test_weights_that_change_in_the_middle_of_a_call_leave_it_to_no_version(
    swappable: Server, proxy: ProxyOnEngine, reference: ReferenceModel, other: ReferenceModel, other_dir: Path,
    note: Note,
) -> None:  # fmt: skip
    """The tokens before the change are the old weights', those after it the new ones': this vLLM's chat does not say
    where one ends, so the record says that it is not known."""

    async def begun() -> tuple[Session, asyncio.Task[str]]:
        session = await proxy.session()
        return session, asyncio.create_task(endless(session, LONG, [], streamed=True))

    async with swappable.standing_still():
        session, asking = await caught(swappable, begun, 1)
        await asyncio.to_thread(load, swappable, other_dir, NEW)
    assert (await asking).rstrip().endswith("data: [DONE]")
    [completion] = await session.recorded()
    assert len(completion.sampled_ids) == LONG
    assert completion.untrainable == f"the policy version changed during the call (from {OLD} to {NEW})"
    assert not completion.trainable
    assert completion.weight_versions == []
    old, new = differences(reference, completion), differences(other, completion)
    changed = next(place for place, difference in enumerate(old) if difference > TOLERANCE)
    largest = max(old[:changed] + new[changed:])
    note(f"weights changed after {changed} of {LONG} ids: the old model explains those before, the new one those after,"
         f" within {largest:.1e}")  # fmt: skip
    assert 0 < changed < LONG
    assert largest < TOLERANCE


async def test_calls_around_a_drained_pause_belong_to_the_weights_before_or_after_it(
    swappable: Server, reference: ReferenceModel, other: ReferenceModel, other_dir: Path, tmp_path: Path, note: Note
) -> None:
    agent = {"harness": "shell", "custom_shell": {"command": HARNESS}}
    answered = swappable.answered_requests()
    with EngineStack(tmp_path, swappable) as stack:
        async with AsyncClient(stack.topology, stack.settings) as client:
            running = asyncio.create_task(
                asyncio.to_thread(run, stack, calculator_task("swapped", agent, num_samples=2))
            )
            await until(lambda: read(lambda: swappable.answered_requests() >= answered + 6 or None))
            state = await client.pause_inference()
            assert (state.paused, state.in_flight) == (True, 0)
            assert await read(swappable.running_requests) == 0
            await asyncio.to_thread(swap, swappable, other_dir, NEW)
            assert await client.resume_inference()
            result = await running
    trajectories = [trajectory_of(rollout) for rollout in result.results]
    for trajectory in trajectories:
        assert trajectory.fidelity.untrainable == {}
        assert trajectory.fidelity.calls == len(trajectory.traces) == CALLS
        assert trajectory.fidelity.versions in ([OLD, NEW], [OLD], [NEW])
        assert trajectory.fidelity.trainable_tokens == trajectory.fidelity.sampled_tokens == 64 * CALLS
    models = {OLD: reference, NEW: other}
    largest, calls = 0.0, {OLD: 0, NEW: 0}
    for trace in (trace for trajectory in trajectories for trace in trajectory.traces):
        [span] = trace.weight_versions
        assert (span.start, span.end) == (0, 64)
        largest = max(largest, *differences(models[span.version], trace))
        calls[span.version] += 1
    assert min(calls.values()) > 0
    note(f"swap in a drained pause: {calls[OLD]} calls before, {calls[NEW]} after, none mixed or lost, largest "
         f"difference from their own model {largest:.1e}")  # fmt: skip
    assert largest < TOLERANCE


async def some_sampled(engine: Server, before: float) -> None:
    """A little at a time. A server that samples without a stop may answer nothing else for long on a busy machine."""
    async with asyncio.timeout(EVENTUALLY_S):
        while await read(engine.sampled_tokens) < before + SOME:
            await asyncio.to_thread(engine.release)
            await asyncio.to_thread(engine.hold)


async def caught(engine: Server, ask_all: Callable[[], Awaitable[T]], calls: int) -> T:
    """What `ask_all` began, with all its calls in the middle. On a machine so busy that the server hears of its pause
    only when they have ended, they are asked once more."""
    for _ in range(16):
        before = await read(engine.sampled_tokens)
        begun = await ask_all()
        await some_sampled(engine, before)
        if await read(engine.running_requests) == calls:
            return begun
    raise AssertionError(f"{calls} calls of {LONG} tokens were never found in the middle")


async def heard_some(heard: list[str]) -> bool | None:
    """More than the stream's beginning. What the engine sends at once, the proxy passes on as one event."""
    return "".join(heard).count("data: {") > 1 or None


async def held_back(proxy: ProxyOnEngine, calls: int) -> bool | None:
    """Nothing is in flight, and so many calls wait for the pause's end."""
    return (proxy.proxy.gate.in_flight, proxy.proxy.gate.waiting) == (0, calls) or None


async def idle(engine: Server) -> bool | None:
    """The server's gauge is written when something is sampled, so that a token is sampled first."""
    await ask(engine.chat_url, {"model": engine.model, **says("Hello.", max_tokens=1)})
    return await read(engine.running_requests) == 0 or None


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
async def test_a_harness_that_does_not_come_back_frees_the_engine(
    swappable: Server, proxy: ProxyOnEngine, reference: ReferenceModel, streamed: bool, note: Note
) -> None:
    session = await proxy.session()
    before = await read(swappable.sampled_tokens)
    asked_for = swappable.context - 500
    heard: list[str] = []
    async with swappable.standing_still():
        asking = asyncio.create_task(endless(session, asked_for, heard, streamed=streamed))
        await some_sampled(swappable, before)
        if streamed:
            await until(lambda: heard_some(heard))
        asking.cancel()
        await asyncio.wait({asking})
        await until(session.recorded)  # the proxy has waited for a repeat, and given up
    await until(lambda: idle(swappable))
    sampled = await read(swappable.sampled_tokens) - before
    [completion] = await session.recorded()
    assert (completion.label, completion.incomplete, completion.trainable) == (CompletionLabel.ABORTED, True, False)
    assert sampled < asked_for
    if streamed:
        assert max(differences(reference, completion)) < TOLERANCE
    kept = len(completion.sampled_ids)
    assert (kept > 0) is streamed  # a whole answer that never came gave nothing
    note(f"harness gone ({'streamed' if streamed else 'unary'}): {kept} ids kept of {sampled:.0f} sampled, engine idle")


async def test_a_call_that_a_pause_cuts_goes_on_with_the_new_weights_and_each_id_has_its_version(
    swappable: Server, proxy: ProxyOnEngine, reference: ReferenceModel, other: ReferenceModel, other_dir: Path,
    redis_client: Redis, keys: Keys, note: Note,
) -> None:  # fmt: skip
    """Of a stream the ids are there, and sampling goes on from them. Of a whole answer the engine has said nothing
    yet, so that it is sampled anew.

    What a random model samples may be no text where it is cut (half a character): what was shown of it is then no
    beginning of the whole, and the harness is told to ask again, which is not what is looked at here.
    """
    heard: list[str] = []

    async def begun() -> tuple[Session, Session, asyncio.Task[str], asyncio.Task[Answer]]:
        heard.clear()
        streaming, whole = await proxy.session(), await proxy.session()
        watching = asyncio.create_task(endless(streaming, LONG, heard, streamed=True))
        body = says("Go.", max_tokens=LONG, temperature=1.0, ignore_eos=True)
        return streaming, whole, watching, asyncio.create_task(whole.ask(body))

    async def cut_by_a_pause() -> tuple[Session, Session, str, Answer]:
        async with swappable.standing_still():
            read_on, unread, watching, waiting = await caught(swappable, begun, 2)
            await until(lambda: heard_some(heard))
            await set_pause(redis_client, keys, lease_s=600.0, mode="abort")
            await until(lambda: held_back(proxy, 2))
        await until(lambda: idle(swappable))
        assert not watching.done()
        assert not waiting.done()
        await asyncio.to_thread(swap, swappable, other_dir, NEW)
        await clear_pause(redis_client, keys)
        return read_on, unread, (await watching).rstrip(), await waiting

    for _ in range(TRIES):
        read_on, unread, said, whole = await cut_by_a_pause()
        if '"code":"aborted"' not in said:
            break
        assert swappable.checkpoint is not None
        await asyncio.to_thread(swap, swappable, swappable.checkpoint, OLD)
    assert said.endswith("data: [DONE]")
    assert whole.usage["completion_tokens"] == LONG

    [continued] = await read_on.recorded()
    assert (continued.trainable, continued.untrainable, len(continued.sampled_ids)) == (True, None, LONG)
    first, second = continued.weight_versions
    at = first.end
    assert (first.version, first.start, second.version, second.start, second.end) == (OLD, 0, NEW, at, LONG)
    old, new = differences(reference, continued), differences(other, continued)
    largest = max(old[:at] + new[at:])
    assert largest < TOLERANCE
    assert min(max(old[at:]), max(new[:at])) > 0.1  # the other way round they are told apart

    [anew] = await unread.recorded()
    assert (anew.seq, anew.retry_of, anew.trainable, len(anew.sampled_ids)) == (0, None, True, LONG)
    assert [span.version for span in anew.weight_versions] == [NEW]
    assert max(differences(other, anew)) < TOLERANCE
    note(f"aborting pause: engine idle; the stream went on after {at} of {LONG} ids with other weights, each id within "
         f"{largest:.1e} of its own model; the whole answer was sampled anew")  # fmt: skip


async def endless(session: Session, max_tokens: int, heard: list[str], *, streamed: bool) -> str:
    """Everything that the harness is sent until it ends; `heard` has what came so far."""
    body = says("Go on.", max_tokens=max_tokens, temperature=1.0, ignore_eos=True, stream=streamed, model="m")
    async with (
        httpx.AsyncClient(timeout=300) as client,
        client.stream("POST", f"{session.base_url}/chat/completions", json=body) as response,
    ):
        async for text in response.aiter_text():
            heard.append(text)  # noqa: PERF401 - it is read meanwhile
    return "".join(heard)
