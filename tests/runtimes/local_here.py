"""Local sandboxes for tests, with and without walls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from polarq import bubblewrap
from polarq.contracts.specs import RuntimeSpec
from polarq.topology.runtimes import RuntimesSection
from polarq_worker.runtimes import cgroups
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.local import LocalRuntime

from ..needs import not_here

LONG_S = 120.0


def settings(isolation: str, *visible: str) -> RuntimesSection:
    return RuntimesSection.parse({"local": {"isolation": isolation, "visible": list(visible)}})


def needs_bubblewrap() -> None:
    if why := bubblewrap.why_not():
        not_here(why)


def made(tmp_path: Path, name: str = "r1", *visible: str, **spec: object) -> LocalRuntime:
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    host = Host("node0", "1", state / "runtimes", settings("bubblewrap", *visible), (state,))
    whole = RuntimeSpec.parse({"backend": "local", **spec})
    return LocalRuntime(whole, runtime_id=name, root=state / "rollouts" / name, host=host)


async def prints(runtime: LocalRuntime, command: str) -> str:
    result = await runtime.exec(command, timeout_s=LONG_S)
    assert result.ok, result
    return result.stdout_text.strip()


async def until(condition: Callable[[], bool]) -> None:
    # Other processes send no events to wait for.
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def needs_groups(*controllers: str) -> None:
    if missing := set(controllers) - set(cgroups.usable()):
        not_here(f"control groups of {', '.join(sorted(missing))} cannot be made")


def groups_of(runtime_id: str) -> set[Path]:
    return {folder for place in cgroups.usable().values() for folder in place.glob(f"polarq-{runtime_id}-*")}
