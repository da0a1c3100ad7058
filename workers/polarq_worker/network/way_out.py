"""How what runs in a sandbox gets out of it, as its environment says it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_UPPER = (*_PROXIES, "FTP_PROXY", "SOCKS_PROXY", "WS_PROXY", "WSS_PROXY", "RSYNC_PROXY")
PROXY_VARIABLES = tuple(name for upper in _UPPER for name in (upper, upper.lower()))
"""What programs look into for proxies."""
_NO_PROXY = ("NO_PROXY", "no_proxy")
"""What they look into for hosts that are reached without one: some read only the first, some only the second."""


@dataclass(frozen=True, slots=True)
class WayOut:
    """How what runs in a sandbox gets out of it."""

    cut_off: bool = False
    """There is no network: proxies that a task names itself cannot be reached."""
    proxy_url: str = ""
    """The only way there is, with `cut_off`; empty: none."""

    def applied(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables with the proxies that there are."""
        env = self.stripped(env)
        if self.proxy_url:
            env.update((name, self.proxy_url) for upper in _PROXIES for name in (upper, upper.lower()))
        return env

    def stripped(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables without proxies that cannot be reached."""
        return {name: value for name, value in env.items() if not self.cut_off or name.upper() not in _UPPER}


def excepted(envs: Iterable[Mapping[str, str]]) -> list[str]:
    """Hosts that these variables, in either spelling, except from proxies."""
    named = [entry.strip() for env in envs for name in _NO_PROXY for entry in env.get(name, "").split(",")]
    return [host for host in dict.fromkeys(named) if host]


def exceptions(hosts: Iterable[str]) -> dict[str, str]:
    """The variables that except these hosts."""
    return dict.fromkeys(_NO_PROXY, ",".join(dict.fromkeys(hosts)))


def over(image: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """An image's own variables with `env` over them; what either excepts from proxies is excepted."""
    both = {**image, **env}
    return both | exceptions(excepted([image, env])) if excepted([image]) and excepted([env]) else both


OPEN = WayOut()
"""The machine's own network, and whatever proxies a task names itself."""
