"""One chaos run from start to proof."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.durable.chaos.fleet import Fleet
from tests.durable.chaos.load import Load
from tests.durable.chaos.proof import Proof
from tests.durable.chaos.receiver import Receiver
from tests.durable.chaos.trouble import Trouble


@dataclass(frozen=True)
class Report:
    """`broken` has a line for each promise that did not hold."""

    broken: list[str]
    troubles: dict[str, int]
    figures: dict[str, Any]


def chaos(home: Path, *, seed: int, seconds: float, quiet: bool = False) -> Report:
    """Raises only when the fleet cannot be started at all."""
    began = time.monotonic()

    def say(line: str) -> None:
        if not quiet:
            print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

    fleet = Fleet(home)
    log = fleet.home / "side-effects.log"
    with Receiver(seed) as receiver, fleet.running():
        load = Load(fleet.stack, log, seed, receiver)
        trouble = Trouble(fleet, load, random.Random(seed), say)
        proof = Proof(fleet, load, trouble, receiver, log)
        load.start()
        say(f"started: seed {seed}, {seconds:g} s, in {home}")
        trouble.run(seconds)
        say("no more trouble; waiting for every rollout's end")
        load.stop_submitting()
        trouble.heal()
        proof.all_end()
        proof.all_is_taken()
        proof.callbacks()
        proof.nodes_are_empty()
        load.stop()
        fleet.stop_programs()
        proof.processes_are_gone()
        proof.records()
        proof.keys()
        proof.recovery(trouble.kills)
    return Report(proof.broken + trouble.problems + load.problems, dict(trouble.done), proof.figures)
