"""Any server that speaks OpenAI's chat completions, for models that are not trained: no token ids are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polarq_proxy.call import ModelCall
from polarq_proxy.engines.asking import put_streaming, put_tools
from polarq_proxy.engines.base import EngineRequest, Features
from polarq_proxy.engines.history import readable
from polarq_proxy.engines.vllm import VllmEngine

_KNOWN = frozenset(
    {
        "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "seed", "stop", "presence_penalty",
        "frequency_penalty", "logit_bias", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort",
    }
)  # fmt: skip
"""Servers of this kind may refuse what they do not know."""


class OpenAIEngine(VllmEngine):
    name: ClassVar[str] = "openai"
    version_path: ClassVar[str | None] = None
    weights_path: ClassVar[str | None] = None

    def features(self) -> Features:
        return Features(token_in=False, rendering=False, versions_in_answer=False)

    def request(
        self, call: ModelCall, model: str, *, stream: bool, prompt_ids: Sequence[int] | None = None
    ) -> EngineRequest:
        body: dict[str, Any] = {key: value for key, value in call.options.items() if key in _KNOWN}
        body.update(model=model, messages=[_plain(message) for message in call.messages])
        put_tools(body, call)
        if not call.tools:
            body.pop("parallel_tool_calls", None)
        put_streaming(body, stream)
        return EngineRequest("/v1/chat/completions", body)

    def rendering(self, call: ModelCall, model: str, *, generation_prompt: bool = True) -> EngineRequest | None:
        return None


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Thinking stays here: what one model thought is nothing that another one's server must accept."""
    return {key: value for key, value in readable(message).items() if key not in {"reasoning", "reasoning_content"}}
