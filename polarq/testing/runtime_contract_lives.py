"""The contract of every sandbox backend: snapshots, sandboxes without a network, and what is found of dead ones."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.errors import RuntimeFault
from polarq.testing.runtime_protocols import LONG_S, New, Sandbox, appears

DOOR = 18080
WRITTEN = 500


class SnapshotContract:
    """What a recipe left, and sandboxes that start from it."""

    no_snapshots = ""
    """Why the backend takes none, if so."""

    @pytest.fixture
    async def prepared(self, new: New) -> Sandbox:
        prepared = new("prepared")
        await prepared.start()
        return prepared

    async def test_a_sandbox_starts_from_what_another_left(self, prepared: Sandbox, new: New) -> None:
        if self.no_snapshots:
            assert not prepared.takes_snapshots(prepared.host)
            with pytest.raises(RuntimeFault):
                await prepared.snapshot("recipe")
            return
        assert prepared.takes_snapshots(prepared.host)
        script = """mkdir -p repo/sub; echo one > repo/sub/file; ln -s sub/file repo/link; chmod 700 repo/sub/file
            echo two > "$HOME/installed"; mkfifo pipe; ln repo/sub/file hard; touch -d @1000000000 old
            setsid sleep 12345 & echo $! > pid"""
        assert (await prepared.exec(script, timeout_s=LONG_S)).ok
        kept = await prepared.snapshot("recipe")
        await prepared.stop()
        assert [one.name for one in await prepared.snapshots(prepared.host)] == ["recipe"]
        assert kept.name == "recipe"
        assert kept.size_bytes > 0
        with pytest.raises(RuntimeFault):
            await new("other").start(snapshot="no such snapshot")
        copies = [new("first"), new("second")]
        for copy in copies:
            await copy.start(snapshot=kept.reference)
            look = (
                'cat repo/link "$HOME/installed"; stat -c %a repo/sub/file; stat -c %Y old; [ -p pipe ] && [ -w old ]'
            )
            result = await copy.exec(look, timeout_s=LONG_S)
            assert (result.ok, result.stdout_text.split()) == (True, ["one", "two", "700", "1000000000"]), result
            command = f"tr '\\0' ' ' < /proc/{await appears(copy, 'pid')}/cmdline"
            assert "sleep 12345" not in (await copy.exec(command, timeout_s=LONG_S)).stdout_text
            # What the other one did is not seen, nor written into what both started from.
            written = 'echo mine >> repo/sub/file; rm "$HOME/installed"; echo x > new'
            assert (await copy.exec(f"[ ! -e new ] && {{ {written}; }}", timeout_s=LONG_S)).ok
            await copy.put_bytes(b"put", "repo/sub/put")
            assert (await copy.exec("cat repo/sub/put repo/sub/file", timeout_s=LONG_S)).stdout == b"putone\nmine\n"
        for copy in copies:
            await copy.stop()

    async def test_a_dropped_snapshot_is_gone_but_not_for_whoever_started_from_it(
        self, prepared: Sandbox, new: New
    ) -> None:
        if self.no_snapshots:
            assert list(await prepared.snapshots(prepared.host)) == []
            return
        await prepared.exec("mkdir many; for i in $(seq 100); do echo $i > many/$i; done", timeout_s=LONG_S)
        kept = await prepared.snapshot("recipe")
        await prepared.stop()
        copy = new("copy")
        await copy.start(snapshot=kept.reference)
        await copy.drop_snapshot(kept.reference, copy.host)
        await copy.drop_snapshot(kept.reference, copy.host)
        assert list(await copy.snapshots(copy.host)) == []
        assert (await copy.exec("cat many/* | wc -l", timeout_s=LONG_S)).stdout_text.strip() == "100"
        await copy.stop()
        late = new("late")
        with pytest.raises(RuntimeFault):
            await late.start(snapshot=kept.reference)

    async def test_a_snapshot_may_be_made_of_what_started_from_one(self, prepared: Sandbox, new: New) -> None:
        if self.no_snapshots:
            return
        await prepared.exec("echo one > one; echo gone > gone", timeout_s=LONG_S)
        first = await prepared.snapshot("base")
        await prepared.stop()
        middle = new("middle")
        await middle.start(snapshot=first.reference)
        await middle.exec("echo two > two; rm gone", timeout_s=LONG_S)
        second = await middle.snapshot("more")
        await middle.stop()
        last = new("last")
        await last.start(snapshot=second.reference)
        assert (await last.exec("cat one two; [ ! -e gone ]", timeout_s=LONG_S)).stdout == b"one\ntwo\n"

    async def test_a_snapshot_is_of_one_moment_whatever_writes_meanwhile(self, prepared: Sandbox, new: New) -> None:
        if self.no_snapshots:
            return
        # Each file gets one more byte in turn: at any moment the first ones are ahead by one at most.
        writer = f"""trap '' HUP TERM; mkdir many; for ((;;)); do
            for ((i = 100; i < {100 + WRITTEN}; i++)); do printf x >> many/$i; done; echo x > pass; done"""
        await prepared.put_bytes(writer.encode(), "writer")
        assert (await prepared.exec("setsid bash writer > /dev/null 2>&1 &", timeout_s=LONG_S)).ok
        await appears(prepared, "pass")
        kept = await prepared.snapshot("recipe")
        await prepared.stop()
        copy = new("copy")
        await copy.start(snapshot=kept.reference)
        sizes = await copy.exec("stat -c %s many/*", timeout_s=LONG_S)
        counted = [int(size) for size in sizes.stdout_text.split()]
        assert len(counted) == WRITTEN
        assert counted == sorted(counted, reverse=True)
        assert counted[0] - counted[-1] <= 1


class OfflineContract:
    """A sandbox with a network of its own, and the one door in it."""

    no_offline = ""
    """Why the backend cannot cut a sandbox off, if so."""

    async def test_an_offline_sandbox_reaches_nothing_but_its_door(self, new: New) -> None:
        sandbox = new("offline")
        if self.no_offline:
            assert not sandbox.keeps_offline(sandbox.host)
            return
        assert sandbox.keeps_offline(sandbox.host)
        listener = socket.create_server(("0.0.0.0", 0))
        port = listener.getsockname()[1]
        await sandbox.start(online=False)
        try:
            for address in ("127.0.0.1", *_own_addresses()):
                tried = await sandbox.exec(f"exec 3<> /dev/tcp/{address}/{port}", timeout_s=LONG_S)
                assert tried.kind is ExecKind.EXITED and not tried.ok, address
            assert not (await sandbox.exec("getent hosts example.com", timeout_s=LONG_S)).ok
            interfaces = await sandbox.exec("tail -n +3 /proc/net/dev | cut -d: -f1", timeout_s=LONG_S)
            assert interfaces.stdout_text.split() == ["lo"]
            await self._goes_through_the_door(sandbox)
        finally:
            listener.close()

    async def test_two_offline_sandboxes_may_have_the_same_door(self, new: New) -> None:
        if self.no_offline:
            return
        for name in ("one", "two"):
            sandbox = new(name)
            await sandbox.start(online=False)
            await self._goes_through_the_door(sandbox)

    @staticmethod
    async def _goes_through_the_door(sandbox: Sandbox) -> None:
        loop = asyncio.get_running_loop()
        door = await sandbox.open_door(DOOR)
        door.setblocking(False)
        asking = asyncio.ensure_future(
            sandbox.exec(f"exec 3<> /dev/tcp/127.0.0.1/{DOOR}; echo question >&3; cat <&3", timeout_s=LONG_S)
        )
        accepting = asyncio.ensure_future(loop.sock_accept(door))
        await asyncio.wait([asking, accepting], return_when=asyncio.FIRST_COMPLETED)
        assert accepting.done(), await asking
        connection, _ = accepting.result()
        assert await loop.sock_recv(connection, 100) == b"question\n"
        await loop.sock_sendall(connection, b"answer\n")
        connection.close()
        assert (await asking).stdout == b"answer\n"
        door.close()


PARTS = 8


class BrokenOffContract:
    """Starts that are given up before they are through."""

    @pytest.mark.parametrize("how", ["stop", "cancel"])
    async def test_a_start_that_is_given_up_leaves_nothing(self, new: New, how: str) -> None:
        whole = new("whole")
        begun = time.monotonic()
        await whole.start()
        took_s = time.monotonic() - begun
        await whole.stop()
        for part in range(PARTS):
            sandbox = new(f"{how}{part}")
            starting = asyncio.ensure_future(sandbox.start())
            await asyncio.sleep(took_s * part / PARTS)
            if how == "cancel":
                starting.cancel()
                await asyncio.wait([starting])
            await sandbox.stop()
            # Whatever was begun has ended by then; it may also have been through just before.
            assert starting.done()
            given_up = starting.cancelled() or isinstance(starting.exception(), RuntimeFault | None)
            assert given_up, starting.exception()
            assert not sandbox.root.exists()
            assert (await sandbox.exec("true", timeout_s=LONG_S)).kind is ExecKind.SANDBOX_LOST
            with pytest.raises(RuntimeFault):
                await sandbox.start()
        assert not whole.root.exists()
        assert await whole.sweep(whole.host, ()) == []


class AloneContract:
    """Sandboxes that nobody answers for any more."""

    async def test_what_the_node_does_not_know_is_swept_away(self, new: New) -> None:
        kept, left = new("kept"), new("left")
        for sandbox in (kept, left):
            await sandbox.start()
        running = asyncio.ensure_future(left.exec("echo $$ > pid; sleep 1000", timeout_s=LONG_S))
        await appears(left, "pid")
        swept = await kept.sweep(kept.host, {"kept"})
        assert swept == ["left"]
        assert (await running).kind is ExecKind.SANDBOX_LOST
        assert (await kept.exec("echo on", timeout_s=LONG_S)).stdout == b"on\n"
        assert await kept.sweep(kept.host, {"kept"}) == []


def _own_addresses() -> list[str]:
    """Where else than on loopback this machine would be reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        try:
            # Sends nothing: it only chooses a route.
            out.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [out.getsockname()[0]]
