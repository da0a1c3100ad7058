"""Answers of a real vLLM server, from tests/fixtures/vllm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "fixtures" / "vllm"


@dataclass
class Captured:
    request: dict[str, Any]
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def tree(self) -> Any:
        return json.loads(self.data)


def whole(name: str) -> Captured:
    capture = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    body = json.dumps(capture["response"]).encode()
    return Captured(capture["request"]["body"], capture["status"], capture["response_headers"], body)


def stream(name: str) -> bytes:
    """The raw body, without the comment lines that describe the capture."""
    lines = (FOLDER / f"{name}.sse").read_bytes().split(b"\n")
    return b"\n".join(line for line in lines if not line.startswith(b"#"))
