"""How one scripted server behaves."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from polarq.contracts.base import Contract
from polarq.testing.inference.scenario import Scenario, load_scenario

NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23"}


class ServerOptions(Contract):
    """`scenario` is what the model says; everything else is what the server claims and how it behaves.

    `tokens_per_s` paces answers whose script gives no pace; None samples them at once. `drift_seed` overrides the
    scenario's. `keep_thinking=False` makes the chat template drop the thinking of earlier turns. With
    `token_ids=False` the server is too old to know `return_token_ids`; with `token_in=False` it ignores
    `kv_transfer_params.prompt_token_ids`.

    `engine` and `version` say whose routes and JSON these are: a field is known from the release on that brought it.
    `scale_out` opens vLLM's /inference/v1/generate, render and derender. `start_token` makes both the chat template
    and the tokenizer write a start token; a rendered chat has one, plain text one more than it holds.
    For SGLang: `incremental_streaming` is its flag of that name, `short_logprobs` drops the last entry of
    `logprobs.content` as some releases did.
    """

    engine: Literal["vllm", "sglang"] = "vllm"

    scenario: Scenario = Field(default_factory=lambda: load_scenario("echo"))
    served_model_name: str = Field("scripted", min_length=1, pattern=r"^[^:]+$")
    max_model_len: int = Field(32768, ge=16)
    tokens_per_s: float | None = Field(None, gt=0)
    drift_seed: int | None = None
    keep_thinking: bool = True
    token_ids: bool = True
    token_in: bool = True
    api_key: str | None = Field(None, min_length=1)
    version: str = Field(NEWEST["vllm"], pattern=r"^\d+\.\d+\.\d+")
    ledger_limit: int = Field(10_000, ge=1)
    scale_out: bool = False
    start_token: bool = False
    incremental_streaming: bool = False
    short_logprobs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _newest_of_its_engine(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" not in data and data.get("engine") in NEWEST:
            return {**data, "version": NEWEST[data["engine"]]}
        return data

    def since(self, *release: int) -> bool:
        """Whether the server is that release or a later one."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:3]) >= release

    @property
    def fingerprint(self) -> str:
        return f"vllm-{self.version}-scripted"
