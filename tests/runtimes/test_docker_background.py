"""What commands in a container have left running can be ended, and the sandbox goes on."""

from __future__ import annotations

import asyncio

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.testing.runtime_protocols import LONG_S, appears, lives

from .docker_rig import Sandboxes

pytestmark = pytest.mark.docker


async def test_what_was_left_behind_can_be_ended_and_the_sandbox_goes_on(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.started()
    await sandbox.exec("setsid bash -c 'echo $$ > one; sleep 1000' & sleep 1000 & echo $! > two", timeout_s=LONG_S)
    pids = [await appears(sandbox, name) for name in ("one", "two")]
    running = asyncio.ensure_future(sandbox.exec("echo x > up; sleep 1000", timeout_s=LONG_S))
    await appears(sandbox, "up")
    assert await sandbox.end_background()
    assert not any([await lives(sandbox, pid) for pid in pids])
    assert (await running).kind is ExecKind.SIGNALLED
    assert (await sandbox.exec("echo on", timeout_s=LONG_S)).stdout == b"on\n"
