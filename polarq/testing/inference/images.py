"""Pictures in a request. The scripted model sees none; its ledger says which ones came."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def images_of(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """SHA-256 of each image part's bytes, in order; of what is no base64 data URL, that of the URL."""
    return tuple(hashlib.sha256(data).hexdigest() for data in _images(messages))


def _images(messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") == "image_url":
                image = part.get("image_url")
                yield _bytes(str(image.get("url", "") if isinstance(image, Mapping) else image))


def _bytes(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        return url.encode()
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error:
        return url.encode()
