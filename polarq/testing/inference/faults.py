"""What can go wrong with an inference server, one small model per fault.

A turn, a script or a whole scenario names one; `times` limits it to the first N requests of that turn in each
conversation, so that a retry is answered well. Without `times` it happens every time.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polarq.contracts.base import Contract


class _Fault(Contract):
    times: int | None = Field(None, ge=1)
    """Only the first so many requests of one turn in one conversation; None: every request."""


class HttpStatus(_Fault):
    """Answers an error status instead of sampling; `retry_after_s` becomes the Retry-After header."""

    kind: Literal["http_status"]
    status: int = Field(503, ge=400, le=599)
    retry_after_s: float | None = Field(None, ge=0)
    message: str = "the scripted server was told to refuse this request"


class CloseBefore(_Fault):
    """Closes the connection without a byte of an answer; nothing was sampled."""

    kind: Literal["close_before"]


class CloseAfterSampling(_Fault):
    """Samples everything, then closes the connection without a byte of an answer."""

    kind: Literal["close_after_sampling"]


class CutAtByte(_Fault):
    """Closes the connection after `byte` bytes of the body, wherever that falls (unary and streamed)."""

    kind: Literal["cut_at_byte"]
    byte: int = Field(ge=1)


class CutAfterTokens(_Fault):
    """Closes the connection in a stream after so many tokens; not streamed: without a byte of an answer."""

    kind: Literal["cut_after_tokens"]
    after_tokens: int = Field(1, ge=0)


class Hang(_Fault):
    """Falls silent and never ends by itself: before the headers, or in a stream after so many tokens."""

    kind: Literal["hang"]
    after_tokens: int | None = Field(None, ge=0)


class Omit(_Fault):
    """Leaves fields out, as a server does that is too old to know them and ignores the request's wish."""

    kind: Literal["omit"]
    fields: tuple[Literal["prompt_token_ids", "token_ids", "logprobs", "usage"], ...] = Field(
        ("prompt_token_ids", "token_ids"), min_length=1
    )


class LogprobCount(_Fault):
    """One log-probability too many or too few for the sampled ids."""

    kind: Literal["logprob_count"]
    delta: Literal[-1, 1] = -1


class BadLogprob(_Fault):
    """One log-probability is not a number that can be trained on; -9999.0 is vLLM's word for unknown."""

    kind: Literal["bad_logprob"]
    value: Literal["NaN", "-Infinity", "null", "-9999.0"] = "NaN"
    position: int = Field(0, ge=0)


class WrongUsage(_Fault):
    """`usage.completion_tokens` (and the total) is off by `delta`."""

    kind: Literal["wrong_usage"]
    delta: int = 1


class StreamError(_Fault):
    """An error event in the stream after so many tokens, then [DONE]; not streamed: an HTTP 500."""

    kind: Literal["stream_error"]
    after_tokens: int = Field(1, ge=0)
    message: str = "the scripted engine died"


class Abort(_Fault):
    """The engine aborts after so many tokens: HTTP 200 with finish_reason "abort" and the ids so far."""

    kind: Literal["abort"]
    after_tokens: int = Field(1, ge=0)


class NotJson(_Fault):
    """HTTP 200 with a page of HTML, as from a wrong address or a proxy in between."""

    kind: Literal["not_json"]


class OtherModel(_Fault):
    """The answer names another model than the server lists."""

    kind: Literal["other_model"]
    model: str = "some-other-model"


class WrongEcho(_Fault):
    """`prompt_token_ids` is not what the engine was sent: its last id is missing."""

    kind: Literal["wrong_echo"]


Fault = Annotated[
    HttpStatus
    | CloseBefore
    | CloseAfterSampling
    | CutAtByte
    | CutAfterTokens
    | Hang
    | Omit
    | LogprobCount
    | BadLogprob
    | WrongUsage
    | StreamError
    | Abort
    | NotJson
    | OtherModel
    | WrongEcho,
    Field(discriminator="kind"),
]
