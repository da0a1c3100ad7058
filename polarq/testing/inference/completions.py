"""`POST /v1/completions`: prompts as text or token ids, answers without parsing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from polarq.testing.inference import wire
from polarq.testing.inference.acting import Answer, ApiError, Spoiler, before_sampling
from polarq.testing.inference.engine import ENGINE, Asker, Engine
from polarq.testing.inference.generation import Generation
from polarq.testing.inference.reading import read_body
from polarq.testing.inference.requests import CompletionRequest
from polarq.testing.inference.wire import Reply

DEFAULT_MAX_TOKENS = 16
"""What /v1/completions samples when the request gives no limit."""


async def completions(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    body = await read_body(request, CompletionRequest)
    asker = await engine.asker(request, body, "cmpl")
    prompts = [engine.checked(p) if isinstance(p, list) else await engine.encoded_plain(p) for p in body.prompts]
    if not prompts or not all(prompts):
        raise ApiError(400, "the prompt is empty", "BadRequestError", "prompt")
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    limits = [engine.limits(body, engine.room(prompt_ids, wanted)) for prompt_ids in prompts]
    selected = [[engine.selected_for_ids(asker, ids, choice) for choice in range(body.n)] for ids in prompts]
    await engine.admit()
    fault = engine.selector.fault(selected[0][0])
    if (refusal := await before_sampling(request, fault, streamed=body.stream)) is not None:
        return refusal
    work = _Work(body, sum(map(len, prompts)), Answer(request, fault), Spoiler(fault), [])
    generations: list[Generation] = []
    with engine.answering(generations):
        for ids, limit, turns in zip(prompts, limits, selected, strict=True):
            reply = _reply(engine, body, asker, ids)
            for choice, turn in enumerate(turns):
                started = engine.start(asker, turn, ids, limit, choice=choice, fault=fault)
                generations.append(started)
                work.choices.append(_Choice(len(work.choices), reply, started))
        return await (work.streamed() if body.stream else work.unary())


@dataclass(frozen=True)
class _Choice:
    index: int
    reply: Reply
    generation: Generation


def _reply(engine: Engine, body: CompletionRequest, asker: Asker, prompt_ids: Sequence[int]) -> Reply:
    return Reply(
        id=asker.request_id,
        model=engine.options.served_model_name,
        fingerprint=engine.options.fingerprint,
        prompt_ids=prompt_ids,
        tokenizer=engine.tokenizer,
        show_ids=bool(body.return_token_ids) and engine.options.token_ids,
        show_versions=bool(body.return_weight_versions) and engine.options.since(0, 33),
        as_token_ids=bool(body.return_tokens_as_token_ids),
        logprobs=body.logprobs,
        prompt_logprobs=engine.prompt_logprobs(body),
    )


@dataclass
class _Work:
    """One request on its way to an answer."""

    body: CompletionRequest
    prompt_tokens: int
    answer: Answer
    spoil: Spoiler
    choices: list[_Choice]

    @property
    def sampled(self) -> int:
        return sum(choice.generation.count for choice in self.choices)

    async def unary(self) -> web.StreamResponse:
        await self.answer.sampled(choice.generation for choice in self.choices)
        shown = [wire.completion_choice(choice.reply, choice.generation, choice.index) for choice in self.choices]
        usage = wire.completion_usage(self.prompt_tokens, self.sampled, streamed=False)
        return await self.answer.unary(self.spoil(wire.completion(self.choices[0].reply, shown, usage)))

    async def streamed(self) -> web.StreamResponse:
        await self.answer.open_stream()
        live = list(self.choices)
        while live:
            for choice in list(live):
                if await self.answer.ended_after(self.sampled):
                    return self.answer.response
                generation, start = choice.generation, choice.generation.count
                await generation.advance(self.body.stream_interval if start else 1)
                chunk = wire.completion_chunk(choice.reply, generation, choice.index, range(start, generation.count))
                if generation.call.finish_reason is not None:
                    live.remove(choice)
                    if not live and not self.body.include_usage:
                        chunk["system_fingerprint"] = choice.reply.fingerprint
                await self.answer.event(self.spoil(chunk))
        if self.body.include_usage:
            usage = wire.completion_usage(self.prompt_tokens, self.sampled, streamed=True)
            await self.answer.event(self.spoil(wire.usage_chunk(self.choices[0].reply, "text_completion", usage)))
        return await self.answer.done()
