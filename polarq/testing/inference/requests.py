"""The requests the server understands. Like vLLM it ignores fields it does not know, so a client must look at the
answer and never assume; what it does know must have the right type."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class StreamOptions(_Request):
    include_usage: bool = False


class KvTransferParams(_Request):
    """vLLM's side door for a pre-tokenised prompt: the template is skipped and these ids are used."""

    prompt_token_ids: list[Any] | None = None


class StructuredOutputs(_Request):
    """Of grammars the server knows only this one: with a single choice there is nothing left to script."""

    choice: list[str] | None = None


class SamplingRequest(_Request):
    """What chat and completion requests share. Lengths in tokens."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int = Field(1, ge=1)
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    session_id: str | None = None
    user: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def sampling(self) -> dict[str, float]:
        """What of sampling it asks for; a scripted text is the same whatever that is."""
        asked = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "seed")}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingRequest):
    """`POST /v1/chat/completions`. Messages and tools stay as the client sent them, for the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(0, ge=0, le=20)
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None
    kv_transfer_params: KvTransferParams | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def forced(self) -> str | None:
        """The only text that the request's grammar leaves; None: there is no such grammar."""
        choices = (self.structured_outputs.choice if self.structured_outputs else None) or []
        return choices[0] if len(choices) == 1 else None

    @property
    def wants_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def names_a_tool(self) -> bool:
        return isinstance(self.tool_choice, dict)

    @property
    def thinking(self) -> bool:
        return (self.chat_template_kwargs or {}).get("enable_thinking") is not False

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`, with text or token ids, one prompt or several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token_id for token_id in self.prompt if isinstance(token_id, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class TokenizeRequest(_Request):
    """`POST /tokenize`: a plain prompt or a chat."""

    prompt: str | None = None
    add_special_tokens: bool = True
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(_Request):
    """`POST /detokenize`."""

    tokens: list[int]


def validation_message(error: ValidationError) -> tuple[str, str]:
    """(message, path of the first mistake) in vLLM's words."""
    lines = []
    paths = []
    for mistake in error.errors(include_url=False, include_context=False):
        path = ".".join(["body", *map(str, mistake["loc"])])
        given = mistake["input"]
        shown = f"<dict of {len(given)} items>" if isinstance(given, dict) else given
        lines.append(f"  { {'type': mistake['type'], 'loc': path, 'msg': mistake['msg'], 'input': shown} }")
        paths.append(path)
    return "\n".join([f"{len(lines)} validation error{'s' if len(lines) > 1 else ''}:", *lines]), paths[0]
