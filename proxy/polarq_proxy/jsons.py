"""JSON as it comes and as it should be.

Engines written in Python may send the bare words NaN, Infinity and -Infinity; harnesses written in JavaScript may send
halves of surrogate pairs. Both are read here, and neither is ever written: what polarq emits is strict JSON in UTF-8.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

import msgspec


class NotJson(ValueError):
    """The bytes are not JSON."""


class InJson(ABC):
    """Something that is JSON already."""

    __slots__ = ()

    @abstractmethod
    def as_json(self) -> bytes | memoryview:
        """Strict JSON in UTF-8."""


def _as_json(value: object) -> msgspec.Raw:
    if not isinstance(value, InJson):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return msgspec.Raw(value.as_json())


LENIENT_BYTES = 8 * 1024 * 1024
"""The lenient reader is slow, and holds up everybody while it reads."""
_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder(enc_hook=_as_json)


def decode(data: bytes | bytearray) -> Any:
    """Reads JSON; numbers may be NaN or infinite. Raises `NotJson` with the parser's own short reason."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        first = exc
    if len(data) > LENIENT_BYTES:
        raise NotJson(str(first) or type(first).__name__)
    # The strict and fast reader stumbled: what is left to the lenient one are bare words and lone surrogates.
    try:
        return _whole_text(json.loads(data.decode("utf-8")))
    except (ValueError, RecursionError):
        raise NotJson(str(first) or type(first).__name__) from None


def encode(value: Any) -> bytes:
    """Strict JSON: a number that is not finite becomes null."""
    return _encoder.encode(value)


def _whole_text(value: Any) -> Any:
    """The same tree with U+FFFD for each half of a pair, which UTF-8 cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_text(item) for item in value]
    if isinstance(value, dict):
        return {_whole_text(key): _whole_text(item) for key, item in value.items()}
    return value
