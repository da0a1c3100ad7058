"""The requests that SGLang understands. Like SGLang this ignores fields it does not know; those of later releases too
(see `Known`)."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polarq.testing.inference.acting import ApiError
from polarq.testing.inference.options import ServerOptions
from polarq.testing.inference.requests import ChatRequest, CompletionRequest, SamplingRequest


class SglangChatRequest(ChatRequest):
    """`POST /v1/chat/completions`."""

    input_ids: list[Any] | None = None
    no_stop_trim: bool = False
    separate_reasoning: bool = True
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    return_input_ids_in_sglext: bool = False
    return_output_ids_in_sglext: bool = False
    regex: str | None = None

    @property
    def forced(self) -> str | None:
        """What a pattern without any choice matches."""
        if self.regex is None or re.search(r"(?<!\\)[.^$*+?{}\[\]|()]", self.regex):
            return None
        return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), self.regex)


class SglangCompletionRequest(CompletionRequest):
    """`POST /v1/completions`."""


class NativeSampling(BaseModel):
    """`sampling_params` of `/generate`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    max_new_tokens: int | None = Field(128, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool = False


class NativeRequest(BaseModel):
    """`POST /generate`, for one prompt."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    text: str | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling = NativeSampling()
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1)
    return_prompt_token_ids: bool = False
    return_text_in_logprobs: bool = False
    stream: bool = False
    session_id: str | None = None

    @property
    def plain(self) -> SamplingRequest:
        """The part that every kind of request has."""
        chosen = self.sampling_params
        return SamplingRequest(
            stop=chosen.stop,
            stop_token_ids=chosen.stop_token_ids,
            include_stop_str_in_output=chosen.no_stop_trim,
            session_id=self.session_id,
        )


class SglangTokenizeRequest(BaseModel):
    """`POST /tokenize`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True


class PauseRequest(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortRequest(BaseModel):
    rid: str | None = None
    abort_all: bool = False


class VersionRequest(BaseModel):
    new_version: str = Field(min_length=1)
    abort_all_requests: bool = True


class Known:
    """What of a request this release acts on. Raises `ApiError` where it refuses to stream ids."""

    def __init__(self, options: ServerOptions, body: SglangChatRequest) -> None:
        at_all = options.token_ids
        self.prompt_ids = at_all and options.since(0, 5, 13) and body.return_prompt_token_ids
        self.meta_info = at_all and options.since(0, 5, 13) and body.return_meta_info
        self.token_ids = at_all and options.since(0, 5, 17) and bool(body.return_token_ids)
        self.token_ids_name = "response_token_ids" if options.since(0, 5, 18) else "token_ids"
        self.sglext_input = at_all and options.since(0, 5, 20) and body.return_input_ids_in_sglext
        self.sglext_output = at_all and options.since(0, 5, 20) and body.return_output_ids_in_sglext
        refused = {
            "return_prompt_token_ids": self.prompt_ids,
            "return_token_ids": self.token_ids,
            "return_meta_info": self.meta_info,
        }
        for name, asked in refused.items():
            if asked and body.stream:
                message = f"{name} is not supported with streaming. Please set stream=false when using {name}=true."
                raise ApiError(400, message, "BadRequestError")
