"""The head of a request to an HTTP proxy, read strictly: what two readers could understand in two ways is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from polarq.hosts import Roundabout
from polarq_worker.network.rules import Target

HEAD_BYTES = 64 * 1024
LINE_BYTES = 16 * 1024
MOST_HEADERS = 200

_REQUEST = re.compile(r"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
_ABSOLUTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([/?][^#]*)?")
_DIGITS = re.compile(r"[0-9]{1,18}")
_HOP_BY_HOP = frozenset(
    {
        *("connection", "proxy-connection", "proxy-authorization", "proxy-authenticate", "keep-alive", "te", "trailer"),
        *("upgrade", "host"),
    }
)
_SCHEME_PORTS = {"http": 80, "https": 443, "ftp": 21, "ws": 80, "wss": 443}


class BadHead(Exception):
    """It is not a request that this proxy carries; one line. `target`: whom it asked for, to be recorded as refused."""

    def __init__(self, status: int, text: str, target: str = "") -> None:
        self.status = status
        self.target = target
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Head:
    """A request that can be carried."""

    tunnel: bool
    """CONNECT; else plain http."""
    asked: str
    """host:port as it was asked for."""
    target: Target
    forwarded: bytes
    """What a plain request's server gets in its place."""
    body_bytes: int | None
    """Of a plain request; None: chunked."""


def parse_head(raw: bytes) -> Head:
    """`raw` ends before the empty line. Raises `BadHead`."""
    lines = raw.decode("latin-1").split("\r\n")
    if any(len(line) > LINE_BYTES for line in lines) or len(lines) > MOST_HEADERS + 1:
        raise BadHead(431, "the head of the request is too large")
    request = _REQUEST.fullmatch(lines[0])
    if request is None:
        raise BadHead(400, "this is an HTTP proxy, and that is not the first line of an HTTP/1.1 request")
    method, place, minor = request.groups()
    headers = [_header(line) for line in lines[1:]]
    body_bytes = _body_bytes(headers, minor)
    if method == "CONNECT":
        if body_bytes != 0:
            raise BadHead(400, "CONNECT has no body")
        return Head(True, place, _target(place, None, place), b"", 0)
    absolute = _ABSOLUTE.fullmatch(place)
    if absolute is None:
        raise BadHead(400, "this is a proxy: a request names the whole address, http://host/path")
    scheme, authority, path = absolute[1].lower(), absolute[2], absolute[3] or "/"
    asked = _with_scheme_port(authority, scheme)
    if scheme != "http":
        text = "https goes through CONNECT" if scheme == "https" else f"only http and https are carried, not {scheme}"
        raise BadHead(501, text, asked)
    target = _target(authority, 80, asked)
    if path.startswith("?"):
        path = f"/{path}"
    return Head(False, asked, target, _forwarded(method, path, minor, target, headers), body_bytes)


def _header(line: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(line)
    if found is None:
        raise BadHead(400, "a header line cannot be read")
    return found[1], found[2]


def _body_bytes(headers: list[tuple[str, str]], minor: str) -> int | None:
    """How long the body is; None: chunked."""
    lengths = {value for name, value in headers if name.lower() == "content-length"}
    codings = [value.lower() for name, value in headers if name.lower() == "transfer-encoding"]
    if sum(name.lower() == "host" for name, _ in headers) > 1:
        raise BadHead(400, "more than one Host header")
    if codings and lengths:
        raise BadHead(400, "both Content-Length and Transfer-Encoding: where the body ends cannot be told")
    if codings:
        if codings != ["chunked"] or minor == "0":
            raise BadHead(400, "the only Transfer-Encoding that is carried is chunked, with HTTP/1.1")
        return None
    if len(lengths) > 1 or not all(map(_DIGITS.fullmatch, lengths)):
        raise BadHead(400, "Content-Length is not one number")
    return int(lengths.pop()) if lengths else 0


def _target(authority: str, default_port: int | None, asked: str) -> Target:
    try:
        return Target.parse(authority, default_port)
    except Roundabout as exc:
        raise BadHead(403, str(exc), asked) from None
    except ValueError as exc:
        raise BadHead(400, str(exc)) from None


def _with_scheme_port(authority: str, scheme: str) -> str:
    port = _SCHEME_PORTS.get(scheme)
    return authority if re.search(r":[0-9]+$", authority) or port is None else f"{authority}:{port}"


def _forwarded(method: str, path: str, minor: str, target: Target, headers: list[tuple[str, str]]) -> bytes:
    words = ",".join(value for name, value in headers if name.lower() == "connection").split(",")
    named = {word.strip().lower() for word in words}
    # What says where the body ends is the proxy's own business.
    dropped = _HOP_BY_HOP | (named - {"content-length", "transfer-encoding"})
    host = f"[{target.host}]" if ":" in target.host else target.host
    kept = [f"{name}: {value}" for name, value in headers if name.lower() not in dropped]
    authority = host if target.port == 80 else f"{host}:{target.port}"
    lines = [f"{method} {path} HTTP/1.{minor}", f"Host: {authority}", *kept, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")
