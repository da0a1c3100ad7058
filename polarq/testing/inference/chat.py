"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from polarq.testing.inference import wire
from polarq.testing.inference.acting import Answer, Spoiler, before_sampling
from polarq.testing.inference.engine import ENGINE, Engine
from polarq.testing.inference.generation import Generation
from polarq.testing.inference.parsing import MessageParser, parse, thinking_pieces
from polarq.testing.inference.reading import read_body
from polarq.testing.inference.requests import ChatRequest
from polarq.testing.inference.wire import Json, Reply

KIND = "chat.completion.chunk"


async def chat_completions(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    body = await read_body(request, ChatRequest)
    asker = await engine.asker(request, body, "chatcmpl")
    prompt_ids, prompt_text = await engine.prompt_of(body)
    limits = engine.limits(body, engine.room(prompt_ids, body.limit))
    selected = [engine.selected(asker, body.messages, choice) for choice in range(body.n)]
    await engine.admit()
    fault = engine.selector.fault(selected[0])
    if (refusal := await before_sampling(request, fault, streamed=body.stream)) is not None:
        return refusal
    shown = body.include_reasoning  # vLLM with a reasoning parser gives no ids to who wants no reasoning
    reply = Reply(
        id=asker.request_id,
        model=engine.options.served_model_name,
        fingerprint=engine.options.fingerprint,
        prompt_ids=prompt_ids,
        tokenizer=engine.tokenizer,
        prompt_text=prompt_text if body.return_prompt_text else None,
        show_ids=bool(body.return_token_ids) and engine.options.token_ids,
        show_versions=bool(body.return_weight_versions) and engine.options.since(0, 33),
        as_token_ids=bool(body.return_tokens_as_token_ids),
        logprobs=(body.top_logprobs or 0) if body.logprobs and shown else None,
        prompt_logprobs=engine.prompt_logprobs(body),
    )
    generations: list[Generation] = []
    with engine.answering(generations):
        for choice, turn in enumerate(selected):
            said = turn if body.forced is None else turn.saying(body.forced)
            generations.append(
                engine.start(asker, said, prompt_ids, limits, choice=choice, thinking=body.thinking, fault=fault)
            )
        answer = Answer(request, fault)
        conversation = _Conversation(engine, body, reply, answer, Spoiler(fault))
        return await (conversation.streamed(generations) if body.stream else conversation.unary(generations))


@dataclass
class _Conversation:
    """One request on its way to an answer."""

    engine: Engine
    body: ChatRequest
    reply: Reply
    answer: Answer
    spoil: Spoiler

    async def unary(self, generations: Sequence[Generation]) -> web.StreamResponse:
        await self.answer.sampled(generations)
        choices = [self._choice(generation) for generation in generations]
        usage = self._usage(generations, streamed=False)
        return await self.answer.unary(self.spoil(wire.chat_completion(self.reply, choices, usage)))

    def _choice(self, generation: Generation) -> Json:
        message = parse(generation.sample.text, tools=self.body.wants_tools)
        finish_reason = self._finish_reason(generation)
        if self.body.parallel_tool_calls is False:
            message.tool_calls = message.tool_calls[:1]  # the ids of the others stay
        if not self.body.include_reasoning:
            message.reasoning = None
        choice = wire.chat_choice(self.reply, generation, message, finish_reason)
        if not self.body.include_reasoning:
            choice["token_ids"] = None
        return choice

    def _finish_reason(self, generation: Generation) -> str:
        """ "tool_calls" for a finished answer with calls, unless the request named the tool itself."""
        sample = generation.sample
        if sample.finish_reason != "stop" or self.body.names_a_tool:
            return sample.finish_reason
        called = parse(sample.text, tools=self.body.wants_tools).tool_calls
        return "tool_calls" if called else sample.finish_reason

    def _usage(self, generations: Sequence[Generation], *, streamed: bool) -> Json:
        sampled = sum(len(generation.sample.token_ids) for generation in generations)
        thought = sum(thinking_pieces(generation.sample.pieces) for generation in generations)
        return wire.chat_usage(self.reply, sampled, thought, streamed=streamed)

    async def streamed(self, generations: Sequence[Generation]) -> web.StreamResponse:
        await self.answer.open_stream()
        for generation in generations:
            await self._send(wire.chat_first_chunk(self.reply, generation.call.choice_index))
        live = [(generation, MessageParser(tools=self.body.wants_tools)) for generation in generations]
        while live:
            for generation, parser in list(live):
                if await self.answer.ended_after(sum(g.count for g in generations)):
                    return self.answer.response
                start = generation.count
                await generation.advance(self.body.stream_interval if start else 1)
                chunk = self._chunk(generation, parser, range(start, generation.count))
                if generation.call.finish_reason is not None:
                    live.remove((generation, parser))
                    if not live and not self.body.include_usage:
                        chunk["system_fingerprint"] = self.reply.fingerprint
                await self._send(chunk)
        if self.body.include_usage:
            usage = self._usage(generations, streamed=True)
            await self._send(wire.usage_chunk(self.reply, KIND, usage))
        return await self.answer.done()

    def _chunk(self, generation: Generation, parser: MessageParser, indexes: range) -> Json:
        ended = generation.call.finish_reason is not None
        deltas = [delta for at in indexes for delta in parser.feed(generation.sample.pieces[at])]
        if ended:
            deltas += parser.finish()
        if not self.body.include_reasoning:
            deltas = [delta for delta in deltas if delta.kind != "reasoning"]
        if self.body.parallel_tool_calls is False:
            deltas = [delta for delta in deltas if delta.call_index == 0]
        said = wire.chat_delta(self.reply, generation.call.choice_index, deltas)
        reason = self._finish_reason(generation) if ended else None
        chunk = wire.chat_chunk(self.reply, generation, indexes, said, reason)
        if not self.body.include_reasoning:
            chunk["choices"][0]["token_ids"] = None
        return chunk

    async def _send(self, chunk: Json) -> None:
        await self.answer.event(self.spoil(chunk))
