"""Parts of a message's content in the Responses API, as chat parts; and thinking that travels sealed.

Text is joined to one string, because that is what every chat template can take; pictures stay beside it in order.
What cannot be shown to the model and carries something (a file on the vendor's servers, a remote address, a PDF) is
refused by name rather than left out.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import encode

Content = str | list[dict[str, Any]]

_IMAGES = frozenset({"input_image", "image_url", "output_image", "computer_screenshot"})
_SEAL = "pq1."
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/x-yaml", "application/javascript")


def content_of(value: Any, where: str, joint: str = "\n") -> Content:
    """A string, or parts where there is more than text. Raises `CallFault`."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise _refused(where, "must be a string or a list of parts")
    parts = [shown for place, part in enumerate(value) for shown in _part(part, f"{where}[{place}]")]
    return _joined(parts, joint)


def text_of(value: Any, where: str, joint: str = "") -> str:
    """Only the text of a content."""
    content = content_of(value, where, joint)
    if isinstance(content, str):
        return content
    return joint.join(part["text"] for part in content if part["type"] == "text")


def output_of(value: Any, where: str) -> Content:
    """What a tool gave back: text, parts, or any JSON. What is no part that is known is shown as JSON."""
    if isinstance(value, dict) and str(value.get("type")) in _IMAGES:
        value = [value]
    if not isinstance(value, list) or not all(isinstance(part, dict) and "type" in part for part in value):
        return value if isinstance(value, str) else "" if value is None else encode(value).decode()
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(value):
        parts += _part(part, f"{where}[{place}]") or [_text(encode(part).decode())]
    return _joined(parts, "\n")


def seal(thinking: str) -> str:
    """Thinking in the field that harnesses carry back without looking into it."""
    return _SEAL + base64.urlsafe_b64encode(thinking.encode()).decode()


def unseal(value: Any) -> str | None:
    """What `seal` was given; None for anything else, such as another server's secrets."""
    if not isinstance(value, str) or not value.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(value.removeprefix(_SEAL), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


def thinking_of(item: dict[str, Any]) -> str:
    """The text of a reasoning item, from wherever the harness left it; blank when only another server can read it."""
    sealed = unseal(item.get("encrypted_content"))
    if sealed is not None:
        return sealed
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, str) and parts:
            return parts
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        text = "\n".join(text for text in texts if isinstance(text, str))
        if text:
            return text
    return ""


def _joined(parts: list[dict[str, Any]], joint: str) -> Content:
    if all(part["type"] == "text" for part in parts):
        return joint.join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(part, str):
        return [_text(part)]
    if not isinstance(part, dict):
        raise _refused(where, "must be an object")
    kind = str(part.get("type"))
    if kind in _IMAGES:
        return [_image(part, where)]
    if kind == "input_file":
        return [_file(part, where)]
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return [{"type": "input_audio", "input_audio": part["input_audio"]}]
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return [_text(part[key])]
    return []  # a part of a later version without text in it, such as another server's secrets


def _image(part: dict[str, Any], where: str) -> dict[str, Any]:
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str):
        why = "is a picture by 'file_id'; polarq keeps no files" if part.get("file_id") else "holds no picture"
        raise _refused(where, f"{why}: send 'image_url' with a data: URL")
    if url[:5].lower() != "data:":
        raise _refused(where, "is a picture at an address; polarq fetches nothing: send 'image_url' with a data: URL")
    shown: dict[str, Any] = {"url": url}
    if isinstance(part.get("detail"), str):
        shown["detail"] = part["detail"]
    return {"type": "image_url", "image_url": shown}


def _file(part: dict[str, Any], where: str) -> dict[str, Any]:
    data = part.get("file_data")
    if not isinstance(data, str):
        raise _refused(where, "is a file that is not in the request; polarq keeps and fetches none: send 'file_data'")
    head, comma, body = data.partition(",")
    media = head[5:].partition(";")[0].lower() if comma and head[:5].lower() == "data:" else ""
    if media.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": data}}
    if media and not media.startswith(_TEXT_TYPES):
        raise _refused(where, f"is a file of type '{media[:80]}', which cannot be shown to the model: send its text")
    try:
        text = base64.b64decode(body if media else data, validate=True).decode()
    except (binascii.Error, ValueError):
        raise _refused(where, "is a file that is not text in base64, which cannot be shown to the model") from None
    name = part.get("filename")
    return _text(f"{name}\n{text}" if isinstance(name, str) and name else text)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _refused(where: str, why: str) -> CallFault:
    return CallFault(FaultKind.BAD_REQUEST, f"{where} {why}", param=where)
