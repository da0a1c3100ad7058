"""A teacher that reads what the student read says what the student's sampling said, on a real engine."""

from __future__ import annotations

import time
from contextlib import aclosing

from polarq_worker.evaluators.asking import Asking, Tally
from polarq_worker.evaluators.base import EngineAddress
from polarq_worker.evaluators.teacher import TEACHERS, with_message

from .chat import ASK_FOR_TOKENS, ask, says
from .conftest import Note
from .reference import Forward, largest_difference
from .server import Server


async def test_without_feedback_it_agrees_with_what_was_recorded_and_with_feedback_with_a_forward_pass(
    engine: Server, forward: Forward, note: Note
) -> None:
    body = {"model": engine.model, **says("Look at the code.", max_tokens=32, temperature=1.0, seed=5)}
    answer = await ask(engine.chat_url, {**body, **ASK_FOR_TOKENS})
    calls = Asking("it", key=None, call_timeout_s=120, retries=0, deadline=time.monotonic() + 240, tally=Tally())
    async with aclosing(calls):
        teacher = TEACHERS[engine.engine](EngineAddress(engine.engine, engine.base_url), calls)
        await teacher.look()
        plain = list(range(len(answer.prompt_ids), len(answer.prompt_ids) + len(answer.sampled_ids)))
        scored = await teacher.score([*answer.prompt_ids, *answer.sampled_ids], plain)
        told = with_message(answer.prompt_ids, await teacher.message("Use + and not -."))
        moved = [at + len(told) - len(answer.prompt_ids) for at in plain]
        advised = await teacher.score([*told, *answer.sampled_ids], moved)
    difference = largest_difference(answer.logprobs, scored)
    note(f"teacher without feedback: {len(scored)} log-probabilities, largest difference {difference:.1e}")
    assert difference < forward.tolerance
    assert forward.difference(told, answer.sampled_ids, advised) < forward.tolerance
    assert largest_difference(advised, scored) > forward.tolerance
