"""Why a call was not answered. Dialects turn these into their own error shapes."""

from __future__ import annotations

from enum import StrEnum

from polarq.errors import PolarqError


class FaultKind(StrEnum):
    """What went wrong, and so what a harness should do about it."""

    BAD_REQUEST = "bad_request"
    """The request cannot be used; the same one will not work again."""
    NO_SUCH_ROUTE = "no_such_route"
    UPGRADE = "upgrade"
    """A websocket was asked for; there is only plain HTTP."""
    NO_SESSION = "no_session"
    """The session is unknown, closed or expired: answered so that harnesses stop, not so that they try again."""
    TOO_MANY_CALLS = "too_many_calls"
    TOO_FAST = "too_fast"
    PAUSED = "paused"
    """The policy's weights are being changed, and that takes longer than a call is held back."""
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    """The request's body stopped coming."""
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    CONTEXT_OVERFLOW = "context_overflow"
    REFUSED = "refused"
    """The engine does not accept the request."""
    MISCONFIGURED = "misconfigured"
    """Model name or key of the node's engine is wrong: only the operator can help."""
    OVERLOADED = "overloaded"
    ABORTED = "aborted"
    """The engine gave up the call in the middle (paused, weights changed)."""
    ENGINE_FAULT = "engine_fault"
    ENGINE_DOWN = "engine_down"
    TIMED_OUT = "timed_out"
    STORE_DOWN = "store_down"
    INTERNAL = "internal"


STATUS = {
    FaultKind.BAD_REQUEST: 400,
    FaultKind.NO_SUCH_ROUTE: 404,
    FaultKind.NO_SESSION: 404,
    FaultKind.TOO_MANY_CALLS: 404,  # harnesses answer a 400 by variants of the request
    FaultKind.TOO_FAST: 429,
    FaultKind.PAUSED: 503,
    FaultKind.UPGRADE: 426,
    FaultKind.TOO_LARGE: 413,
    FaultKind.TOO_SLOW: 408,
    FaultKind.UNSUPPORTED_ENCODING: 415,
    FaultKind.CONTEXT_OVERFLOW: 400,
    FaultKind.REFUSED: 400,
    FaultKind.MISCONFIGURED: 404,  # the one status that every harness gives up on
    FaultKind.OVERLOADED: 503,
    FaultKind.ABORTED: 503,
    FaultKind.ENGINE_FAULT: 502,
    FaultKind.ENGINE_DOWN: 503,
    FaultKind.TIMED_OUT: 504,
    FaultKind.STORE_DOWN: 503,
    FaultKind.INTERNAL: 500,
}

RETRY_AFTER_S = 2.0
_RETRYABLE = frozenset(
    {
        FaultKind.TOO_FAST,
        FaultKind.PAUSED,
        FaultKind.OVERLOADED,
        FaultKind.ABORTED,
        FaultKind.ENGINE_DOWN,
        FaultKind.STORE_DOWN,
    }
)

MODEL_KINDS = frozenset(
    {
        FaultKind.MISCONFIGURED,
        FaultKind.OVERLOADED,
        FaultKind.ABORTED,
        FaultKind.ENGINE_FAULT,
        FaultKind.ENGINE_DOWN,
        FaultKind.TIMED_OUT,
    }
)
"""Faults of the inference side, which the rollout's outcome may have to name."""

NOTED_KINDS = MODEL_KINDS | {FaultKind.CONTEXT_OVERFLOW, FaultKind.REFUSED, FaultKind.TOO_MANY_CALLS}
"""What a rollout's outcome may have to name: a harness may end well after one of them."""


class CallFault(PolarqError):
    """A call that cannot be answered. The message is one line for whoever reads the harness's log."""

    def __init__(
        self,
        kind: FaultKind,
        message: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
        param: str | None = None,
        max_context: int | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        self.kind = kind
        self.message = " ".join(message.split())
        self.status = status or STATUS[kind]
        self.retry_after_s = retry_after_s if retry_after_s is not None or kind not in _RETRYABLE else RETRY_AFTER_S
        self.param = param
        self.max_context = max_context
        self.prompt_tokens = prompt_tokens
        super().__init__(self.message)
