"""Addresses of Redis: one server, or whichever the Sentinels say is the primary now."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

SENTINEL_PORT = 26379
SENTINEL_SCHEMES = ("sentinel", "sentinels")
FORM = "sentinel://[user:password@]HOST:PORT,HOST:PORT/DB?master=NAME"

_TLS = {"ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}
_OPTIONS = {"master", "sentinel_username", "sentinel_password", *_TLS}
_REPEATED = re.compile(r"(/\d*)?[;,]sentinels?://([^@/,;]*@)?")
"""kombu writes the whole address once per Sentinel."""
_NETLOC = re.compile(r"(?<=//)[^/?#]+")
_PASSWORD_OPTION = re.compile(r"([?&]sentinel_password=)[^&]*")


@dataclass(frozen=True, slots=True)
class Sentinels:
    """`sentinel://user:password@host:port,host:port/db?master=name`.

    User and password are those of the servers; `sentinel_username` and `sentinel_password` those of the Sentinels.
    `sentinels://` speaks TLS with both, and takes the `ssl_...` options of a rediss:// address.
    """

    hosts: tuple[tuple[str, int], ...]
    master: str
    db: int
    login: dict[str, str]
    """`username` and `password`, as far as they are said."""
    sentinel_login: dict[str, str]
    tls: dict[str, Any] | None
    """Options of TLS; None: none is spoken."""

    @classmethod
    def parse(cls, url: str) -> Sentinels | None:
        """None for an address of another kind. Raises ValueError for one of this kind that cannot be read."""
        if not is_sentinel(url):
            return None
        parts = urlsplit(_REPEATED.sub(",", url))
        user, at, hosts = parts.netloc.rpartition("@")
        username, _, password = user.partition(":") if at else ("", "", "")
        said = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(said.keys() - _OPTIONS):
            raise ValueError(f"'{unknown[0]}' is no option of {FORM}")
        db = parts.path.strip("/")
        if db and not db.isdecimal():
            raise ValueError(f"'{db}' is no number of a database: {FORM}")
        tls: dict[str, Any] = {name: value for name, value in said.items() if name in _TLS}
        if "ssl_check_hostname" in tls:
            tls["ssl_check_hostname"] = tls["ssl_check_hostname"].lower() not in {"false", "0", "no"}
        return cls(
            hosts=tuple(_host(part) for part in re.split(r"[,;]", hosts)),
            master=said.get("master") or "mymaster",
            db=int(db or 0),
            login=_login(unquote(username), unquote(password)),
            sentinel_login=_login(said.get("sentinel_username", ""), said.get("sentinel_password", "")),
            tls=tls if parts.scheme == "sentinels" else None,
        )

    @property
    def for_celery(self) -> str:
        """The address as kombu and Celery read it; what it cannot hold is in `celery_options`."""
        user = quote(self.login.get("username", ""), safe="")
        password = quote(self.login["password"], safe="") if "password" in self.login else None
        login = f"{user}:{password}@" if password is not None else f"{user}@" if user else ""
        return ";".join(f"sentinel://{login}{_bracketed(host)}:{port}/{self.db}" for host, port in self.hosts)

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """How a client connects to a Sentinel: one that does not answer must not delay the next."""
        tls = {} if self.tls is None else {"ssl": True, **self.tls}
        return {"socket_connect_timeout": 2.0, "socket_timeout": 2.0, **self.sentinel_login, **tls}


def is_sentinel(url: str) -> bool:
    return url.partition("://")[0] in SENTINEL_SCHEMES


def without_password(url: str) -> str:
    """A Redis address fit to be shown."""
    return _PASSWORD_OPTION.sub(r"\1***", _NETLOC.sub(lambda found: _masked(found[0]), url))


def _masked(netloc: str) -> str:
    login, at, host = netloc.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{user}:***{at}{host}" if colon else netloc


def with_options(url: str, **more: str) -> str:
    """The address with options that it does not say itself."""
    head, _, query = url.partition("?")
    said = dict(parse_qsl(query, keep_blank_values=True))
    return f"{head}?{urlencode({**said, **{k: v for k, v in more.items() if k not in said}}, safe='/')}"


def with_tls(url: str, tls_ca: str | None) -> str:
    """A rediss:// or sentinels:// address that says for all of its users what is checked: Celery refuses one that does
    not say it, redis-py and kombu each have a default of their own. What the address says itself stands."""
    if url.partition("://")[0] not in {"rediss", "sentinels"}:
        return url
    ca = {} if tls_ca is None else {"ssl_ca_certs": tls_ca}
    return with_options(url, ssl_cert_reqs="required", **ca)


def ports_of(url: str) -> frozenset[int]:
    """Ports that an address names. What the Sentinels will say is not known."""
    try:
        sentinels = Sentinels.parse(url)
        found = [urlsplit(url).port] if sentinels is None else [port for _, port in sentinels.hosts]
    except ValueError:
        return frozenset()
    return frozenset(port for port in found if port)


def _login(username: str, password: str) -> dict[str, str]:
    return {name: value for name, value in (("username", username), ("password", password)) if value}


def _host(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or SENTINEL_PORT
    except ValueError:
        host, port = None, 0
    if not host:
        raise ValueError(f"'{text}' is not HOST:PORT of a Sentinel: {FORM}")
    return host, port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
