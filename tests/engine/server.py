"""The inference server under test: one that this suite starts, or one that runs somewhere and is named by its URL.

All that the environment says is read here:

    POLARQ_ENGINE             vllm (default) or sglang
    POLARQ_ENGINE_URL         a server that runs already; without it a vLLM is started here
    POLARQ_ENGINE_MODEL       the model to ask that server for; else the only one it serves
    POLARQ_ENGINE_CHECKPOINT  the folder of that model, for comparing with a plain forward pass; else those
                              comparisons are left out
    POLARQ_ENGINE_TOLERANCE   largest accepted difference of a log-probability; 1e-4 is for float32
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import httpx
import pytest

EngineName = Literal["vllm", "sglang"]
TOLERANCE = 1e-4
"""Largest accepted absolute difference of two log-probabilities (design/tokens.md, "Proof")."""
ANSWER_S = 120.0

_METRICS = {
    "vllm": ("vllm:generation_tokens_total", "vllm:request_success_total", "vllm:num_requests_running"),
    "sglang": ("sglang:generation_tokens_total", "sglang:num_requests_total", "sglang:num_running_reqs"),
}


@dataclass(frozen=True)
class Target:
    """Which server is to be tested."""

    engine: EngineName
    url: str | None
    model: str | None
    checkpoint: Path | None
    tolerance: float

    @classmethod
    def from_env(cls) -> Target:
        """Raises ValueError in one line."""
        engine = os.environ.get("POLARQ_ENGINE") or "vllm"
        url = (os.environ.get("POLARQ_ENGINE_URL") or "").rstrip("/").removesuffix("/v1") or None
        checkpoint = os.environ.get("POLARQ_ENGINE_CHECKPOINT")
        if engine not in {"vllm", "sglang"}:
            raise ValueError(f"POLARQ_ENGINE is '{engine}': say vllm or sglang")
        if engine == "sglang" and url is None:
            raise ValueError("an SGLang server is not started here: say where one runs with POLARQ_ENGINE_URL")
        return cls(
            engine="sglang" if engine == "sglang" else "vllm",
            url=url,
            model=os.environ.get("POLARQ_ENGINE_MODEL") or None,
            checkpoint=Path(checkpoint) if checkpoint else None,
            tolerance=float(os.environ.get("POLARQ_ENGINE_TOLERANCE") or TOLERANCE),
        )


@dataclass(frozen=True)
class Server:
    """Where a running server is and what it serves. Lengths in tokens."""

    engine: EngineName
    base_url: str
    model: str
    context: int
    checkpoint: Path | None
    """The folder of the model; None: it is not here."""
    started_here: bool
    """With the tiny model and the tokenizer that polarq ships."""

    @classmethod
    def at(cls, target: Target) -> Server:
        """The server of `target.url`. Raises ValueError when it serves no such model."""
        assert target.url is not None
        answer = httpx.get(f"{target.url}/v1/models", timeout=ANSWER_S).raise_for_status().json()
        served = {item["id"]: item.get("max_model_len") for item in answer["data"]}
        model = target.model or next(iter(served), "")
        if model not in served or not served[model]:
            raise ValueError(f"{target.url} serves {', '.join(served) or 'no model'}: set POLARQ_ENGINE_MODEL")
        return cls(target.engine, target.url, model, served[model], target.checkpoint, started_here=False)

    def lacks(self, reason: str) -> NoReturn:
        """Ends a test that needs what this server has not: somebody else's server may be without it, and the test is
        skipped; one that the suite itself has started must not be."""
        if self.started_here:
            pytest.fail(f"{reason}; a server that is started here must have it", pytrace=False)
        pytest.skip(reason)

    @property
    def chat_url(self) -> str:
        return f"{self.base_url}/v1/chat/completions"

    def sampled_tokens(self) -> float:
        """How many tokens the server has sampled since its start, by its own metric."""
        return self._metric(0)

    def answered_requests(self) -> float:
        """How many requests the server has finished since its start, by its own metric."""
        return self._metric(1)

    def running_requests(self) -> float:
        """How many requests the server samples for right now, by its own metric."""
        return self._metric(2)

    def weight_version(self) -> str:
        path = "/weight_info" if self.engine == "vllm" else "/model_info"
        return str(httpx.get(f"{self.base_url}{path}", timeout=ANSWER_S).raise_for_status().json()["weight_version"])

    def set_weight_version(self, version: str) -> None:
        """Only the name changes; what runs goes on."""
        self.control("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def hold(self) -> None:
        """What is being sampled stands still and what is asked waits, until `release`."""
        if self.engine == "vllm":
            self.control("/pause?mode=keep")
        else:
            self.control("/pause_generation", {"mode": "in_place"})

    def release(self) -> None:
        if self.engine == "vllm":
            self.control("/resume")
        else:
            self.control("/continue_generation", {})

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """No call ends by itself meanwhile, however slow the rest of the machine is."""
        await asyncio.to_thread(self.hold)
        try:
            yield
        finally:
            await asyncio.to_thread(self.release)

    def control(self, path: str, body: dict[str, Any] | None = None) -> None:
        """One of the routes by which a trainer steers it."""
        httpx.post(f"{self.base_url}{path}", json=body, timeout=ANSWER_S).raise_for_status()

    def _metric(self, place: int) -> float:
        """The sum over all labels. Skips the test where the server publishes none (SGLang: --enable-metrics)."""
        response = httpx.get(f"{self.base_url}/metrics", timeout=ANSWER_S)
        name = _METRICS[self.engine][place]
        if response.status_code == 404 or name not in response.text:
            self.lacks(f"{self.base_url} publishes no {name}")
        found = (line for line in response.text.splitlines() if line.startswith((name + "{", name + " ")))
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)
