"""Which releases of a program a preset is for: one that is installed, and the range that is known to work."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from polarq.errors import InvalidTask

_SPELT = re.compile(r"[0-9][0-9A-Za-z.+-]*")


@dataclass(frozen=True, slots=True)
class Versions:
    """`default` is what is installed where the task names none. `at_least` is in the range, `below` is not."""

    default: str
    at_least: str
    below: str

    def __str__(self) -> str:
        return f">={self.at_least},<{self.below}"

    def supports(self, version: str) -> bool:
        """Raises `InvalidVersion` for what is no version."""
        return Version(self.at_least) <= Version(version) < Version(self.below)

    def chosen(self, asked: str | None, *, untested: bool, what: str) -> str:
        """What is to be installed. `untested` lets a version outside of the range pass. Raises `InvalidTask`."""
        if asked is None:
            return self.default
        try:
            supported = self.supports(asked)
        except InvalidVersion:
            said = f"version: '{asked}' is no version of {what}; name one release, such as {self.default}"
            raise InvalidTask("agent.settings", [said]) from None
        if not self._is_spelt_out(asked):
            said = f"version: '{asked}' is not how {what} spells a release; write it like {self.default}"
            raise InvalidTask("agent.settings", [said])
        if supported or untested:
            return asked
        text = f"version: {what} {asked} is not in the supported range {self}; leave it out for {self.default}"
        raise InvalidTask("agent.settings", [f"{text}, or try it with untested_version: true"])

    def _is_spelt_out(self, version: str) -> bool:
        """A registry takes no `v` or space for granted, and fewer numbers for a range."""
        numbers = len(Version(version).release), len(Version(self.default).release)
        return _SPELT.fullmatch(version) is not None and numbers[0] >= numbers[1]
