"""A backend whose sandboxes have a network of their own and nothing else."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.base import ExecResult, Host
from polarq_worker.runtimes.local import LocalRuntime

_CLONE_NEWNET = 0x40000000


class Box(LocalRuntime):
    """Commands run in a namespace that ends with a process of this one's."""

    _holder: subprocess.Popen[bytes] | None = None

    @classmethod
    def keeps_offline(cls, host: Host) -> bool:
        return True

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        await super().start(snapshot=snapshot)
        if not online:
            command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo in; read _"]
            self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._holder.stdout is not None
            if await asyncio.to_thread(self._holder.stdout.readline) != b"in\n":
                raise RuntimeFault("no namespace could be made")

    @property
    def _inside(self) -> str:
        assert self._holder is not None
        return f"/proc/{self._holder.pid}/ns/net"

    async def _exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stdin: bytes | None,
        timeout_s: float,
        log: str | None,
        max_output_bytes: int,
    ) -> ExecResult:
        argv = ["bash", "-o", "pipefail", "-c", command] if isinstance(command, str) else list(command)
        return await super()._exec(
            ["nsenter", f"--net={self._inside}", *argv] if self._holder else command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            log=log,
            max_output_bytes=max_output_bytes,
        )

    async def open_door(self, port: int) -> socket.socket:
        return await asyncio.to_thread(_listener_in, self._inside, port)

    async def stop(self) -> None:
        await super().stop()
        holder, self._holder = self._holder, None
        if holder is not None:
            await asyncio.to_thread(holder.communicate)


def _listener_in(namespace: str, port: int) -> socket.socket:
    """A thread that goes in does not come back: it ends."""
    found: list[socket.socket] = []

    def enter() -> None:
        fd = os.open(namespace, os.O_RDONLY)
        try:
            if ctypes.CDLL(None).setns(fd, _CLONE_NEWNET) == 0:
                found.append(socket.create_server(("127.0.0.1", port)))
        finally:
            os.close(fd)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if not found:
        raise RuntimeFault("no door could be opened")
    return found[0]
