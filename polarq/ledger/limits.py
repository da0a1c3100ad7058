"""A deployment's limits as the ledger has them, for whoever submits and every worker, whatever their own files say.

Workers publish their file's at their start; whoever published has them until it publishes others, is gone, or somebody
sets them by command. Each change is a new version.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from polarq.errors import LedgerUnavailable
from polarq.ledger.admission import Admission
from polarq.ledger.calls import Call, Calls, read_hash
from polarq.ledger.keys import Keys
from polarq.ledger.records import moment
from polarq.topology.models import LimitsSection

BY_COMMAND = "polarq limits set"

# KEYS limits, nodes, events ; ARGV by, digest, body, '1': whoever published before, events_max
_PUBLISH = """
local held = redis.call('HMGET', KEYS[1], 'digest', 'by')
local mine = held[2] == ARGV[1] or ARGV[4] == '1'
if held[1] and not mine and (held[2] == ARGV[6] or redis.call('HEXISTS', KEYS[2], held[2]) == 1) then return 0 end
if held[1] == ARGV[2] and (held[2] == ARGV[1] or ARGV[4] ~= '1') then return 0 end
local t = redis.call('TIME')
local version = redis.call('HINCRBY', KEYS[1], 'version', 1)
redis.call('HSET', KEYS[1], 'digest', ARGV[2], 'by', ARGV[1], 'body', ARGV[3], 'at_ms', t[1] * 1000)
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'type', 'limits.published', 'data',
  cjson.encode({version = version, by = ARGV[1]}))
return 1
"""


@dataclass(frozen=True, slots=True)
class Published:
    """The deployment's limits. `version` 0: nobody has published any, and each process goes by its own file."""

    limits: LimitsSection
    version: int = 0
    by: str = ""
    """A node's id, or the command."""
    at: datetime | None = None

    def agrees(self, own: LimitsSection) -> bool:
        return digest(self.limits) == digest(own)

    @property
    def mismatch(self) -> str:
        """What to say where a file has others, in one line."""
        return (
            f"the limits of this topology file are not the deployment's (version {self.version}, by {self.by}), which "
            "hold; polarq limits set publishes a file's"
        )


def digest(limits: LimitsSection) -> str:
    return hashlib.sha256(limits.model_dump_json().encode()).hexdigest()


def publish(calls: Calls, limits: LimitsSection, by: str, *, anyway: bool = False) -> Call[bool]:
    """Whether they are a new version. Without `anyway` others' stay, unless who published them is gone."""
    keys = calls.keys
    command = (
        "EVAL", _PUBLISH, 3, keys.limits, keys.nodes, keys.events,
        by, digest(limits), limits.model_dump_json(), "1" if anyway else "0", calls.events_max, BY_COMMAND,
    )  # fmt: skip
    return Call(lambda replies: bool(replies[0]), commands=(command,))


def published(keys: Keys, own: LimitsSection) -> Call[Published]:
    """What holds: the deployment's limits, or where there are none, `own`."""

    def read(replies: list[Any]) -> Published:
        found = read_hash(replies[0])
        if "body" not in found:
            return Published(own)
        try:
            limits = LimitsSection.model_validate_json(found["body"])
        except ValidationError as exc:
            raise LedgerUnavailable(
                f"the deployment's limits in Redis cannot be read ({exc.error_count()} mistakes; written by another "
                "release of polarq?); polarq limits set publishes a file's"
            ) from exc
        return Published(limits, int(found["version"]), found["by"], moment(found["at_ms"]))

    return Call(read, commands=(("HGETALL", keys.limits),))


def under(calls: Calls, limits: LimitsSection) -> Calls:
    """Calls that let tasks in by these limits."""
    return replace(calls, admission=Admission.of(limits, calls.admission.memory_budget))
