"""Pictures in prompts: which ones there are, and which ids stand for them.

Engines write the prompt's ids with each picture's placeholder repeated as often as its processor says. They do not say
where, so that the places are found by the repeated id, which the topology names (`image_token_id`): one unbroken run of
it for each picture, or no place at all is told.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from polarq.contracts.completion import Image
from polarq.contracts.trajectory import Trace


def pictures(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """(media type, bytes) of each picture in chat messages, in order; of an address that is no base64 data URL, none
    and its text."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") == "image_url":
                image = part.get("image_url")
                yield _picture(str(image.get("url", "") if isinstance(image, Mapping) else image))


def picture_bytes(trace: Trace) -> dict[str, bytes]:
    """sha256 -> the picture, of those in the trace's messages."""
    messages = [*trace.prompt_messages, *trace.response_messages]
    return {hashlib.sha256(data).hexdigest(): data for _, data in pictures(messages)}


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Image]:
    """References to the pictures in chat messages, in order, without their places."""
    return [
        Image(sha256=hashlib.sha256(data).hexdigest(), media_type=kind, size=len(data))
        for kind, data in pictures(messages)
    ]


def placed(images: Sequence[Image], ids: Sequence[int], image_token_id: int) -> list[Image]:
    """The same with their places in the prompt `ids`: the runs of `image_token_id`, in order. Without places where
    there are not as many runs as pictures: then nobody can say which is whose."""
    runs = _runs(ids, image_token_id)
    if len(runs) != len(images):
        return list(images)
    return [
        image.model_copy(update={"start": start, "end": end}) for image, (start, end) in zip(images, runs, strict=True)
    ]


def alike_until(one: Sequence[Image], other: Sequence[Image], length: int) -> int:
    """Two prompts have their first `length` ids in common: up to where they stand for the same. A placeholder is the
    same id whatever its picture is; where two that differ have no place, all after the last one known is in doubt."""
    known = 0
    for mine, theirs in zip(one, other, strict=False):
        starts = [image.start for image in (mine, theirs) if image.start is not None]
        if mine.sha256 != theirs.sha256:
            return min([length, *(starts or [known])])
        known = max([known, *(image.end for image in (mine, theirs) if image.end is not None)])
    rest = [*one[len(other) :], *other[len(one) :]]
    return min([length, *(image.start for image in rest if image.start is not None)])


def _runs(ids: Sequence[int], wanted: int) -> list[tuple[int, int]]:
    runs = []
    for found, run in groupby(range(len(ids)), key=lambda at: ids[at] == wanted):
        if found:
            places = list(run)
            runs.append((places[0], places[-1] + 1))
    return runs


def _picture(url: str) -> tuple[str, bytes]:
    head, comma, data = url.partition(",")
    if not (comma and head.lower().startswith("data:") and head.lower().endswith(";base64")):
        return "", url.encode()
    try:
        return head[len("data:") :].partition(";")[0].lower(), base64.b64decode(data, validate=True)
    except binascii.Error:
        return "", url.encode()
