"""One captured model call: exactly what the engine conditioned on, exactly what it sampled."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from polarq.contracts.base import Contract


class CompletionLabel(StrEnum):
    """What a captured call is worth to a trainer."""

    TRAIN = "train"
    SIDE = "side"
    """Traffic beside the task: titles, probes, compaction (`side_kind` says which)."""
    ABORTED = "aborted"
    """The engine or the harness ended it early; the ids sampled until then are kept."""


class SideKind(StrEnum):
    """Traffic beside the task that the proxy's rules tell from its steps."""

    COMMIT_MESSAGE = "commit_message"
    COMPACTION = "compaction"
    PROBE = "probe"
    REFLECTION = "reflection"
    ROUTER = "router"
    TITLE = "title"


class VersionSpan(Contract):
    """Output tokens [start, end) were sampled under policy `version` (the engine's own opaque string)."""

    version: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class Image(Contract):
    """A picture in a sequence, by reference: its bytes are in the messages, and the ids [start, end) stand for it."""

    sha256: str
    """Of its bytes as they were sent."""
    media_type: str = ""
    size: int = Field(ge=0)
    """Bytes."""
    start: int | None = Field(None, ge=0)
    """None: no place could be told (see the topology's `image_token_id`)."""
    end: int | None = Field(None, ge=0)


class Usage(Contract):
    """Token counts as the engine reported them; None where it did not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    """Those of the completion tokens that were thinking. vLLM counts a whole answer and a streamed one a little
    differently, so this is nothing to build on."""


class Completion(Contract):
    """A model call as recorded by the proxy before its answer reached the harness.

    `sampled_ids` includes the end-of-turn id. `logprobs` has one entry per sampled id; None marks a value that the
    engine did not give or that is not a finite number (such a completion is not trainable, and nothing is filled in).
    """

    schema_version: int = 1
    rollout_id: str
    attempt: int = Field(ge=1)
    seq: int = Field(ge=0)
    """Order in which the requests arrived, from 0, within the attempt."""
    completion_id: str
    parent: int | None = None
    """seq of the earlier call whose prompt and sampled ids this prompt extends, if any."""
    retry_of: int | None = None

    requested_at: datetime
    answered_at: datetime
    latency_s: float = Field(ge=0)

    dialect: str
    path: str
    request_digest: str
    """The same for every repeat of a request, whatever way its answer travels; tells repeats from other calls."""
    streamed: bool = False

    messages: list[dict[str, Any]] = []
    """As the harness sent them (normalised to chat messages)."""
    tools: list[dict[str, Any]] | None = None
    reply: dict[str, Any] = {}
    """The assistant message as the harness got it."""

    prompt_ids: list[int] = []
    sampled_ids: list[int] = []
    logprobs: list[float | None] = []
    images: list[Image] = []
    """The pictures of the prompt, in order, with their places in `prompt_ids`."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None
    sampling: dict[str, Any] = {}
    """Sampling parameters that were really sent to the engine."""
    logprobs_mode: str = "unknown"
    grammar: str | None = None
    """What constrained sampling beyond the policy (tool_choice, response_format...), if anything did."""
    weight_versions: list[VersionSpan] = []
    usage: Usage = Usage()
    engine: str = ""
    model_served: str = ""
    model_requested: str = ""

    exact: bool = False
    """The proxy sent the prompt as token ids: the ids of the branch this call continues, and what was new."""
    exact_missed: str | None = None
    """Why a call in exact mode was rendered by the engine after all; None: it was not, or the mode is off."""
    forged: int = 0
    """Control tokens that the text of the newest messages brought into the prompt (counted in exact mode)."""
    overridden: dict[str, Any] = {}
    """Sampling parameters that the harness asked for and the rollout's rules replaced or limited: its own values."""

    label: CompletionLabel = CompletionLabel.TRAIN
    side_kind: str | None = None
    """A `SideKind`, or `pool`: the harness asked for a frozen model by its alias."""
    continued: int = 0
    """How often sampling was cut (new weights) and went on from the ids sampled until then; `weight_versions` say
    which policy sampled which of them."""
    incomplete: bool = False
    """The answer broke off before its end."""
    untrainable: str | None = None
    """Why this call must not be trained on; None: it may."""

    @property
    def trainable(self) -> bool:
        return self.untrainable is None and self.label is CompletionLabel.TRAIN and bool(self.sampled_ids)
