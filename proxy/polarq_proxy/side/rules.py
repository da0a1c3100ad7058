"""Which calls of a harness are not steps of its task, by rules in `data/*.yaml`.

A file names a harness, how its User-Agent looks (with its version as the group `version`), and rules. A rule holds when
all its conditions do; the first that holds names the kind. A file without `agents` is asked for every harness: its
rules must then be so narrow that no other harness says the same. Patterns are matched at the beginning of a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import field_validator

from polarq.contracts.base import Contract
from polarq.contracts.completion import SideKind
from polarq_proxy.call import ModelCall
from polarq_proxy.rules import asked_limit


def _pattern(value: str | None) -> str | None:
    if value is not None:
        try:
            re.compile(value)
        except re.error as exc:
            raise ValueError(f"is no regular expression: {exc}") from None
    return value


class SideRule(Contract):
    """One kind of side traffic. Every condition that is given must hold."""

    kind: SideKind
    since: str | None = None
    """First version of the harness that sends it so; None: any."""
    before: str | None = None
    """First version that no longer does."""
    tools: Literal["none", "some"] | None = None
    system: str | None = None
    """Pattern for the first system message."""
    last: str | None = None
    """Pattern for the last message."""
    last_role: str | None = None
    model: str | None = None
    """Pattern for the model that is asked for."""
    max_tokens: int | None = None
    """The harness asks for at most so many tokens."""
    messages: int | None = None
    """There are at most so many messages."""
    format: bool | None = None
    """Whether a JSON format is asked for."""

    _patterns = field_validator("system", "last", "model")(_pattern)

    def holds(self, call: ModelCall) -> bool:
        if self.tools is not None and bool(call.tools) != (self.tools == "some"):
            return False
        if self.messages is not None and len(call.messages) > self.messages:
            return False
        if self.max_tokens is not None and not 0 < (asked_limit(call) or 0) <= self.max_tokens:
            return False
        if self.format is not None and bool(call.options.get("response_format")) != self.format:
            return False
        if self.model is not None and not re.match(self.model, call.model):
            return False
        if self.last_role is not None and (not call.messages or call.messages[-1].get("role") != self.last_role):
            return False
        if self.system is not None and not _begins(self.system, _first_system(call)):
            return False
        return self.last is None or _begins(self.last, call.messages[-1] if call.messages else None)

    def fits(self, version: tuple[int, ...] | None) -> bool:
        if version is None:
            return True
        after = self.since is None or version >= _numbers(self.since)
        return after and (self.before is None or version < _numbers(self.before))


class SideRules(Contract):
    """One file."""

    harness: str
    agents: list[str] = []
    seen: list[str] = []
    """Versions whose traffic was looked at."""
    rules: list[SideRule]

    @field_validator("agents")
    @classmethod
    def _are_patterns(cls, value: list[str]) -> list[str]:
        for pattern in value:
            _pattern(pattern)
        return value

    def version_in(self, agent: str) -> tuple[bool, tuple[int, ...] | None]:
        """Whether a User-Agent is this harness's, and the version it names."""
        for pattern in self.agents:
            if (match := re.match(pattern, agent)) is not None:
                return True, _numbers(match.groupdict().get("version") or "") or None
        return False, None


@cache
def shipped_rules() -> tuple[SideRules, ...]:
    """Of every file that ships. Raises `PolarqError` for one that cannot be used."""
    folder = files("polarq_proxy.side") / "data"
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    return tuple(SideRules.parse(yaml.safe_load((folder / name).read_text("utf-8")), what=name) for name in names)


@lru_cache(maxsize=256)
def rules_for(harness: str, agent: str) -> Sequence[SideRule]:
    """The rules that apply to a harness: by the name the task gives it, or by its User-Agent."""
    found: list[SideRule] = []
    for file in shipped_rules():
        named, version = file.version_in(agent)
        if named or not file.agents or file.harness == harness:
            found += [rule for rule in file.rules if rule.fits(version)]
    return tuple(found)


def kind_of(call: ModelCall, harness: str, headers: Mapping[str, str]) -> str | None:
    """What kind of side traffic a call is; None: it is a step of the task."""
    for rule in rules_for(harness, headers.get("User-Agent", "")):
        if rule.holds(call):
            return str(rule.kind)
    return None


def _begins(pattern: str, message: Mapping[str, Any] | None) -> bool:
    return message is not None and re.match(pattern, _text(message.get("content"))) is not None


def _first_system(call: ModelCall) -> Mapping[str, Any] | None:
    first = call.messages[0] if call.messages else None
    return first if first is not None and first.get("role") == "system" else None


def _text(content: Any) -> str:
    """The beginning of a message: its text, or that of its first part that has one."""
    if isinstance(content, str):
        return content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return str(part["text"])
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
