"""Pictures for tests: messages that hold them, and references to them."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from polarq.contracts import Image

PAD = 7
"""The id that stands for pictures."""


def shown(*pictures: bytes, text: str = "look") -> dict[str, Any]:
    """A user's message with these pictures."""
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(one).decode()}"}}
        for one in pictures
    ]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


def image(data: bytes, start: int | None = None, end: int | None = None) -> Image:
    return Image(sha256=hashlib.sha256(data).hexdigest(), media_type="image/png", size=len(data), start=start, end=end)
