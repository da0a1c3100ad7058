"""How what runs in a sandbox gets out of it, as its environment says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_UPPER = (*_PROXIES, "FTP_PROXY", "SOCKS_PROXY", "WS_PROXY", "WSS_PROXY", "RSYNC_PROXY")
PROXY_VARIABLES = tuple(name for upper in _UPPER for name in (upper, upper.lower()))
"""What programs look into for proxies."""


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


OPEN = WayOut()
"""The machine's own network, and whatever proxies a task names itself."""
