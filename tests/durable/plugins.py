"""Evaluators as the tests need them: some wait for a gate, the file named in their config; some are greedy."""

from __future__ import annotations

import asyncio
import os
import secrets
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


class GrowsOnce(Evaluator):
    """Takes memory of the worker itself until the kernel objects; where the file of its config exists it is modest."""

    name: ClassVar[str] = "grows_once"

    async def evaluate(self, context: EvaluationContext) -> Reward:
        grown = Path(self.spec.config["gate"])
        if not grown.exists():
            grown.touch()
            kept = []
            while True:
                kept.append(os.urandom(8 << 20))
                await asyncio.sleep(0)
        return self.verdict(1.0, {})


class Large(Evaluator):
    """A report as large as its config says, which compression does not make smaller."""

    name: ClassVar[str] = "large"

    async def evaluate(self, context: EvaluationContext) -> Reward:
        noise = await asyncio.to_thread(secrets.token_urlsafe, int(self.spec.config["size"]) * 3 // 4)
        # Not `verdict`, which would cut it.
        return Reward(outcome=1.0, evaluator=self.name, report={"noise": noise})
