"""Celery (while it stops) and kombu (while it connects) set a time limit for all new sockets of the process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq_worker.runtimes.local import LocalRuntime

LARGE = {f"LARGE_{n}": "x" * 100_000 for n in range(12)}
"""More than a socket holds: the warden has to wait for the rest of the request."""


@pytest.fixture
def limited_sockets() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5.0)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


async def test_a_sandbox_works_whatever_limit_new_sockets_have(tmp_path: Path, limited_sockets: None) -> None:
    runtime = LocalRuntime(RuntimeSpec.parse({"backend": "local"}), runtime_id="r1", root=tmp_path / "r1")
    await runtime.start()
    try:
        for _ in range(5):
            result = await runtime.exec(["true"], env=LARGE, timeout_s=60)
            assert (result.kind, result.exit_code) == (ExecKind.EXITED, 0), result.message
    finally:
        await runtime.stop()
