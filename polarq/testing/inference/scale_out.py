"""vLLM's tokens in, tokens out: `/inference/v1/generate`, and what renders for it and parses after it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from polarq.testing.inference import wire
from polarq.testing.inference.acting import Answer, ApiError, before_sampling
from polarq.testing.inference.engine import ENGINE, Engine
from polarq.testing.inference.faults import Abort, Fault
from polarq.testing.inference.generation import Generation
from polarq.testing.inference.images import features_of
from polarq.testing.inference.parsing import parse
from polarq.testing.inference.reading import read_body
from polarq.testing.inference.requests import ChatRequest, SamplingRequest, StreamOptions
from polarq.testing.inference.sampling import Limits, Sample, sample
from polarq.testing.inference.wire import Json, Reply, dumps

_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
"""Of a chat request's parameters those that render shows and this server needs for nothing."""


class SamplingParams(BaseModel):
    """`sampling_params` of a generate request. Lengths in tokens."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)


class GenerateRequest(BaseModel):
    """`POST /inference/v1/generate`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    token_ids: list[Any]
    sampling_params: SamplingParams = SamplingParams()
    model: str | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    session_id: str | None = None
    reasoning_ended: bool | None = None
    user: str | None = None

    @property
    def plain(self) -> SamplingRequest:
        """The part that every kind of request has."""
        chosen = self.sampling_params.model_dump(exclude={"logprobs"})
        return SamplingRequest(model=self.model, session_id=self.session_id, user=self.user, **chosen)


class DerenderRequest(BaseModel):
    """`POST /v1/chat/completions/derender`: what generate answered, and the chat that it answers."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    generate_response: dict[str, Any]
    chat_request: ChatRequest
    prompt_tokens: int | None = None
    prompt_token_ids: list[int] | None = None


def _opened(request: web.Request) -> Engine:
    """The engine. Raises `ApiError` where the server was started without these routes."""
    engine = request.app[ENGINE]
    if engine.options.since(0, 30) and not engine.options.scale_out:
        raise ApiError(403, "This endpoint needs --enable-scale-out.", "PermissionDeniedError")
    return engine


async def render_chat(request: web.Request) -> web.Response:
    """A chat request as a complete generate request; only `return_token_ids` is lost."""
    engine = _opened(request)
    body = await read_body(request, ChatRequest)
    asker = await engine.asker(request, body, "chatcmpl")
    token_ids, _ = await engine.prompt_of(body)
    asked = json.loads(await request.read())
    features = features_of(token_ids, asker.images, engine.tokenizer.image_token_id)
    params: Json = {
        **{name: asked[name] for name in _PASSED_ON if asked.get(name) is not None},
        "n": body.n,
        "max_tokens": engine.room(token_ids, body.limit),
        "stop": list(body.stops),
        "stop_token_ids": body.stop_token_ids or [],
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    generate: Json = {
        "request_id": asker.request_id,
        "token_ids": token_ids,
        "features": features,
        "sampling_params": params,
        "model": engine.options.served_model_name,
        "reasoning_ended": not body.thinking,
        "reasoning_parser_kwargs": {"chat_template_kwargs": body.chat_template_kwargs or {}},
        "stream": body.stream,
        "stream_options": {"include_usage": body.include_usage} if body.stream else None,
        "cache_salt": None,
        "priority": 0,
    }
    return web.Response(body=dumps(generate), content_type="application/json")


async def generate(request: web.Request) -> web.StreamResponse:
    engine = _opened(request)
    body = await read_body(request, GenerateRequest)
    plain = body.plain
    asker = await engine.asker(request, plain, "generate-tokens")
    prompt_ids = engine.checked(body.token_ids)
    limits = engine.limits(plain, engine.room(prompt_ids, plain.max_tokens))
    opened, begun = _taken_apart(engine, prompt_ids)
    selected = [engine.selected_for_ids(asker, opened, choice) for choice in range(plain.n)]
    await engine.admit()
    fault = engine.selector.fault(selected[0])
    if (refusal := await before_sampling(request, fault, streamed=body.stream)) is not None:
        return refusal
    reply = Reply(
        id=asker.request_id,
        model=engine.options.served_model_name,
        fingerprint=engine.options.fingerprint,
        prompt_ids=prompt_ids,
        tokenizer=engine.tokenizer,
        show_ids=body.return_token_ids,
        logprobs=body.sampling_params.logprobs,
    )
    generations: list[Generation] = []
    with engine.answering(generations):
        for choice, turn in enumerate(selected):
            thinking = not body.reasoning_ended
            generation = engine.start(asker, turn, prompt_ids, limits, choice=choice, thinking=thinking, fault=fault)
            generations.append(generation)
            if begun:
                text = turn.text(thinking=thinking)
                generation.sample = _rest_of(engine, opened, begun, text, limits, fault) or generation.sample
        work = _Work(engine, body, reply, Answer(request, fault))
        return await (work.streamed(generations) if body.stream else work.unary(generations))


def _taken_apart(engine: Engine, prompt_ids: list[int]) -> tuple[list[int], list[int]]:
    """(the prompt up to where its last answer opens, what is there of that answer already)."""
    opening, turn_end = engine.tokenizer.assistant_opening, engine.tokenizer.turn_end_id
    for at in range(len(prompt_ids) - len(opening), -1, -1):
        if prompt_ids[at] == turn_end:
            break
        if prompt_ids[at : at + len(opening)] == opening:
            return prompt_ids[: at + len(opening)], prompt_ids[at + len(opening) :]
    return prompt_ids, []


def _rest_of(
    engine: Engine, opened: list[int], begun: list[int], text: str, limits: Limits, fault: Fault | None
) -> Sample | None:
    """The sample of the whole turn, without its beginning; None when the turn begins otherwise."""
    options, count = engine.options, len(begun)
    drift_seed = options.scenario.drift_seed if options.drift_seed is None else options.drift_seed
    whole = sample(
        engine.tokenizer,
        opened,
        text,
        replace(limits, max_tokens=limits.max_tokens + count),
        drift_seed=drift_seed,
    )
    if list(whole.token_ids[:count]) != begun or len(whole.token_ids) == count:
        return None
    rest = replace(
        whole,
        token_ids=whole.token_ids[count:],
        logprobs=whole.logprobs[count:],
        token_texts=whole.token_texts[count:],
        pieces=whole.pieces[count:],
    )
    return rest.cut(fault.after_tokens, "abort") if isinstance(fault, Abort) else rest


@dataclass
class _Work:
    """One generate request on its way to an answer."""

    engine: Engine
    body: GenerateRequest
    reply: Reply
    answer: Answer

    async def unary(self, generations: Sequence[Generation]) -> web.StreamResponse:
        await self.answer.sampled(generations)
        choices = [self._choice(generation, range(generation.count), ended=True) for generation in generations]
        return await self.answer.unary(self._head(choices, first=True) | {"usage": self._usage(generations)})

    async def streamed(self, generations: Sequence[Generation]) -> web.StreamResponse:
        await self.answer.open_stream()
        live, first = list(generations), True
        while live:
            for generation in list(live):
                if await self.answer.ended_after(sum(g.count for g in generations)):
                    return self.answer.response
                start = generation.count
                await generation.advance()
                ended = generation.call.finish_reason is not None
                if ended:
                    live.remove(generation)
                choice = self._choice(generation, range(start, generation.count), ended=ended)
                await self.answer.event(self._head([choice], first=first))
                first = False
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            await self.answer.event(self._head([], first=False) | {"usage": self._usage(generations)})
        return await self.answer.done()

    def _head(self, choices: list[Json], *, first: bool) -> Json:
        shown = list(self.reply.prompt_ids) if self.reply.show_ids and first else None
        return {
            "request_id": self.reply.id,
            "model": self.reply.model,
            "created": self.reply.created,
            "choices": choices,
            "prompt_token_ids": shown,
            "mm_placeholders": None,
            "output_mode": "tokens",
        }

    def _usage(self, generations: Sequence[Generation]) -> Json:
        sampled = sum(len(generation.sample.token_ids) for generation in generations)
        return wire.chat_usage(self.reply, sampled, 0, streamed=self.body.stream)

    def _choice(self, generation: Generation, indexes: range, *, ended: bool) -> Json:
        sample = generation.sample
        choice: Json = {
            "index": generation.call.choice_index,
            "finish_reason": sample.finish_reason if ended else None,
            "stop_reason": sample.stop_reason if ended else None,
            "token_ids": [sample.token_ids[at] for at in indexes],
            "logprobs": wire.generate_logprobs(self.reply, generation, indexes),
            "routed_experts": None,
            "sampling_mask": None,
        }
        if self.engine.options.since(0, 32):
            choice["weight_versions"] = generation.weight_version_spans if ended else None
        return choice


async def derender_chat(request: web.Request) -> web.Response:
    """A generate answer as the chat completion that the parsers make of it."""
    engine = _opened(request)
    if not engine.options.since(0, 24):
        raise web.HTTPNotFound
    body = await read_body(request, DerenderRequest)
    given = body.generate_response
    reply = Reply(
        id=str(given.get("request_id") or "chatcmpl-derendered"),
        model=engine.options.served_model_name,
        fingerprint=engine.options.fingerprint,
        prompt_ids=body.prompt_token_ids or given.get("prompt_token_ids") or [],
        tokenizer=engine.tokenizer,
        show_ids=bool(body.chat_request.return_token_ids),
    )
    choices = [_derendered(engine, reply, body.chat_request, choice) for choice in given.get("choices") or []]
    if not choices:
        raise ApiError(400, "'generate_response' holds no choices", "BadRequestError", "generate_response")
    usage = given.get("usage") or wire.chat_usage(reply, 0, 0, streamed=False)
    return web.Response(body=dumps(wire.chat_completion(reply, choices, usage)), content_type="application/json")


def _derendered(engine: Engine, reply: Reply, chat: ChatRequest, choice: Json) -> Json:
    ids = engine.checked(choice.get("token_ids") or [])
    shown = [token_id for token_id in ids if token_id not in engine.tokenizer.special_ids]
    text = engine.tokenizer.decode(shown)
    stop = choice.get("stop_reason")
    if isinstance(stop, str) and stop in text:
        text = text[: text.rindex(stop)]
    message = parse(text, tools=chat.wants_tools)
    reason = choice.get("finish_reason")
    content = (choice.get("logprobs") or {}).get("content") or []
    said = wire.chat_message(reply, choice.get("index", 0), message)
    for call in said.get("tool_calls", ()):
        call["id"] = f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"  # made anew each time, as the real one does
    texts = engine.tokenizer.pieces(ids)
    entries = [
        {"token": token, "logprob": entry["logprob"], "bytes": list(token.encode()), "top_logprobs": []}
        for token, entry in zip(texts, content, strict=False)
    ]
    return {
        "index": choice.get("index", 0),
        "message": said,
        "logprobs": {"content": entries} if chat.logprobs else None,
        "finish_reason": "tool_calls" if message.tool_calls and reason == "stop" else reason,
        "stop_reason": stop,
        "token_ids": ids if reply.show_ids else None,
        "routed_experts": None,
    }
