"""SGLang's `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from polarq.testing.inference.acting import Answer, Spoiler, before_sampling
from polarq.testing.inference.engine import ENGINE, Engine
from polarq.testing.inference.generation import Generation
from polarq.testing.inference.parsing import Delta, Message, MessageParser, parse, thinking_pieces
from polarq.testing.inference.reading import read_body
from polarq.testing.inference.sglang import wire
from polarq.testing.inference.sglang.limits import room
from polarq.testing.inference.sglang.requests import Known, SglangChatRequest
from polarq.testing.inference.wire import Json, Reply


async def chat_completions(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    body = await read_body(request, SglangChatRequest)
    known = Known(engine.options, body)
    asker = await engine.asker(request, body, "chatcmpl")
    prompt_ids = await _prompt_of(engine, body)
    limits = engine.limits(body, room(engine, prompt_ids, body.limit))
    selected = [engine.selected(asker, body.messages, choice) for choice in range(body.n)]
    await engine.gate.running_again()
    fault = engine.selector.fault(selected[0])
    if (refusal := await before_sampling(request, fault, streamed=body.stream)) is not None:
        return refusal
    reply = Reply(
        id=asker.request_id.removeprefix("chatcmpl-"),
        model=body.model or "default",
        fingerprint="",
        prompt_ids=prompt_ids,
        tokenizer=engine.tokenizer,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    generations: list[Generation] = []
    with engine.answering(generations):
        for choice, turn in enumerate(selected):
            said = turn if body.forced is None else turn.saying(body.forced)
            generations.append(
                engine.start(asker, said, prompt_ids, limits, choice=choice, thinking=body.thinking, fault=fault)
            )
        answer = Answer(request, fault, wire.stream_error)
        conversation = _Conversation(engine, body, known, reply, answer, Spoiler(fault))
        return await (conversation.streamed(generations) if body.stream else conversation.unary(generations))


async def _prompt_of(engine: Engine, body: SglangChatRequest) -> list[int]:
    if body.input_ids is not None and engine.options.token_in and engine.options.since(0, 5, 13):
        return engine.checked(body.input_ids)
    return await engine.prompt_ids(engine.rendered(body))


@dataclass
class _Conversation:
    """One request on its way to an answer."""

    engine: Engine
    body: SglangChatRequest
    known: Known
    reply: Reply
    answer: Answer
    spoil: Spoiler

    async def unary(self, generations: Sequence[Generation]) -> web.StreamResponse:
        await self.answer.sampled(generations)
        payload: Json = {
            **self.reply.head("chat.completion"),
            "choices": [self._choice(generation) for generation in generations],
            "usage": self._usage(generations),
            "metadata": wire.metadata(self.engine.options, generations[0]),
        }
        if extra := self._sglext(generations):
            payload["sglext"] = extra
        return await self.answer.unary(self.spoil(payload))

    def _choice(self, generation: Generation) -> Json:
        sample, index = generation.sample, generation.call.choice_index
        reason, matched = self._ended(generation)
        shown = wire.logprobs(self.reply, generation, range(generation.count))
        if shown is not None and self.engine.options.short_logprobs:
            shown["content"].pop()
        choice: Json = {
            "index": index,
            "message": wire.message(self.reply, index, self._parsed(sample.text)),
            "logprobs": shown,
            "finish_reason": reason,
            "matched_stop": matched,
        }
        if self.known.prompt_ids or self.known.token_ids:
            choice["prompt_token_ids"] = list(self.reply.prompt_ids)
        if self.known.token_ids:
            choice[self.known.token_ids_name] = list(sample.token_ids)
        if self.known.meta_info:
            choice["meta_info"] = wire.meta_info(self.engine.options, self.reply, generation, ended=True)
        return choice

    def _parsed(self, text: str) -> Message:
        if not self.body.separate_reasoning:
            return Message(content=text)
        return parse(text, tools=self.body.wants_tools)

    def _ended(self, generation: Generation) -> tuple[str, str | int | None]:
        """(finish reason, matched stop). A whole answer with calls no longer says what matched, a streamed one does."""
        end = wire.finish(generation)
        if end["type"] == "stop" and self._parsed(generation.sample.text).tool_calls:
            return "tool_calls", end["matched"] if self.body.stream else None
        return end["type"], end.get("matched")

    def _usage(self, generations: Sequence[Generation]) -> Json:
        sampled = sum(generation.count for generation in generations)
        thought = sum(thinking_pieces(generation.sample.pieces) for generation in generations)
        return wire.usage(len(self.reply.prompt_ids), sampled, thought)

    def _sglext(self, generations: Sequence[Generation]) -> Json:
        extra: Json = {}
        if self.known.sglext_input:
            extra["input_ids"] = list(self.reply.prompt_ids)
        if self.known.sglext_output:
            extra["output_ids"] = [list(generation.sample.token_ids) for generation in generations]
        return extra

    async def streamed(self, generations: Sequence[Generation]) -> web.StreamResponse:
        """The ids come once, after the finish reasons; after an error there are none."""
        await self.answer.open_stream()
        live = [(generation, MessageParser(tools=self.body.wants_tools)) for generation in generations]
        for generation in generations:
            await self._send([wire.chunk_choice(generation.call.choice_index, {"role": "assistant", "content": ""})])
        while live:
            for generation, parser in list(live):
                if await self.answer.ended_after(sum(g.count for g in generations)):
                    return self.answer.response
                start = generation.count
                await generation.advance(self.body.stream_interval if start else 1)
                await self._step(generation, parser, range(start, generation.count))
                if generation.call.finish_reason is not None:
                    live.remove((generation, parser))
        for generation in generations:
            reason, matched = self._ended(generation)
            index = generation.call.choice_index
            await self._send([wire.chunk_choice(index, {}, finish_reason=reason, matched_stop=matched)])
        if extra := self._sglext(generations):
            await self._send([], sglext=extra)
        if self.body.include_usage:
            await self._send([], usage=self._usage(generations))
        return await self.answer.done()

    async def _step(self, generation: Generation, parser: MessageParser, indexes: range) -> None:
        """What one step of the engine says. Its log-probabilities ride on the first chunk, on an empty one if there is
        nothing else."""
        found = [delta for at in indexes for delta in self._fed(parser, generation.sample.pieces[at])]
        if generation.call.finish_reason not in {None, "abort"}:
            found += parser.finish()
        index = generation.call.choice_index
        riding = wire.logprobs(self.reply, generation, indexes)
        said = wire.deltas(self.reply, index, found)
        if not said and indexes and riding is not None:
            said = [{}]
        for delta in said:
            await self._send([wire.chunk_choice(index, delta, logprobs=riding)])
            riding = None

    def _fed(self, parser: MessageParser, piece: str) -> list[Delta]:
        if self.body.separate_reasoning:
            return parser.feed(piece)
        return [Delta("content", piece)] if piece else []

    async def _send(self, choices: list[Json], **more: Json) -> None:
        await self.answer.event(self.spoil(wire.chunk(self.reply, choices, **more)))
