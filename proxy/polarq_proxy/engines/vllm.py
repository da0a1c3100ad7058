"""vLLM (0.14 and later): ids through chat completions, whole and streamed.

Asked for with `return_token_ids`, `logprobs` and `return_weight_versions`. Servers ignore fields that they do not know,
so presence is checked on what comes back, never assumed. Without `include_reasoning` a reasoning parser makes ids and
log-probabilities null, so it is always asked for. Thinking is `reasoning` here and `reasoning_content` inside polarq.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from polarq_proxy.call import Answer, Choice, ChoiceDelta, ModelCall, Piece
from polarq_proxy.engines.asking import alternatives, completion_rendering, put_streaming, put_tools
from polarq_proxy.engines.base import EngineRequest, TokensIn
from polarq_proxy.engines.chat_server import ChatServer
from polarq_proxy.engines.history import readable
from polarq_proxy.engines.vllm_answers import entries_of, read_chat, read_whole
from polarq_proxy.engines.vllm_completions import completion_request, is_completion, with_changes, with_choices
from polarq_proxy.engines.vllm_runs import read_run
from polarq_proxy.engines.vllm_tokens import VllmTokens
from polarq_proxy.engines.wire import index_of, list_or_none, objects, spans_of, status_of, text, tree_of, usage_of
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.sse import SseEvent

_RENDERED_BY = ("chat_template", "chat_template_kwargs", "continue_final_message", "mm_processor_kwargs")

# Older servers name no parameter in this error: there only the sentence tells it from other refusals.
_OVERFLOW = re.compile(r"maximum context length is (\d+) tokens")
_PROMPT_TOKENS = re.compile(r"\bvalue=(\d+)|at least (\d+) input tokens|\((\d+) in the messages")


class VllmEngine(ChatServer):
    name: ClassVar[str] = "vllm"
    version_path: ClassVar[str | None] = "/version"
    weights_path: ClassVar[str | None] = "/weight_info"
    sampling_names: ClassVar[frozenset[str]] = frozenset({
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "min_tokens", "n", "seed",
        "stop", "stop_token_ids", "bad_words", "ignore_eos", "include_stop_str_in_output", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "length_penalty", "logit_bias", "allowed_token_ids",
        "use_beam_search", "best_of", "thinking_token_budget", "reasoning_effort", "chat_template_kwargs",
        "chat_template", "add_generation_prompt", "continue_final_message", "tool_choice", "parallel_tool_calls",
        "response_format", "structured_outputs", "truncate_prompt_tokens", "skip_special_tokens",
        "spaces_between_special_tokens",
    })  # fmt: skip
    grammar_names: ClassVar[tuple[str, ...]] = (
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
    )  # fmt: skip

    def tokens_in(self) -> TokensIn | None:
        return VllmTokens(self)

    def request(
        self, call: ModelCall, model: str, *, stream: bool, prompt_ids: Sequence[int] | None = None
    ) -> EngineRequest:
        if call.prompt is not None:
            return completion_request(call, model, stream=stream, prompt_ids=prompt_ids)
        body = dict(call.options)
        body.update(
            model=model,
            messages=[_to_engine(message) for message in call.messages],
            logprobs=True,
            top_logprobs=alternatives(body),
            return_token_ids=True,
            return_weight_versions=True,
            include_reasoning=True,
        )
        put_tools(body, call)
        put_streaming(body, stream)
        if prompt_ids is not None:
            # The side door for ids that were rendered elsewhere: the template is skipped, the parsers still work.
            body["kv_transfer_params"] = {"prompt_token_ids": list(prompt_ids)}
        return EngineRequest("/v1/chat/completions", body)

    def rendering(self, call: ModelCall, model: str, *, generation_prompt: bool = True) -> EngineRequest | None:
        if call.prompt is not None:
            return completion_rendering(call, model)
        opened = generation_prompt and call.options.get("continue_final_message") is not True  # both are refused
        body: dict[str, Any] = {"model": model, "add_generation_prompt": opened}
        body["messages"] = [_to_engine(message) for message in call.messages]
        if call.tools:
            body["tools"] = call.tools
        for key in _RENDERED_BY:
            if call.options.get(key) is not None:
                body[key] = call.options[key]
        return EngineRequest("/tokenize", body)

    def read(self, data: bytes) -> Answer:
        found = _usual_answer(data)
        if found is not None:
            return found
        tree = tree_of(data)
        if isinstance(tree.get("error"), dict):
            raise self.fault_in(status_of(tree["error"]), {}, tree)
        items = objects(tree.get("choices"))
        choices = [_choice(item, place) for place, item in enumerate(items)]
        if not choices:
            raise CallFault(FaultKind.ENGINE_FAULT, "the inference server's answer holds no choice")
        usage, named = usage_of(tree.get("usage")), text(tree.get("model"))
        answer = Answer(choices, list_or_none(tree.get("prompt_token_ids")), usage, named)
        return with_choices(answer, items) if is_completion(tree) else answer

    def read_event(self, event: SseEvent) -> Piece:
        if event.data == b"[DONE]":
            return Piece(done=True)
        found = _usual_piece(event.data) if event.event != b"error" else None
        if found is not None:
            return found
        tree = tree_of(event.data)
        if tree.get("error") is not None or event.event == b"error":
            error = tree.get("error")
            raise self.fault_in(status_of(error), {}, tree)
        items = objects(tree.get("choices"))
        piece = Piece(
            choices=[_delta(item, place) for place, item in enumerate(items)],
            prompt_ids=list_or_none(tree.get("prompt_token_ids")),
            usage=usage_of(tree.get("usage")),
            model=text(tree.get("model")) or None,
        )
        return with_changes(piece, items) if is_completion(tree) else piece

    def read_events(self, events: Sequence[SseEvent]) -> Iterator[Piece]:
        return read_run(events, self.read_event)

    def too_long(self, message: str, param: str | None) -> CallFault | None:
        limit = _OVERFLOW.search(message)
        if param != "input_tokens" and limit is None:
            return None
        tokens = _PROMPT_TOKENS.search(message)
        return CallFault(
            FaultKind.CONTEXT_OVERFLOW,
            message,
            max_context=int(limit[1]) if limit else None,
            prompt_tokens=int(next(filter(None, tokens.groups()))) if tokens else None,
        )


def _to_engine(message: dict[str, Any]) -> dict[str, Any]:
    message = readable(message)
    if "reasoning_content" not in message:
        return message
    changed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message["reasoning_content"] is not None:
        changed.setdefault("reasoning", message["reasoning_content"])
    return changed


def _from_engine(message: Any) -> dict[str, Any]:
    """An assistant message or a part of one: thinking under polarq's name, nothing that is null but content."""
    if not isinstance(message, dict):
        return {}
    if "reasoning" not in message and None not in message.values():
        return message  # as most events of a stream are
    changed = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "reasoning" in changed:
        changed.setdefault("reasoning_content", changed.pop("reasoning"))
        changed.pop("reasoning", None)
    return changed


def _choice(item: dict[str, Any], place: int) -> Choice:
    return Choice(
        index=index_of(item, place),
        message={"role": "assistant", "content": None, **_from_engine(item.get("message"))},
        ids=list_or_none(item.get("token_ids")),
        logprobs=_entries(item),
        finish_reason=text(item.get("finish_reason")) or None,
        stop_reason=_stop(item),
        weight_versions=spans_of(item.get("weight_versions")),
    )


def _delta(item: dict[str, Any], place: int) -> ChoiceDelta:
    return ChoiceDelta(
        index=index_of(item, place),
        delta=_from_engine(item.get("delta")),
        ids=list_or_none(item.get("token_ids")),
        logprobs=_entries(item),
        finish_reason=text(item.get("finish_reason")) or None,
        stop_reason=_stop(item),
        weight_versions=spans_of(item.get("weight_versions")),
    )


def _usual_answer(data: bytes) -> Answer | None:
    """None: it has to be read step by step."""
    found = read_whole(data)
    if found is None or not found[0].choices:
        return None
    tree, prompt_ids = found
    choices = []
    for item in tree.choices:
        entries = entries_of(item.logprobs)
        if entries is msgspec.UNSET:
            return None
        choices.append(
            Choice(
                index=item.index,
                message={"role": "assistant", "content": None, **_from_engine(item.message)},
                ids=item.token_ids,
                logprobs=entries,
                finish_reason=item.finish_reason or None,
                stop_reason=item.stop_reason,
                weight_versions=spans_of(item.weight_versions),
            )
        )
    return Answer(choices, prompt_ids, usage_of(tree.usage), tree.model)


def _usual_piece(data: bytes) -> Piece | None:
    found = read_chat(data)
    if found is None:
        return None
    tree, prompt_ids = found
    changes = []
    for item in tree.choices:
        entries = entries_of(item.logprobs)
        if entries is msgspec.UNSET:
            return None
        changes.append(
            ChoiceDelta(
                index=item.index,
                delta=_from_engine(item.delta),
                ids=item.token_ids,
                logprobs=entries,
                finish_reason=item.finish_reason or None,
                stop_reason=item.stop_reason,
                weight_versions=spans_of(item.weight_versions),
            )
        )
    return Piece(changes, prompt_ids, usage_of(tree.usage), tree.model or None)


def _stop(item: dict[str, Any]) -> str | int | None:
    stop = item.get("stop_reason")
    return stop if isinstance(stop, (str, int)) else None


def _entries(item: dict[str, Any]) -> list[Any] | None:
    logprobs = item.get("logprobs")
    return list_or_none(logprobs.get("content")) if isinstance(logprobs, dict) else None
