"""Configuration files of agent programs, written by libraries: no text of a task is ever pasted into one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tomli_w
import yaml

from polarq.errors import HarnessFault


def as_json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=2, ensure_ascii=True).encode()


def as_toml(data: Mapping[str, Any]) -> bytes:
    """Without what is None: TOML has no word for it. Raises `TypeError` for what it cannot hold."""
    return tomli_w.dumps(given(data)).encode("utf-8", "backslashreplace")


def as_yaml(data: Mapping[str, Any] | list[Any]) -> bytes:
    """Printable ASCII: of the rest of Unicode, YAML folds or refuses some characters."""
    plain = dict(data) if isinstance(data, Mapping) else data
    return yaml.safe_dump(plain, allow_unicode=False, sort_keys=False).encode()


def given(data: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None, however deep in objects."""
    return {
        key: given(value) if isinstance(value, Mapping) else value for key, value in data.items() if value is not None
    }


def table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of a configuration that a task brings; empty where there is none of that name."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def git_settings(env: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Variables that set these for git, on top of what such variables of `env` set. Raises `HarnessFault` for a count
    that git would refuse too."""
    count = env.get("GIT_CONFIG_COUNT") or "0"
    if not (count.isascii() and count.isdigit()):
        raise HarnessFault(f"GIT_CONFIG_COUNT is '{count}', which is no number; set it right in the task's environment")
    first = int(count)
    named: dict[str, str] = {}
    for number, (key, value) in enumerate(settings.items(), first):
        named |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return {**named, "GIT_CONFIG_COUNT": str(first + len(settings))}


def merged(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Both, however deep in objects; where both say something, ours holds."""
    both = dict(theirs)
    for key, value in ours.items():
        known = both.get(key)
        both[key] = merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return both
