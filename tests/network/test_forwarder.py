"""Doors of backends that cannot enter their sandboxes' network: a mounted socket, and a program inside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault
from polarq_worker.network.forwarder import forwarded_door
from polarq_worker.network.model_door import ProxyAddress
from polarq_worker.network.relay import Relay
from polarq_worker.runtimes.base import Host, Runtime
from polarq_worker.runtimes.docker import doors
from polarq_worker.runtimes.local import LocalRuntime
from tests.network.rig import LONG_S, echo, serving
from tests.runtimes import docker_rig, local_here

CLIENT = r"""
exec 3<>/dev/tcp/127.0.0.1/7070 && printf 'hello\n' >&3 && read -r -u 3 line && echo "$line"
head -c 3000000 /dev/zero | tr '\0' x > big
python3 - <<'PY'
import socket
with socket.create_connection(("127.0.0.1", 7070)) as one, open("big", "rb") as big:
    sent = big.read()
    import threading
    threading.Thread(target=lambda: (one.sendall(sent), one.shutdown(socket.SHUT_WR))).start()
    got = b""
    while data := one.recv(65536):
        got += data
    print(got == sent)
PY
"""


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Runtime]:
    local_here.needs_bubblewrap()
    host = Host("node0", "1", tmp_path / "kept", local_here.settings("bubblewrap"))
    runtime = LocalRuntime(RuntimeSpec(backend="local"), runtime_id="one", root=tmp_path / "root", host=host)
    await runtime.start(online=False)
    yield runtime
    await runtime.stop()


@pytest.fixture
def folder(sandbox: Runtime, tmp_path: Path) -> Path:
    made = tmp_path / "root" / "session" / "sockets"
    made.mkdir(mode=0o755)
    return made


async def works(runtime: Runtime, door_of: Path, inside: str, log: Path, env: dict[str, str] | None = None) -> None:
    async with serving(echo) as port:
        relay = Relay(log, lambda: ProxyAddress("127.0.0.1", port))
        try:
            await relay.open(await forwarded_door(runtime, door_of, inside, 7070), None)
            asked = await runtime.exec(CLIENT, timeout_s=LONG_S)
            assert asked.stdout_text.split() == ["hello", "True"], asked
        finally:
            await relay.aclose()


async def test_a_program_in_the_sandbox_leads_out_of_it(sandbox: Runtime, folder: Path, tmp_path: Path) -> None:
    await works(sandbox, folder, f"{sandbox.layout.session_dir}/sockets", tmp_path / "relay.log")


async def test_perl_will_do(sandbox: Runtime, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'exec perl -e "$POLARQ_PERL" "$POLARQ_PORT" "$POLARQ_SOCKET"'
    monkeypatch.setattr("polarq_worker.network.forwarder.SCRIPT", script)
    await works(sandbox, folder, f"{sandbox.layout.session_dir}/sockets", tmp_path / "relay.log")


async def test_without_python_and_perl_it_is_said_in_one_line(
    sandbox: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sandbox.spec.env, "PATH", "/nonexistent")
    with pytest.raises(RuntimeFault, match="neither python3 nor perl in it: install one, or set network_policy 'full'"):
        await forwarded_door(sandbox, folder, "/polar/session/sockets", 7070)


async def test_a_port_that_is_taken_is_said(sandbox: Runtime, folder: Path) -> None:
    inside = f"{sandbox.layout.session_dir}/sockets"
    first = await forwarded_door(sandbox, folder, inside, 7070)
    with pytest.raises(RuntimeFault, match=r"port 7070 of the sandbox's own network cannot be led out of it"):
        await forwarded_door(sandbox, folder, inside, 7070)
    first.close()


@pytest.mark.docker
async def test_a_worker_that_is_not_root_leads_its_containers_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_rig.daemon_is_here()
    monkeypatch.setattr(doors, "can_enter", lambda: False)
    deep = tmp_path / ("d" * (150 - len(str(tmp_path))))
    deep.mkdir()
    sandboxes = docker_rig.Sandboxes(deep)
    runtime = sandboxes.new("one", user="1234")
    try:
        await runtime.start(online=False)
        async with serving(echo) as port:
            relay = Relay(tmp_path / "relay.log", lambda: ProxyAddress("127.0.0.1", port))
            try:
                await relay.open(await runtime.open_door(7070), None)
                asked = await runtime.exec(CLIENT, timeout_s=LONG_S)
                assert asked.stdout_text.split() == ["hello", "True"], asked
                # The program is not its user's to end.
                assert not (await runtime.exec("pkill -f 7070 || kill -9 -1", timeout_s=LONG_S)).ok
                assert (await runtime.exec("exec 3<>/dev/tcp/127.0.0.1/7070", timeout_s=LONG_S)).ok
            finally:
                await relay.aclose()
    finally:
        await sandboxes.stop()
