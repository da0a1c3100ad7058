"""Who may use the shim.

- Beyond loopback every request needs the token, but for `/health`. Where POLARQ_TOKEN does not give one, a random one
  is made for this run.
- On loopback without a token the shim is open to this machine. A web page in its browser is not this machine: requests
  whose Host is no loopback name (a rebound name) or whose Origin is another site are refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from polarq.http.answers import Handler, Refused

POLAR_HEADER = "X-Polar-Control-Token"
OPEN_PATHS = frozenset({"/health"})


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Access:
    """The rule of one running shim. `token` None: open to this machine."""

    token: str | None
    made_up: bool = False

    @classmethod
    def for_bind(cls, host: str, token: str | None) -> Access:
        if token is not None or is_loopback(host):
            return cls(token)
        return cls(secrets.token_urlsafe(24), made_up=True)

    def check(self, request: web.Request) -> None:
        """Raises `Refused`."""
        if request.path in OPEN_PATHS:
            return
        if self.token is not None:
            if not self._shows_token(request, self.token):
                raise Refused(
                    401,
                    f"this needs the shim's token: 'Authorization: Bearer ...' or '{POLAR_HEADER}: ...'",
                    {"WWW-Authenticate": 'Bearer realm="polarq"'},
                )
            return
        if not is_loopback(_host_of(request.headers.get(hdrs.HOST, ""))):
            raise Refused(403, "without a token only 127.0.0.1, localhost and [::1] are served; set POLARQ_TOKEN")
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and not is_loopback(_origin_host(origin)):
            raise Refused(403, "without a token no other site may call this; set POLARQ_TOKEN")

    @staticmethod
    def _shows_token(request: web.Request, token: str) -> bool:
        scheme, _, value = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        shown = [request.headers.get(POLAR_HEADER, "")]
        if scheme.lower() == "bearer":
            shown.append(value.strip())
        right = token.encode("utf-8", "surrogateescape")
        return any(hmac.compare_digest(text.encode("utf-8", "surrogateescape"), right) for text in shown)


def _host_of(authority: str) -> str:
    if authority.startswith("["):
        return authority.partition("]")[0]
    return authority.partition(":")[0]


def _origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def access(rule: Access) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        rule.check(request)
        return await handler(request)

    return check
