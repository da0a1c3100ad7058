"""What Redis said instead of an answer, as one line that tells what to do."""

from __future__ import annotations

import ssl

from redis import exceptions as redis_errors
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.sentinel import MasterNotFoundError

from polarq.errors import LedgerUnavailable
from polarq.topology.redis_address import FORM, is_sentinel, without_password


def unavailable(exc: Exception, url: str) -> LedgerUnavailable:
    """One line for what Redis said, and what to do about it. Decided by the error's type, not its words."""
    shown = without_password(url)
    where = f"Redis at {shown}"
    if isinstance(exc, redis_errors.AuthenticationError | redis_errors.AuthorizationError):
        text = f"{where} refuses the user or password; check POLARQ_REDIS_URL or redis.url in the topology"
    elif isinstance(exc, redis_errors.NoPermissionError):
        text = f"{where} refuses a command ({' '.join(str(exc).split())}); rights are listed in configs/redis-acl.conf"
    elif isinstance(exc, redis_errors.OutOfMemoryError):
        text = f"{where} is full (maxmemory reached); raise maxmemory, or acknowledge and expire old results"
    elif isinstance(exc, redis_errors.ReadOnlyError):
        text = f"{where} is a read-only replica; point polarq at the primary"
    elif isinstance(exc, MasterNotFoundError | AsyncMasterNotFoundError):
        text = f"the Sentinels at {shown} name no primary (a failover is under way, none answers, or master= is wrong)"
    elif isinstance(exc, redis_errors.BusyLoadingError):
        text = f"{where} is still loading its data; try again shortly"
    elif (tls := _tls_problem(exc)) is not None and url.startswith(("rediss:", "sentinels:")):
        text = (
            f"{where} is not believed ({' '.join(str(tls).split())}); check redis.tls_ca, or ?ssl_ca_certs= of the URL"
        )
    elif isinstance(exc, redis_errors.TimeoutError):
        text = f"{where} did not answer in time; check that the server is alive and reachable"
    elif isinstance(exc, redis_errors.ConnectionError | OSError):
        text = f"{where} does not answer; start it, or set POLARQ_REDIS_URL to one that runs"
    elif isinstance(exc, ValueError):
        form = f"{exc}" if is_sentinel(url) else f"redis://host:port/db, rediss://... or {FORM}"
        text = f"'{shown}' is not a Redis address ({form})"
    else:
        text = f"{where} refused a request: {' '.join(str(exc).split())}"
    return LedgerUnavailable(text)


def _tls_problem(exc: BaseException | None) -> ssl.SSLError | FileNotFoundError | None:
    """What TLS said, or that its certificates are not there, where an error goes back to that."""
    while exc is not None and not isinstance(exc, ssl.SSLError | FileNotFoundError):
        exc = exc.__cause__ or exc.__context__
    return exc
