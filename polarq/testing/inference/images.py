"""Pictures in a request. The scripted model sees none; its ledger says which ones came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polarq.trajectory import images

IMAGE_TOKENS = 12
"""How many ids stand for a picture here. With real processors it depends on the picture's size."""


def images_of(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """SHA-256 of each image part's bytes, in order; of what is no base64 data URL, that of the URL."""
    return tuple(image.sha256 for image in images.images_of(messages))


def expanded(ids: Sequence[int], image_token_id: int) -> list[int]:
    """A rendered prompt as the model is given it: each picture's one id as often as its processor wants it."""
    if image_token_id not in ids:
        return list(ids)
    return [one for token in ids for one in [token] * (IMAGE_TOKENS if token == image_token_id else 1)]


def features_of(prompt_ids: Sequence[int], hashes: Sequence[str], image_token_id: int) -> dict[str, Any] | None:
    """What vLLM's render says of a prompt's pictures, without their tensors; None: it has none."""
    if not hashes:
        return None
    starts = [at for at, token in enumerate(prompt_ids) if token == image_token_id][::IMAGE_TOKENS]
    places = [{"offset": start, "length": IMAGE_TOKENS} for start in starts]
    return {"mm_hashes": {"image": list(hashes)}, "mm_placeholders": {"image": places}, "kwargs_data": None}
