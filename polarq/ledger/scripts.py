"""The atomic steps, as Lua. Each script gets the transition table and the prelude in front of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from polarq.ledger.states import lua_table


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the digest Redis knows it by."""

    name: str
    source: str
    sha1: str


_PARTS = {
    "claim": ("choose", "losses"),
    "look": ("choose",),
    "reap_lost": ("losses", "stopped"),
    "release": ("stopped",),
}
"""What stands between the prelude and a script, where it needs more."""


@cache
def script(name: str) -> Script:
    """The script `lua/<name>.lua`, complete."""
    folder = files("polarq.ledger") / "lua"
    parts = ["prelude", *_PARTS.get(name, ()), name]
    source = lua_table() + "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
