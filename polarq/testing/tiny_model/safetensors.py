"""Writes a safetensors file with NumPy alone, so that making the model needs neither torch nor transformers.

Format: the header's length (8 bytes, little-endian), a JSON header padded with spaces to a multiple of 8, then the
tensors' bytes, row-major. Source: the format section of the safetensors project's README.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Write float32 `tensors` by name, in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)))
        file.write(head)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, dtype="<f4").tobytes())
