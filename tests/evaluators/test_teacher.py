"""What a teacher's server answers: log-probabilities of the very tokens, or one line that says why there are none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from polarq.errors import EvaluatorFault
from polarq_worker.evaluators.asking import MAX_ANSWER_BYTES
from polarq_worker.evaluators.teacher import BYTES_PER_ID
from tests.evaluators.conftest import Bench
from tests.evaluators.test_self_distillation import Engine, distilled, of
from tests.evaluators.traces import trace


def entries(values: list[Any], ids: list[int], engine: Engine) -> dict[str, Any]:
    """An engine's answer; `values` belong to the last ids."""
    pairs = list(zip(values, ids[-len(values) :], strict=True))
    if engine == "sglang":
        first = [None, ids[-len(values) - 1], None]
        return {"meta_info": {"input_token_logprobs": [first, *([v, i, None] for v, i in pairs)]}}
    before = [None] * (len(ids) - len(values))
    return {"choices": [{"prompt_logprobs": [*before, *({str(i): {"logprob": v}} for v, i in pairs)]}]}


IDS = [1, 2, 3, 4]
BROKEN: dict[str, Any] = {
    "a value for what it does not know": entries([-0.5, -9999.0], IDS, "vllm"),
    "NaN": entries([-0.5, float("nan")], IDS, "vllm"),
    "infinite": entries([-0.5, float("inf")], IDS, "vllm"),
    "no number": entries([-0.5, None], IDS, "vllm"),
    "of another token": entries([-0.5, -0.5], [1, 2, 3, 5], "vllm"),
    "too few": {"choices": [{"prompt_logprobs": [None, None, {"3": {"logprob": -0.5}}]}]},
    "none, as of an old server": {"choices": [{"text": "x"}]},
    "other ids": {"choices": [{**entries([-0.5, -0.5], IDS, "vllm")["choices"][0], "prompt_token_ids": [1, 2, 3, 5]}]},
    "nothing": {},
    "a text for a choice": {"choices": ["x"]},
    "too long": {**entries([-0.25, -0.5], IDS, "vllm"), "x": "y" * (MAX_ANSWER_BYTES + 4 * BYTES_PER_ID)},
    "sglang: NaN": entries([-0.5, float("nan")], IDS, "sglang"),
    "sglang: of another token": entries([-0.5, -0.5], [1, 2, 3, 5], "sglang"),
    "sglang: too few": entries([-0.5], IDS, "sglang"),
    "sglang: nothing": {"meta_info": {}},
    "sglang: no pairs": {"meta_info": {"input_token_logprobs": [None, "xy", 3]}},
    "sglang: half a pair": {"meta_info": {"input_token_logprobs": [[-0.5, 2], [-0.25], [-0.5, 4]]}},
}


MODELS = {"data": [{"id": "m", "max_model_len": 100}]}
SMALL = trace(0, {"role": "assistant", "content": "x"}, prompt_ids=[1, 2], response_ids=[3, 4])


@asynccontextmanager
async def answering(bench: Bench, scores: Any, engine: Engine = "vllm", models: Any = MODELS) -> AsyncIterator[None]:
    """A teacher that answers so whatever it is asked, in `bench`."""

    async def answer(request: web.Request) -> web.Response:
        found = models if request.path == "/v1/models" else scores
        return web.Response(text=json.dumps(found), content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await bench.start(distilled(teacher_base_url=url, teacher_engine=engine))
        bench.trajectory = of(SMALL)
        yield
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
async def test_what_is_no_log_probability_of_the_very_token_is_none(answer: Any, bench: Bench) -> None:
    engine: Engine = "sglang" if "meta_info" in answer else "vllm"
    async with answering(bench, answer, engine):
        with pytest.raises(EvaluatorFault, match="the teacher"):
            await bench.verdict()


@pytest.mark.parametrize("more", [{}, {"x": "y" * MAX_ANSWER_BYTES}], ids=["as it should be", "as long as it may be"])
async def test_log_probabilities_of_the_very_tokens_are_the_target(more: dict[str, str], bench: Bench) -> None:
    async with answering(bench, {**entries([-0.25, -0.5], IDS, "vllm"), **more}):
        assert (await bench.verdict()).teacher_logprobs == [[-0.25, -0.5]]


@pytest.mark.parametrize(("context", "target"), [(5, [-0.25, -0.5]), (4, None)])
async def test_a_teacher_reads_one_token_less_than_its_context(context: int, target: Any, bench: Bench) -> None:
    models = {"data": [{"id": "m", "max_model_len": context}]}
    async with answering(bench, entries([-0.25, -0.5], IDS, "vllm"), models=models):
        reward = await bench.verdict()
    assert (reward.outcome, reward.teacher_logprobs) == (1.0, [target])
    assert ("left_out" in reward.report["teacher"]) is (target is None)


@pytest.mark.parametrize("models", [{}, {"data": 1}, {"data": ["id", {}, {"id": 1}, {"id": None}]}])
async def test_a_server_that_lists_no_models_serves_none(models: Any, bench: Bench) -> None:
    async with answering(bench, entries([-0.25, -0.5], IDS, "vllm"), models=models):
        with pytest.raises(EvaluatorFault, match="serves no model, and none is named"):
            await bench.verdict()
