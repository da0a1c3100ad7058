"""SGLang's own `POST /generate`: tokens or text in, tokens out. Streams repeat all that was said so far, unless the
server was started with incremental streaming."""

from __future__ import annotations

from aiohttp import web

from polarq.testing.inference.acting import Answer, ApiError, before_sampling
from polarq.testing.inference.engine import ENGINE, Engine
from polarq.testing.inference.generation import Generation
from polarq.testing.inference.reading import read_body
from polarq.testing.inference.sglang import wire
from polarq.testing.inference.sglang.limits import room
from polarq.testing.inference.sglang.requests import NativeRequest
from polarq.testing.inference.wire import Json, Reply


async def generate(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    body = await read_body(request, NativeRequest)
    asker = await engine.asker(request, body.plain, "generate")
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "Either text or input_ids should be provided.", "BadRequestError")
    prompt_ids = (
        await engine.encoded_plain(body.text) if body.text is not None else engine.checked(body.input_ids or [])
    )
    if body.logprob_start_len >= len(prompt_ids):
        message = f"logprob_start_len ({body.logprob_start_len}) is not within the {len(prompt_ids)} input tokens."
        raise ApiError(400, message, "BadRequestError")
    limits = engine.limits(body.plain, room(engine, prompt_ids, body.sampling_params.max_new_tokens))
    selected = engine.selected_for_ids(asker, prompt_ids, 0)
    await engine.gate.running_again()
    fault = engine.selector.fault(selected)
    if (refusal := await before_sampling(request, fault, streamed=body.stream)) is not None:
        return refusal
    reply = Reply(
        id=asker.request_id,
        model="",
        fingerprint="",
        prompt_ids=prompt_ids,
        tokenizer=engine.tokenizer,
        show_ids=body.return_prompt_token_ids and engine.options.since(0, 5, 13),
        logprobs=0 if body.return_logprob else None,
    )
    generations: list[Generation] = []
    with engine.answering(generations):
        generation = engine.start(asker, selected, prompt_ids, limits, choice=0, fault=fault)
        generations.append(generation)
        answer = Answer(request, fault, wire.stream_error)
        if not body.stream:
            await answer.sampled(generations)
            return await answer.unary(_said(engine, body, reply, generation, 0))
        await answer.open_stream()
        while generation.call.finish_reason is None:
            if await answer.ended_after(generation.count):
                return answer.response
            start = generation.count if engine.options.incremental_streaming else 0
            await generation.advance()
            await answer.event(_said(engine, body, reply, generation, start))
        return await answer.done()


def _said(engine: Engine, body: NativeRequest, reply: Reply, generation: Generation, start: int) -> Json:
    sample, ended = generation.sample, generation.call.finish_reason is not None
    meta = wire.meta_info(engine.options, reply, generation, ended=ended, texts=body.return_text_in_logprobs)
    if "output_token_logprobs" in meta:
        meta["output_token_logprobs"] = meta["output_token_logprobs"][start:]
        if body.logprob_start_len >= 0:
            texts = body.return_text_in_logprobs
            meta["input_token_logprobs"] = wire.input_logprobs(reply, body.logprob_start_len, texts=texts)
    said: Json = {
        "text": "".join(sample.pieces[start : generation.count]),
        "output_ids": list(sample.token_ids[start : generation.count]),
        "meta_info": meta,
    }
    if reply.show_ids:
        said["prompt_token_ids"] = list(reply.prompt_ids)
    return said
