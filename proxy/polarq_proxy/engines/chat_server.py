"""What vLLM and SGLang have in common as servers of chat completions: how requests are judged, what errors mean, and
what they say about themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from polarq_proxy.engines.base import Engine, EngineFacts
from polarq_proxy.engines.wire import error_tree, ids_of_rendering, objects, retry_after_s, text
from polarq_proxy.faults import CallFault, FaultKind


class ChatServer(Engine):
    sampling_names: ClassVar[frozenset[str]]
    """Members of a request that decide what is sampled."""
    grammar_names: ClassVar[tuple[str, ...]]
    """Members of a request that constrain sampling, beside a tool's choice and a response format."""

    def sampling(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in body.items() if key in self.sampling_names and value is not None}

    def grammar(self, body: Mapping[str, Any]) -> str | None:
        choice = body.get("tool_choice")
        if isinstance(choice, dict) or choice == "required":
            return "tool_choice: " + ("required" if choice == "required" else "named")
        form = body.get("response_format")
        if isinstance(form, dict) and form.get("type") not in (None, "text"):  # it may be anything
            return f"response_format: {form['type']}"
        return next((key for key in self.grammar_names if body.get(key) is not None), None)

    def untrainable(self, body: Mapping[str, Any]) -> str | None:
        return "beam search: the log-probabilities are not those of a sample" if body.get("use_beam_search") else None

    def read_rendering(self, data: bytes) -> list[int]:
        return ids_of_rendering(data)

    def read_facts(self, version: Any, models: Any) -> EngineFacts:
        served: dict[str, int | None] = {}
        for item in objects(models.get("data") if isinstance(models, dict) else None):
            length = item.get("max_model_len")
            served[text(item.get("id"))] = length if isinstance(length, int) else None
        return EngineFacts(text(version.get("version")) if isinstance(version, dict) else "", served)

    def read_weights(self, data: Any) -> str | None:
        version = data.get("weight_version") if isinstance(data, dict) else None
        return None if version is None else str(version)

    @abstractmethod
    def too_long(self, message: str, param: str | None) -> CallFault | None:
        """What the error of a status 400 says about a context that is too long; None: it is about something else."""

    def fault(self, status: int, headers: Mapping[str, str], data: bytes) -> CallFault:
        return self.fault_in(status, headers, error_tree(data))

    def fault_in(self, status: int, headers: Mapping[str, str], tree: Mapping[str, Any]) -> CallFault:
        """What an error answer or an error event means."""
        error = tree.get("error", tree)
        error = error if isinstance(error, dict) else {"message": str(error)}
        message = text(error.get("message")) or text(error.get("detail")) or f"status {status}"
        param = text(error.get("param")) or None
        words = f"the inference server answered {status}: {message}"
        if status == 400 and (overflow := self.too_long(message, param)) is not None:
            return overflow
        if status in {401, 403}:
            # Servers repeat the key that they refuse, and this text goes into sandboxes.
            refused = f"the inference server answered {status} (polarq's key for it: see api_key_env in the topology)"
            return CallFault(FaultKind.MISCONFIGURED, refused)
        if status in {404, 405}:
            return CallFault(FaultKind.MISCONFIGURED, f"{words} (see inference.model and base_url in the topology)")
        if status == 413:
            return CallFault(FaultKind.TOO_LARGE, words)
        if status in {429, 503}:
            return CallFault(FaultKind.OVERLOADED, words, status=status, retry_after_s=retry_after_s(headers))
        if status < 500:
            return CallFault(FaultKind.REFUSED, message, param=param)
        return CallFault(FaultKind.ENGINE_FAULT, words, status=status if status < 600 else 502)
