"""Which parsers of vLLM and SGLang fit which model: what a launch command cannot do without for tools and thinking.

Read from the engines' own lists of parsers (vLLM 0.33, SGLang 0.5.23) and the models' cards. The first family that
matches holds, so that the narrower ones come first.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

EngineName = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names for `--tool-call-parser` and `--reasoning-parser`; None: the family needs none."""

    tool: str | None
    reasoning: str | None


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose name (or path, or model type) matches `pattern`, in lower case."""

    pattern: str
    vllm: Parsers
    sglang: Parsers

    def parsers(self, engine: EngineName) -> Parsers:
        return self.vllm if engine == "vllm" else self.sglang


FAMILIES = (
    Family(r"qwen3[-_.]?coder", Parsers("qwen3_coder", None), Parsers("qwen3_coder", None)),
    Family(r"qwen3[._][5-9]", Parsers("qwen3_coder", "qwen3"), Parsers("qwen3_coder", "qwen3")),
    Family(r"qwen3.*instruct", Parsers("hermes", None), Parsers("qwen25", None)),
    Family(r"qwen3.*thinking", Parsers("hermes", "qwen3"), Parsers("qwen25", "qwen3-thinking")),
    Family(r"qwq", Parsers("hermes", "deepseek_r1"), Parsers("qwen25", "deepseek-r1")),
    Family(r"qwen3", Parsers("hermes", "qwen3"), Parsers("qwen25", "qwen3")),
    Family(r"qwen-?2", Parsers("hermes", None), Parsers("qwen25", None)),
    Family(r"hermes", Parsers("hermes", None), Parsers("hermes", None)),
    Family(r"deepseek.*v4", Parsers("deepseek_v4", "deepseek_v4"), Parsers("deepseekv4", "deepseek-v4")),
    Family(r"deepseek.*v3[._]2", Parsers("deepseek_v32", "deepseek_v3"), Parsers("deepseekv32", "deepseek-v3")),
    Family(r"deepseek.*v3[._]1", Parsers("deepseek_v31", "deepseek_v3"), Parsers("deepseekv31", "deepseek-v3")),
    Family(r"deepseek.*r1", Parsers("deepseek_v3", "deepseek_r1"), Parsers("deepseekv3", "deepseek-r1")),
    Family(r"deepseek.*v3", Parsers("deepseek_v3", None), Parsers("deepseekv3", None)),
    Family(r"glm-?(4[._]7|5)", Parsers("glm47", "glm45"), Parsers("glm47", "glm45")),
    Family(r"glm-?4", Parsers("glm45", "glm45"), Parsers("glm45", "glm45")),
    Family(r"kimi-?k2", Parsers("kimi_k2", "kimi_k2"), Parsers("kimi_k2", "kimi_k2")),
    Family(r"gpt[-_]?oss", Parsers("openai", "openai_gptoss"), Parsers("gpt-oss", "gpt-oss")),
    Family(r"minimax[-_]?m2", Parsers("minimax_m2", "minimax_m2"), Parsers("minimax-m2", "minimax")),
    Family(r"nemotron-?3", Parsers("qwen3_coder", "nemotron_v3"), Parsers("qwen3_coder", "nemotron_3")),
    Family(r"step-?3", Parsers("step3", "step3"), Parsers("step3", "step3")),
    Family(r"llama-?3", Parsers("llama3_json", None), Parsers("llama3", None)),
    Family(r"mistral|ministral|devstral", Parsers("mistral", None), Parsers("mistral", None)),
)


def family_of(model: str) -> Family | None:
    """By the model's name or path; for a folder also by the model type in its config.json."""
    for name in (model.lower(), _model_type(Path(model))):
        for family in FAMILIES:
            if name and re.search(family.pattern, name):
                return family
    return None


def _model_type(folder: Path) -> str:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind.lower() if isinstance(kind, str) else ""
