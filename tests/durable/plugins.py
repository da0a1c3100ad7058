"""Evaluators that wait for a gate: the file named in their config. One waits as it should, one blocks the loop."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import ClassVar

from polarq.contracts.rollout import Reward
from polarq_worker.evaluators.base import EvaluationContext, Evaluator


class Waits(Evaluator):
    """Lets the loop go on meanwhile."""

    name: ClassVar[str] = "waits"

    async def evaluate(self, context: EvaluationContext) -> Reward:
        Path(f"{self.spec.config['gate']}.reached").touch()
        while not Path(self.spec.config["gate"]).exists():  # noqa: ASYNC110 - a file is all that a test can reach
            await asyncio.sleep(0.05)
        return self.verdict(1.0, {})


class BlocksTheLoop(Evaluator):
    """What a plug-in must not do."""

    name: ClassVar[str] = "blocks_the_loop"

    async def evaluate(self, context: EvaluationContext) -> Reward:
        Path(f"{self.spec.config['gate']}.reached").touch()
        while not Path(self.spec.config["gate"]).exists():
            time.sleep(0.05)  # noqa: ASYNC251 - the fault this is about
        return self.verdict(1.0, {})
