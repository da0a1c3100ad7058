"""Objects to bytes and back: MessagePack with packed number arrays, zstd, a checksum and a version.

Layout: `PQ`, one version byte, CRC-32 of what follows (little endian), then a zstd frame of MessagePack. Lists of
integers under keys that end in `_ids`, and under `loss_mask`, are int32 (extension 1); lists of numbers under
`logprobs` and `teacher_logprobs` are float32 (extension 2), in which a missing value is NaN. Both are four planes, one
after the other: the lowest bytes of all values, then the second lowest and so on, because the high bytes of token ids
are much alike. Engines compute log-probabilities in float32, so nothing is lost; any other list of numbers stays as it
is. An integer beyond 64 bits, which a harness may send, is its decimal text (extension 3).
"""

from __future__ import annotations

import struct
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from polarq.contracts.trajectory import Trajectory
from polarq.errors import PayloadCorrupt

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAGIC = b"PQ"
VERSION = 1
_HEADER = struct.Struct("<2sBI")
_LEVEL = 1  # higher levels gain nothing on token ids and cost twice the time
_INT32, _FLOAT32, _BIG_INT = 1, 2, 3
_encode = msgspec.msgpack.Encoder().encode
_kept = threading.local()
_INT32_LIST = list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]]


def pack(obj: Any) -> bytes:
    """Encodes a JSON-like tree (dict, list, str, int, float, bool, None; bytes too)."""
    return pack_ready(_packed(obj))


def pack_ready(tree: Any) -> bytes:
    """`pack` for a tree whose ids and log-probabilities are already `packed_ids` and `packed_floats`."""
    try:
        encoded = _encode(tree)
    except OverflowError:
        encoded = _encode(_small(tree))
    # Making a compressor costs more than a small record's compression; one serves a thread's records in turn.
    compressor = getattr(_kept, "compressor", None)
    if compressor is None:
        compressor = _kept.compressor = zstd.ZstdCompressor(level=_LEVEL)
    body = compressor.compress(encoded, mode=zstd.ZstdCompressor.FLUSH_FRAME)
    return _HEADER.pack(MAGIC, VERSION, zlib.crc32(body)) + body


def packed_ids(ids: Sequence[int] | npt.NDArray[np.int32]) -> msgspec.msgpack.Ext:
    """Numbers of 32 bits."""
    return msgspec.msgpack.Ext(_INT32, _planes(np.asarray(ids, dtype="<i4")))


def packed_floats(values: Sequence[float | None]) -> msgspec.msgpack.Ext:
    """Numbers, None for a missing one. What is beyond float32 becomes infinite, which readers treat as missing."""
    with np.errstate(over="ignore"):
        return msgspec.msgpack.Ext(_FLOAT32, _planes(np.array(values, dtype="<f4")))


def unpack(data: bytes) -> Any:
    """The tree that `pack` was given. Raises `PayloadCorrupt` when a byte of it changed."""
    if len(data) < _HEADER.size:
        raise PayloadCorrupt(f"a payload of {len(data)} bytes is cut short")
    magic, version, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise PayloadCorrupt("these bytes are not a polarq payload")
    if version != VERSION:
        raise PayloadCorrupt(f"payload version {version} is not known here (this polarq reads {VERSION}): upgrade it")
    body = memoryview(data)[_HEADER.size :]
    if zlib.crc32(body) != checksum:
        raise PayloadCorrupt("a payload does not match its checksum")
    try:
        return msgspec.msgpack.decode(zstd.decompress(body), ext_hook=_unpacked)
    except (zstd.ZstdError, msgspec.DecodeError) as exc:
        raise PayloadCorrupt(f"a payload cannot be decoded: {exc}") from exc


def encode_trajectory(trajectory: Trajectory) -> bytes:
    return pack(trajectory.model_dump(mode="json"))


def decode_trajectory(data: bytes) -> Trajectory:
    """Raises `PayloadCorrupt`."""
    try:
        return Trajectory.stored(unpack(data))
    except ValidationError as exc:
        raise PayloadCorrupt(f"a stored trajectory is not valid: {exc.errors()[0]['msg']}") from exc


def _packed(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _packed(item, name) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    if value and (key.endswith("_ids") or key == "loss_mask"):
        return _int32(value)
    if value and key in {"logprobs", "teacher_logprobs"}:
        return _float32(value)
    return [_packed(item) if isinstance(item, (dict, list)) else item for item in value]


def _int32(values: list[Any]) -> Any:
    # Names ending in _ids also occur in foreign trees (file_ids: ["a"]); those stay lists.
    try:
        msgspec.convert(values, _INT32_LIST)
    except msgspec.ValidationError:
        return [_packed(item) for item in values]
    return packed_ids(values)


def _float32(values: list[Any]) -> Any:
    if not set(map(type, values)) <= {float, int, type(None)}:
        return [_packed(item) for item in values]
    return packed_floats(values)


def _planes(array: npt.NDArray[Any]) -> bytes:
    return array.view(np.uint8).reshape(-1, 4).T.tobytes()


def _values(planes: memoryview, dtype: str) -> npt.NDArray[Any]:
    if len(planes) % 4:
        raise PayloadCorrupt("a payload holds a number that is cut")
    rows = np.frombuffer(planes, dtype=np.uint8).reshape(4, len(planes) // 4)
    return np.ascontiguousarray(rows.T).view(dtype).ravel()


def _small(value: Any) -> Any:
    """The tree without integers that MessagePack cannot hold."""
    if isinstance(value, dict):
        return {key: _small(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_small(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_BIG_INT, str(value).encode())
    return value


def _unpacked(code: int, data: memoryview) -> Any:
    if code == _INT32:
        return _values(data, "<i4").tolist()
    if code == _FLOAT32:
        array = _values(data, "<f4")
        values: list[float | None] = array.tolist()
        for index in np.flatnonzero(np.isnan(array)).tolist():
            values[index] = None
        return values
    if code == _BIG_INT:
        return int(bytes(data))
    raise PayloadCorrupt(f"a payload holds an unknown kind of value ({code})")
