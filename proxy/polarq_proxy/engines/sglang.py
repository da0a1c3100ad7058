"""SGLang engine."""

from __future__ import annotations

from typing import ClassVar

from polarq_proxy.engines.vllm import VllmEngine


class SglangEngine(VllmEngine):
    name: ClassVar[str] = "sglang"
