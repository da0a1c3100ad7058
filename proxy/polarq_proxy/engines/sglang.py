"""SGLang (0.5.13 and later): ids through chat completions.

Which fields give them up depends on the release:

- 0.5.20 and later: `return_input_ids_in_sglext` and `return_output_ids_in_sglext`, whole and streamed. In a stream they
  come once, in an event without choices after the last text, and not at all when the call broke off.
- 0.5.17 to 0.5.19: `return_token_ids`, not streamed; `token_ids` in 0.5.17, `response_token_ids` since 0.5.18.
- 0.5.13 to 0.5.16: `return_prompt_token_ids`, not streamed; the sampled ids are in `meta_info`.

Those that refuse to stream ids are asked for whole answers, whatever the harness wants. Whole answers always carry
`meta_info` too: its list pairs each log-probability with its id, while `logprobs.content` was shorter in some releases.
The server ignores fields that it does not know, so presence is checked on what comes back.

Log-probabilities are those of the logits divided by the temperature, before top-k and top-p.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from polarq_proxy.call import Answer, ModelCall, Piece
from polarq_proxy.engines.asking import alternatives, completion_rendering, put_streaming, put_tools
from polarq_proxy.engines.base import EngineFacts, EngineRequest, Features
from polarq_proxy.engines.chat_server import ChatServer
from polarq_proxy.engines.history import readable
from polarq_proxy.engines.sglang_answers import answer_of, piece_of
from polarq_proxy.engines.wire import objects, status_of, tree_of
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.sse import SseEvent

_SGLEXT = (0, 5, 20)
_TOKEN_IDS = (0, 5, 17)
_INPUT_IDS = (0, 5, 13)
_RENDERING = (0, 5, 12)
_NEWEST = _SGLEXT

_RENDERED_BY = ("chat_template_kwargs", "reasoning_effort", "continue_final_message", "tool_choice")

_EFFORTS = {
    "none": "none", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip

# The server names no parameter in this error; the sentence is all there is. (prompt tokens, context)
_TOO_LONG = (
    re.compile(r"The input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<limit>\d+)"),
    re.compile(r"Input length \((?P<prompt>\d+) tokens\) exceeds the maximum allowed length \((?P<limit>\d+)"),
    re.compile(r"maximum context length of (?P<limit>\d+) tokens(?:.*?: (?P<prompt>\d+) tokens from the input)?"),
)


class SglangEngine(ChatServer):
    """`version` is the server's own; blank: taken for a new one."""

    name: ClassVar[str] = "sglang"
    version_path: ClassVar[str | None] = "/server_info"
    weights_path: ClassVar[str | None] = "/model_info"
    sampling_names: ClassVar[frozenset[str]] = frozenset({
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "min_tokens", "n", "seed",
        "stop", "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "regex", "ebnf", "response_format", "tool_choice", "parallel_tool_calls",
        "reasoning_effort", "chat_template_kwargs", "continue_final_message", "skip_special_tokens",
        "custom_logit_processor", "custom_params", "lora_path", "use_beam_search",
    })  # fmt: skip
    grammar_names: ClassVar[tuple[str, ...]] = ("regex", "ebnf", "custom_logit_processor")

    def __init__(self, version: str = "") -> None:
        self._release = _release(version)

    def configured(self, facts: EngineFacts) -> Self:
        return type(self)(facts.version)

    def features(self) -> Features:
        """Whole answers say which policy versions sampled them, since 0.5.19; streamed ones never do."""
        return Features(
            streams_ids=self._release >= _SGLEXT,
            token_in=self._release >= _INPUT_IDS,
            rendering=self._release >= _RENDERING,
            versions_in_answer=False,
        )

    def request(
        self, call: ModelCall, model: str, *, stream: bool, prompt_ids: Sequence[int] | None = None
    ) -> EngineRequest:
        if call.prompt is not None:
            return self._completion(call, model, stream=stream, prompt_ids=prompt_ids)
        stream = stream and self._release >= _SGLEXT
        body = _with_known_effort(call.options)
        body.update(
            model=model,
            messages=[readable(message) for message in call.messages],
            logprobs=True,
            top_logprobs=alternatives(body),
            **self._ids_wanted(stream=stream),
        )
        put_tools(body, call)
        put_streaming(body, stream)
        if prompt_ids is not None:
            # The template is skipped; stops and the tool parser still come from messages and tools.
            body["input_ids"] = list(prompt_ids)
        return EngineRequest("/v1/chat/completions", body)

    def _ids_wanted(self, *, stream: bool) -> dict[str, bool]:
        """What makes this release give up ids in a chat answer. `return_meta_info` is refused in streams."""
        wanted = {} if stream else {"return_meta_info": True}
        if self._release >= _SGLEXT:
            return {**wanted, "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
        if self._release >= _TOKEN_IDS:
            return {**wanted, "return_token_ids": True}
        return {**wanted, "return_prompt_token_ids": True}

    def _completion(
        self, call: ModelCall, model: str, *, stream: bool, prompt_ids: Sequence[int] | None
    ) -> EngineRequest:
        """A bare prompt. Ids come since 0.5.17, also in streams."""
        body = dict(call.options)
        body.pop("top_logprobs", None)
        body.pop("tool_choice", None)
        body.update(
            model=model,
            prompt=call.prompt if prompt_ids is None else list(prompt_ids),
            logprobs=alternatives(call.options),
            return_token_ids=True,
        )
        put_streaming(body, stream)
        return EngineRequest("/v1/completions", body)

    def rendering(self, call: ModelCall, model: str, *, generation_prompt: bool = True) -> EngineRequest | None:
        if call.prompt is not None:
            return completion_rendering(call, model)
        if not generation_prompt:
            return None  # it always opens the answer
        body: dict[str, Any] = {"model": model, "messages": [readable(message) for message in call.messages]}
        if call.tools:
            body["tools"] = call.tools
        options = _with_known_effort(call.options)
        for key in _RENDERED_BY:
            if options.get(key) is not None and (call.tools or key != "tool_choice"):
                body[key] = options[key]
        return EngineRequest("/tokenize", body)

    def grammar(self, body: Mapping[str, Any]) -> str | None:
        found = super().grammar(body)
        if found is None and body.get("tool_choice") != "none" and any(map(_strict, objects(body.get("tools")))):
            return "strict tools"
        return found

    def logprobs_mode(self, body: Mapping[str, Any]) -> str:
        """What the log-probabilities of an answer to this request are of. At temperature 1 (and at 0, which samples
        the likeliest id of unscaled logits) the division changes nothing; without a temperature the model's own
        default holds, which is not known here. A server may be started with SGLANG_RETURN_ORIGINAL_LOGPROB=1 and then
        never divides; it does not tell."""
        temperature = body.get("temperature")
        if not isinstance(temperature, (int, float)):
            return "unknown"
        return "raw_logprobs" if temperature in {0, 1} else "temperature_scaled_logprobs"

    def read(self, data: bytes) -> Answer:
        tree = tree_of(data)
        if tree.get("error") is not None or tree.get("object") == "error":
            raise self.fault_in(status_of(tree.get("error", tree)), {}, tree)
        answer = answer_of(tree)
        if not answer.choices:
            raise CallFault(FaultKind.ENGINE_FAULT, "the inference server's answer holds no choice")
        return answer

    def read_event(self, event: SseEvent) -> Piece:
        if event.data == b"[DONE]":
            return Piece(done=True)
        tree = tree_of(event.data)
        if tree.get("error") is not None or tree.get("object") == "error":
            raise self.fault_in(status_of(tree.get("error", tree)), {}, tree)
        return piece_of(tree)

    def too_long(self, message: str, param: str | None) -> CallFault | None:
        found = next(filter(None, (words.search(message) for words in _TOO_LONG)), None)
        if found is None:
            return None
        return CallFault(
            FaultKind.CONTEXT_OVERFLOW,
            message,
            max_context=int(found["limit"]),
            prompt_tokens=int(found["prompt"]) if found["prompt"] else None,
        )


def _release(version: str) -> tuple[int, ...]:
    """(0, 5, 18) of "0.5.18.post1"."""
    numbers = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, numbers.groups())) if numbers else _NEWEST


def _with_known_effort(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with an effort that is not refused: the nearest of those that every release takes, else none."""
    body = dict(options)
    effort = body.pop("reasoning_effort", None)
    if isinstance(effort, str) and (known := _EFFORTS.get(effort.lower())) is not None:
        body["reasoning_effort"] = known
    return body


def _strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True
