"""SGLang's `POST /v1/completions`, for one prompt as text or ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from polarq.testing.inference.acting import Answer, ApiError, Spoiler, before_sampling
from polarq.testing.inference.completions import DEFAULT_MAX_TOKENS
from polarq.testing.inference.engine import ENGINE, Engine
from polarq.testing.inference.generation import Generation
from polarq.testing.inference.reading import read_body
from polarq.testing.inference.sglang import wire
from polarq.testing.inference.sglang.limits import room
from polarq.testing.inference.sglang.requests import SglangCompletionRequest
from polarq.testing.inference.wire import Json, Reply


async def completions(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    body = await read_body(request, SglangCompletionRequest)
    asker = await engine.asker(request, body, "cmpl")
    if len(body.prompts) != 1:
        raise ApiError(400, "the scripted server answers one prompt at a time", "BadRequestError", "prompt")
    [prompt] = body.prompts
    prompt_ids = engine.checked(prompt) if isinstance(prompt, list) else await engine.encoded_plain(prompt)
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    limits = engine.limits(body, room(engine, prompt_ids, wanted))
    selected = [engine.selected_for_ids(asker, prompt_ids, choice) for choice in range(body.n)]
    await engine.gate.running_again()
    fault = engine.selector.fault(selected[0])
    if (refusal := await before_sampling(request, fault, streamed=body.stream)) is not None:
        return refusal
    options = engine.options
    reply = Reply(
        id=asker.request_id.removeprefix("cmpl-"),
        model=body.model or "default",
        fingerprint="",
        prompt_ids=prompt_ids,
        tokenizer=engine.tokenizer,
        show_ids=bool(body.return_token_ids) and options.token_ids and options.since(0, 5, 17),
        logprobs=body.logprobs,
    )
    generations: list[Generation] = []
    with engine.answering(generations):
        for choice, turn in enumerate(selected):
            generations.append(engine.start(asker, turn, prompt_ids, limits, choice=choice, fault=fault))
        work = _Work(engine, body, reply, Answer(request, fault, wire.stream_error), Spoiler(fault))
        return await (work.streamed(generations) if body.stream else work.unary(generations))


@dataclass
class _Work:
    """One request on its way to an answer."""

    engine: Engine
    body: SglangCompletionRequest
    reply: Reply
    answer: Answer
    spoil: Spoiler

    async def unary(self, generations: Sequence[Generation]) -> web.StreamResponse:
        await self.answer.sampled(generations)
        payload = {
            **self.reply.head("text_completion"),
            "choices": [self._choice(generation, range(generation.count)) for generation in generations],
            "usage": self._usage(generations),
            "metadata": wire.metadata(self.engine.options, generations[0]),
        }
        return await self.answer.unary(self.spoil(payload))

    async def streamed(self, generations: Sequence[Generation]) -> web.StreamResponse:
        await self.answer.open_stream()
        live = list(generations)
        while live:
            for generation in list(live):
                if await self.answer.ended_after(sum(g.count for g in generations)):
                    return self.answer.response
                start = generation.count
                await generation.advance(self.body.stream_interval if start else 1)
                if generation.call.finish_reason is not None:
                    live.remove(generation)
                await self._send([self._choice(generation, range(start, generation.count))], usage=None)
        if self.body.include_usage:
            await self._send([], usage=self._usage(generations))
        return await self.answer.done()

    def _choice(self, generation: Generation, indexes: range) -> Json:
        sample = generation.sample
        ended = generation.call.finish_reason is not None
        end = wire.finish(generation) if ended else {}
        choice: Json = {
            "index": generation.call.choice_index,
            "text": "".join(sample.pieces[indexes.start : indexes.stop]),
            "logprobs": wire.completion_logprobs(self.reply, generation, indexes),
            "finish_reason": end.get("type"),
            "matched_stop": end.get("matched"),
        }
        if self.reply.show_ids:
            choice["token_ids"] = [sample.token_ids[at] for at in indexes]
            if indexes.start == 0:
                choice["prompt_token_ids"] = list(self.reply.prompt_ids)
        return choice

    def _usage(self, generations: Sequence[Generation]) -> Json:
        return wire.usage(len(self.reply.prompt_ids), sum(generation.count for generation in generations))

    async def _send(self, choices: list[Json], usage: Json | None) -> None:
        payload = {**self.reply.head("text_completion"), "choices": choices, "usage": usage}
        await self.answer.event(self.spoil(payload))
