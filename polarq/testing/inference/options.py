"""How one scripted server behaves."""

from __future__ import annotations

from pydantic import Field

from polarq.contracts.base import Contract
from polarq.testing.inference.scenario import Scenario, load_scenario


class ServerOptions(Contract):
    """`scenario` is what the model says; everything else is what the server claims and how it behaves.

    `tokens_per_s` paces answers whose script gives no pace; None samples them at once. `drift_seed` overrides the
    scenario's. `keep_thinking=False` makes the chat template drop the thinking of earlier turns. With
    `token_ids=False` the server is too old to know `return_token_ids`; with `token_in=False` it ignores
    `kv_transfer_params.prompt_token_ids`.
    """

    scenario: Scenario = Field(default_factory=lambda: load_scenario("echo"))
    served_model_name: str = Field("scripted", min_length=1, pattern=r"^[^:]+$")
    max_model_len: int = Field(32768, ge=16)
    tokens_per_s: float | None = Field(None, gt=0)
    drift_seed: int | None = None
    keep_thinking: bool = True
    token_ids: bool = True
    token_in: bool = True
    api_key: str | None = Field(None, min_length=1)
    version: str = "0.33.0"
    ledger_limit: int = Field(10_000, ge=1)

    @property
    def fingerprint(self) -> str:
        return f"vllm-{self.version}-scripted"
