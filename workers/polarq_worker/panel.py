"""The worker's remote control beside Celery's own commands. What it tells is in the ledger too: it only saves time."""

from __future__ import annotations

from typing import Any

from celery.worker.control import control_command

from polarq.client.deployment import LOOK


@control_command(name=LOOK)
def look(state: Any) -> None:
    """Reads the node's flags now, and looks for work."""
    looks_again = getattr(state.app, "look_again", None)
    if looks_again is not None:
        looks_again()
