"""What importing costs a trainer."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("celery", "kombu", "aiohttp", "redis", "typer", "rich", "polarq_worker", "polarq_proxy")


def test_importing_polarq_loads_nothing_heavy_and_prints_nothing() -> None:
    code = f"import sys, polarq; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_names_a_trainer_types_are_there() -> None:
    code = "from polarq import AsyncClient, Client, Task, TaskResult, submit_rollout; print(submit_rollout.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "polarq.submit_rollout"
