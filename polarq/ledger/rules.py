"""What each node lets tasks ask for, as the ledger has it, for whoever submits without the nodes' file.

Every node goes by its own file, so each says its own rules; they leave with its record.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError

from polarq.ledger.calls import Call, read_hash
from polarq.ledger.keys import Keys
from polarq.topology.rules import Rules

log = logging.getLogger("polarq.ledger.rules")


def say_rules(keys: Keys, node_id: str, rules: Rules) -> Call[None]:
    return Call(lambda _: None, commands=(("HSET", keys.rules, node_id, rules.model_dump_json()),))


def rules_said(keys: Keys) -> Call[dict[str, Rules]]:
    """By node id, without what cannot be read here. Nodes that go by the same file share one object."""

    def read(replies: list[Any]) -> dict[str, Rules]:
        said = read_hash(replies[0])
        rules = {body: _read(body) for body in set(said.values())}
        return {node_id: there for node_id, body in said.items() if (there := rules[body]) is not None}

    return Call(read, commands=(("HGETALL", keys.rules),))


def _read(body: str) -> Rules | None:
    try:
        return Rules.stored(body)
    except ValidationError as exc:
        # Of a later release, perhaps. The node itself still judges.
        log.warning("the rules of a node cannot be read (%s)", exc.errors()[0]["msg"])
        return None
