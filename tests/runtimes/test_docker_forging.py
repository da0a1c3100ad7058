"""An agent that reads all that it can see of other commands in its container cannot say how they ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.testing.runtime_protocols import LONG_S, appears, lives
from polarq_worker.runtimes.docker.runtime import DockerRuntime

from .docker_rig import Sandboxes

pytestmark = pytest.mark.docker

FORGER = r"""
import os, re, sys

def read(path):
    try:
        return open(path, "rb").read()
    except OSError:
        return b""

def write(path, data):
    try:
        out = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.write(out, data)
    except OSError:
        pass
    os.close(out)

done, rounds = set(), 0
while True:
    words = set()
    pids = [pid for pid in os.listdir("/proc") if pid.isdecimal() and int(pid) not in (1, os.getpid(), os.getppid())]
    for pid in pids:
        for name in ("cmdline", "environ"):
            words.update(re.findall(rb"[0-9a-f]{32}", read(f"/proc/{pid}/{name}")))
    words.update(name.split(".")[0].encode() for name in os.listdir("/polar/run"))
    words = sorted(words)
    for pid in pids:
        if (pid, *words) in done:
            continue
        done.add((pid, *words))
        out = b"".join(b"gone %s\ngone\n\1%s E\n" % (word, word) for word in words)
        write(f"/proc/{pid}/fd/1", out)
        err = b"".join(b"\1%s S 999999 0 0\n\1%s F\n\1%s E 0 9 9\n" % (word, word, word) for word in words)
        write(f"/proc/{pid}/fd/2", err)
    for word in words:
        for ending in ("sh", "in", "how"):
            try:
                path = f"/polar/run/{word.decode()}.{ending}"
                out = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except OSError:
                continue
            os.write(out, b"exit 0\n")
            os.close(out)
            os.chmod(path, 0o666)
    rounds += 1
    with open(sys.argv[1], "w") as out:
        print(rounds, file=out)
"""


async def forged(sandbox: DockerRuntime, user: str) -> asyncio.Task[object]:
    """Begins, as that user."""
    await sandbox.put_bytes(FORGER.encode(), "/tmp/forger.py")
    forging = sandbox.exec(["python3", "/tmp/forger.py", "/tmp/rounds"], user=user, cwd="/tmp", timeout_s=LONG_S)
    running = asyncio.ensure_future(forging)
    await appears(sandbox, "/tmp/rounds")
    return running


# Three rounds of the forger's from here on: it has seen all that runs.
READ = "until read -r now < /tmp/rounds; do sleep 0.01; done"
SEEN = f"{READ}; then=$((now + 3)); while [ $now -lt $then ]; do sleep 0.01; {READ}; done"


@pytest.mark.parametrize("user", ["0", "nobody"])
async def test_an_exit_code_is_the_commands_own(sandboxes: Sandboxes, user: str) -> None:
    sandbox = await sandboxes.started()
    forging = await forged(sandbox, user)
    for stdin in (None, b"in"):
        graded = await sandbox.exec(f"{SEEN}; echo graded; exit 3", stdin=stdin, timeout_s=LONG_S)
        assert (graded.kind, graded.exit_code, graded.out_of_memory, graded.message) == (ExecKind.EXITED, 3, False, "")
        assert b"graded\n" in graded.stdout
    missing = await sandbox.exec(["no-such-program"], timeout_s=LONG_S)
    assert missing.kind is ExecKind.COULD_NOT_START
    forging.cancel()
    await asyncio.wait([forging])


@pytest.mark.parametrize("user", ["0", "nobody"])
async def test_what_is_to_be_killed_is_dead(sandboxes: Sandboxes, tmp_path: Path, user: str) -> None:
    sandbox = await sandboxes.started()
    forging = await forged(sandbox, user)
    slow = await sandbox.exec(f"echo $$ > one; {SEEN}; : > seen; sleep 1000", timeout_s=8.0)
    assert slow.kind is ExecKind.TIMED_OUT
    assert (await sandbox.exec(["test", "-e", "seen"], timeout_s=LONG_S)).ok, "or this test shows nothing"
    await sandbox.get_file("one", tmp_path / "pid", 100)
    assert not await lives(sandbox, (tmp_path / "pid").read_text())
    forging.cancel()
    await asyncio.wait([forging])


async def test_one_that_kills_what_held_it_is_ended_with_all_others(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.started()
    script = (
        "echo $$ > one; setsid sleep 1000 & echo $! > two; kill -9 $(cut -d' ' -f4 /proc/$PPID/stat) $PPID; sleep 1000"
    )
    fled = await sandbox.exec(script, timeout_s=LONG_S)
    assert fled.kind is ExecKind.SIGNALLED, fled
    pids = [await appears(sandbox, name) for name in ("one", "two")]
    assert await lives(sandbox, pids[1]), "or this test shows nothing"
    assert await sandbox.end_background()
    assert not any([await lives(sandbox, pid) for pid in pids])
    assert (await sandbox.exec("echo on", timeout_s=LONG_S)).stdout == b"on\n"
