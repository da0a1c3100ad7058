"""A scripted engine that never says the same twice, so that a text tells which sample it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from polarq.testing.inference import Scenario, ServerOptions, build_app
from polarq.testing.inference.engine import ENGINE, Engine
from polarq.testing.inference.faults import Fault
from polarq.testing.inference.selection import Selected, Selector

SESSION = "task.0"
"""Others, such as the proxy's own probe, are answered from the scenario and count for nothing."""
WORDS = "one two three four five six seven eight"
PACE = 250.0
"""Tokens per second: slow enough that something can happen in the middle."""


@dataclass
class Novel(Selector):
    """Says something new each time, and meets a fault when one is planned."""

    said: int = 0
    planned: list[Fault] = field(default_factory=list)

    def select(self, messages: Any, **how: Any) -> Selected:
        selected = super().select(messages, **how)
        if selected.conversation == SESSION:
            self.said += 1
            selected = replace(selected, forced=f"sample {self.said}: {WORDS}")
        return selected

    def select_for_prompt(self, prompt: str, turn_index: int, **how: Any) -> Selected:
        return replace(self.select([{"role": "user", "content": prompt}], **how), turn_index=turn_index)

    def fault(self, selected: Selected) -> Fault | None:
        return self.planned.pop(0) if self.planned and selected.conversation == SESSION else None


@asynccontextmanager
async def novel_engine() -> AsyncIterator[tuple[Engine, str]]:
    """(the engine, its URL)."""
    app = build_app(ServerOptions(scenario=Scenario.of("hi"), tokens_per_s=PACE))
    engine = app[ENGINE]
    engine.selector = Novel(engine.options.scenario)
    serving = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await serving.setup()
    try:
        await web.TCPSite(serving, "127.0.0.1", 0).start()
        yield engine, f"http://127.0.0.1:{serving.addresses[0][1]}"
    finally:
        await serving.cleanup()
