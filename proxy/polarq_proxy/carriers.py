"""Where a request carries its session: in the path, else as a key in any of the forms that harnesses send."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs

_KEY_HEADERS = ("x-api-key", "x-goog-api-key")
PEEKED = 16 * 1024
"""Bytes of a request that are looked at to see whose it is."""


def session_in_path(path: str) -> str | None:
    parts = [part for part in path.split("/") if part]
    if parts and parts[0] == "s":
        return parts[1] if len(parts) > 1 else ""
    return None


def session_in_keys(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """`headers` finds names however they are spelt."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    for name in _KEY_HEADERS:
        if value := headers.get(name):
            return value
    return query.get("key")


def session_in_head(head: bytes) -> tuple[bool, str | None]:
    """From the first bytes of a connection: (whether they were enough to tell, the session)."""
    line, ended, _ = head.partition(b"\r\n")
    words = line.split(b" ")
    target = words[1].decode("latin-1") if len(words) > 1 else ""
    path, _, query = target.partition("?")
    if not (ended or len(words) > 2 or query):
        path = path.rpartition("/")[0]  # more of its last part may come
    found = session_in_path(path)
    if found:
        return True, found
    fields, whole, _ = head.partition(b"\r\n\r\n")
    if not whole:
        return len(head) >= PEEKED, None
    headers: dict[str, str] = {}
    for field in fields.decode("latin-1").split("\r\n")[1:]:
        name, _, value = field.partition(":")
        headers.setdefault(name.strip().lower(), value.strip())
    keys = parse_qs(query).get("key")
    return True, session_in_keys(headers, {"key": keys[0]} if keys else {})
