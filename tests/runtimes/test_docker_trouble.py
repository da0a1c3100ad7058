"""What the docker runtime says when something goes wrong in a sandbox, and what it keeps apart. A real daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import SandboxRecord
from polarq.errors import BackendAway, ImageMissing, RuntimeFault
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker import config
from polarq_worker.runtimes.docker.runtime import DockerRuntime

from .docker_rig import LONG_S, Sandboxes, host_of, small_tree

pytestmark = pytest.mark.docker


class TestLimits:
    async def test_a_command_that_uses_up_the_memory_says_so_and_the_sandbox_goes_on(
        self, sandboxes: Sandboxes
    ) -> None:
        sandbox = await sandboxes.started(memory_mb=64)
        result = await sandbox.exec(["python3", "-c", "x = b'x' * (1 << 30)"], timeout_s=LONG_S)
        assert (result.kind, result.signal, result.out_of_memory) == (ExecKind.SIGNALLED, 9, True)
        assert "memory (64 MB)" in result.message
        after = await sandbox.exec("echo on", timeout_s=LONG_S)
        assert (after.stdout, after.out_of_memory) == (b"on\n", False)

    @pytest.mark.parametrize(
        "script",
        ["bomb() { bomb | bomb & }; bomb; sleep 1000", "while :; do sleep 1000 & done 2> /dev/null"],
        ids=["fork bomb", "every place taken"],
    )
    async def test_what_takes_every_place_ends_with_its_time(self, sandboxes: Sandboxes, script: str) -> None:
        sandbox = await sandboxes.started(max_processes=64)
        result = await sandbox.exec(script, timeout_s=5.0)
        assert result.kind is ExecKind.TIMED_OUT
        after = await sandbox.exec("echo on", timeout_s=LONG_S)
        # Where it cannot be killed alone, all of the sandbox is, which is said.
        assert after.stdout == b"on\n" or "could not be killed alone" in after.message, after

    async def test_a_full_process_table_is_said_and_not_a_timeout(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started(max_processes=64)
        # Not bash: it tries each for seconds.
        filled = await sandbox.exec(["sh", "-c", "for i in $(seq 100); do sleep 1000 & done"], timeout_s=LONG_S)
        assert "limit of 64 processes" in filled.message
        # What failed has left a place or two: they are taken as well.
        for _ in range(64):
            refused = await sandbox.exec(["sh", "-c", "sleep 1000 & sleep 1000 & sleep 1000 &"], timeout_s=LONG_S)
            if refused.kind is ExecKind.COULD_NOT_START:
                break
        assert refused.kind is ExecKind.COULD_NOT_START, refused
        assert "limit of 64 processes is reached" in refused.message
        assert await sandbox.alive()

    async def test_thirty_commands_that_leave_short_processes_behind_fill_nothing(self, sandboxes: Sandboxes) -> None:
        """Field case R04."""
        sandbox = await sandboxes.started(max_processes=128)
        script = "for i in $(seq 20); do sh -c '(sleep 0.05 &)'; done"
        for _ in range(30):
            assert (await sandbox.exec(script, timeout_s=LONG_S)).ok
        look = "grep -lE '^State:.Z' /proc/[0-9]*/status"
        assert (await sandbox.exec(f"while {look}; do sleep 0.05; done 2> /dev/null", timeout_s=LONG_S)).ok
        assert (await sandbox.exec("echo graded", timeout_s=LONG_S)).stdout == b"graded\n"

    async def test_what_a_daemon_cannot_give_is_one_line_with_the_key(self, sandboxes: Sandboxes) -> None:
        for key in ("storage_mb", "gpus"):
            sandbox = sandboxes.new(f"with-{key}", None, **{key: 100})
            try:
                await sandbox.start()
            except RuntimeFault as exc:
                assert key in str(exc)
                assert "\n" not in str(exc)


class TestRights:
    async def test_root_in_it_has_few_and_cannot_get_more(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        status = await sandbox.exec(["cat", "/proc/self/status"], timeout_s=LONG_S)
        lines = dict(line.split(":\t", 1) for line in status.stdout_text.splitlines() if ":\t" in line)
        assert lines["NoNewPrivs"] == "1"
        # CHOWN 0, DAC_OVERRIDE 1, FOWNER 3, FSETID 4, KILL 5, SETGID 6, SETUID 7, NET_BIND_SERVICE 10
        assert int(lines["CapBnd"], 16) == sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 10))
        assert not (await sandbox.exec(["mknod", "disk", "b", "8", "0"], timeout_s=LONG_S)).ok
        assert not (await sandbox.exec("mount -t tmpfs none /mnt", timeout_s=LONG_S)).ok

    async def test_package_managers_can_do_their_work(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        became = await sandbox.exec("su nobody -s /bin/sh -c id", timeout_s=LONG_S)
        assert "nobody" in became.stdout_text, became
        again = await sandbox.exec(["dpkg-reconfigure", "-f", "noninteractive", "base-files"], timeout_s=LONG_S)
        assert again.ok, again

    async def test_a_user_of_the_image_owns_the_session_and_what_is_put_there(
        self, sandboxes: Sandboxes, tmp_path: Path
    ) -> None:
        sandbox = await sandboxes.started(user="nobody")
        (tmp_path / "data/sub").mkdir(parents=True)
        (tmp_path / "data/sub/file").write_text("x")
        await sandbox.put_dir(tmp_path / "data", "deep/er/data")
        await sandbox.put_bytes(b"y", "more/bytes")
        script = "id -un; for f in deep/er/data/sub/file more/bytes; do echo z >> $f; done; touch deep/new more/new"
        result = await sandbox.exec(script, timeout_s=LONG_S)
        assert (result.ok, result.stdout) == (True, b"nobody\n"), result
        assert (await sandbox.exec("cat", stdin=b"in", timeout_s=LONG_S)).stdout == b"in"
        as_root = await sandbox.exec(["id", "-u"], user="0", timeout_s=LONG_S)
        assert as_root.stdout == b"0\n"
        # Its processes are not nobody's to kill, nor the sandbox's first one.
        assert not (await sandbox.exec("kill -9 1 2> /dev/null || kill -9 7", timeout_s=LONG_S)).ok

    async def test_a_user_that_is_not_there_is_said(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        result = await sandbox.exec("true", user="nosuch", timeout_s=LONG_S)
        assert result.kind is ExecKind.COULD_NOT_START
        assert "nosuch" in result.message

    async def test_what_it_is_is_on_its_labels(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started("r-7-1-agent")
        docker = sandboxes.client()
        described = await docker.containers.container(sandbox.handle).show()
        await docker.close()
        labels = described["Config"]["Labels"]
        assert labels[config.NODE] == "node0"
        assert labels[config.RUNTIME] == "r-7-1-agent"
        assert labels[config.ROLLOUT] == "r-7"
        assert described["Image"] == sandbox.image_id


class TestLoss:
    @pytest.mark.parametrize("how", ["removed", "killed", "killed inside"])
    async def test_a_container_that_goes_away_ends_the_command_as_lost(self, sandboxes: Sandboxes, how: str) -> None:
        sandbox = await sandboxes.started()
        running = asyncio.ensure_future(sandbox.exec("echo x > up; echo out; sleep 1000", timeout_s=LONG_S))
        assert (await sandbox.exec("until [ -s up ]; do sleep 0.01; done", timeout_s=LONG_S)).ok
        docker = sandboxes.client()
        container = docker.containers.container(sandbox.handle)
        if how == "removed":
            await container.delete(force=True)
        elif how == "killed":
            await container.kill()
        else:
            await sandbox.exec("kill -9 -1", timeout_s=LONG_S)
        await docker.close()
        result = await running
        assert (result.kind, result.stdout) == (ExecKind.SANDBOX_LOST, b"out\n"), result
        assert result.message
        assert not await sandbox.alive()
        with pytest.raises(RuntimeFault, match="lost"):
            await sandbox.put_bytes(b"x", "file")

    async def test_a_command_that_kills_its_own_group_was_killed(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        result = await sandbox.exec("kill -TERM 0; sleep 1000", timeout_s=LONG_S)
        assert (result.kind, result.signal) == (ExecKind.SIGNALLED, 15), result

    async def test_an_exit_code_above_128_is_no_signal(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        result = await sandbox.exec("exit 137", timeout_s=LONG_S)
        assert (result.kind, result.exit_code) == (ExecKind.EXITED, 137)
        for signal, number in (("TERM", 15), ("SEGV", 11), ("KILL", 9)):
            killed = await sandbox.exec(["bash", "-c", f"ulimit -c 0; kill -{signal} $$"], timeout_s=LONG_S)
            assert (killed.kind, killed.signal, killed.stderr) == (ExecKind.SIGNALLED, number, b""), killed

    async def test_a_program_without_an_interpreter_could_not_start(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        await sandbox.put_bytes(b"#!/no/such/interpreter\n", "tool", 0o755)
        await sandbox.put_bytes(b"x", "text", 0o644)
        for name in ("./tool", "./text"):
            result = await sandbox.exec([name], timeout_s=LONG_S)
            assert (result.kind, result.stderr) == (ExecKind.COULD_NOT_START, b""), result
            assert name in result.message

    async def test_odd_variables_arrive_too(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        result = await sandbox.exec(["env"], env={"A.B-C": "odd", "NORMAL": "two\nlines"}, timeout_s=LONG_S)
        assert "A.B-C=odd" in result.stdout_text.splitlines()
        assert "NORMAL=two\nlines" in result.stdout_text
        assert "POLARQ_SCRIPT" not in (await sandbox.exec("env", timeout_s=LONG_S)).stdout_text

    async def test_nothing_is_left_in_the_folder_of_scripts(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        for script, more in (("true", {}), ("x" * 100_000, {}), ("cat", {"stdin": b"x"})):
            await sandbox.exec(script, timeout_s=LONG_S, **more)  # type: ignore[arg-type]
        await sandbox.exec("sleep 1000", timeout_s=1.0)
        assert (await sandbox.exec(["ls", "-A", "/polar/run"], timeout_s=LONG_S)).stdout_text.count("\n") <= 1


class TestOrphans:
    async def test_a_record_is_enough_to_stop_one(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        record = SandboxRecord(
            runtime="docker",
            runtime_id=sandbox.runtime_id,
            handle=sandbox.handle,
            reach=sandbox.reach,
            node_id="node0",
            incarnation="1",
            hostname="here",
        )
        await DockerRuntime.stop_orphan(record)
        assert not await sandbox.alive()
        await DockerRuntime.stop_orphan(record)

    async def test_one_that_is_cancelled_while_it_starts_leaves_nothing(self, sandboxes: Sandboxes) -> None:
        for delay in range(4):
            sandbox = sandboxes.new(f"cancelled{delay}")
            starting = asyncio.ensure_future(sandbox.start())
            await asyncio.sleep(0.03 * delay)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await sandbox.stop()
        assert await DockerRuntime.sweep(sandboxes.host, ()) == []
        assert list(sandboxes.folder.iterdir()) == []

    async def test_another_deployments_node_of_the_same_name_is_left_alone(
        self, sandboxes: Sandboxes, tmp_path: Path
    ) -> None:
        sandbox = await sandboxes.started()
        kept = await sandbox.snapshot("recipe")
        other = host_of(tmp_path / "other")
        assert await DockerRuntime.sweep(other, ()) == []
        assert await DockerRuntime.snapshots(other) == []
        assert await sandbox.alive()
        assert [one.reference for one in await DockerRuntime.snapshots(sandboxes.host)] == [kept.reference]

    async def test_a_snapshot_keeps_user_and_image_and_is_found_by_the_next_worker(self, sandboxes: Sandboxes) -> None:
        first = await sandboxes.started(user="nobody")
        await first.exec("echo kept > kept", timeout_s=LONG_S)
        kept = await first.snapshot("recipe")
        await first.stop()
        next_worker = Host("node0", "2", sandboxes.host.folder, sandboxes.host.settings)
        (found,) = await DockerRuntime.snapshots(next_worker)
        assert found == kept
        assert 0 < found.size_bytes < 10_000_000
        second = sandboxes.new("second", next_worker, user="nobody")
        await second.start(snapshot=found.reference)
        assert (await second.exec("cat kept; echo more >> kept", timeout_s=LONG_S)).stdout == b"kept\n"
        assert second.image_id == first.image_id != ""
        with pytest.raises(RuntimeFault, match="exists already"):
            await sandboxes.new("second", next_worker, user="nobody").start()


class TestImages:
    async def test_an_image_that_is_not_here_and_may_not_be_pulled_is_missing(
        self, sandboxes: Sandboxes, tmp_path: Path
    ) -> None:
        sandbox = sandboxes.new("none", host_of(tmp_path, pull="never"), image="polarq-none:never")
        with pytest.raises(ImageMissing, match="polarq-none:never"):
            await sandbox.start()

    async def test_a_daemon_that_is_not_there_is_said(self, sandboxes: Sandboxes, tmp_path: Path) -> None:
        away = host_of(tmp_path, url=f"unix://{tmp_path}/none.sock")
        with pytest.raises(BackendAway, match="none"):
            await sandboxes.new("away", away).start()
        with pytest.raises(BackendAway):
            await DockerRuntime.sweep(away, ())
        assert not DockerRuntime.keeps_offline(away)

    async def test_an_image_of_sh_alone_runs_programs_and_says_that_bash_is_missing(self, sandboxes: Sandboxes) -> None:
        await sandboxes.import_image("polarq-small:test", small_tree("/bin/dash", "/bin/sleep", "/bin/cat"))
        sandbox = await sandboxes.started(image="polarq-small:test")
        assert (await sandbox.exec(["cat", "/polar/none"], timeout_s=LONG_S)).exit_code == 1
        result = await sandbox.exec("echo x", timeout_s=LONG_S)
        assert result.kind is ExecKind.COULD_NOT_START
        assert "no bash" in result.message
        late = await sandbox.exec(["sleep", "1000"], timeout_s=1.0)
        assert late.kind is ExecKind.TIMED_OUT
        assert (await sandbox.exec(["cat"], stdin=b"in", timeout_s=LONG_S)).stdout == b"in"

    async def test_volumes_of_an_image_are_not_kept_which_is_said(self, sandboxes: Sandboxes) -> None:
        tree = small_tree("/bin/dash", "/bin/sleep")
        await sandboxes.import_image("polarq-volumes:test", tree, "VOLUME /data")
        sandbox = await sandboxes.started(image="polarq-volumes:test")
        with pytest.raises(RuntimeFault, match="/data"):
            await sandbox.snapshot("recipe")


class TestTransfers:
    async def test_a_file_of_five_gigabytes_is_refused_before_it_is_read(
        self, sandboxes: Sandboxes, tmp_path: Path
    ) -> None:
        sandbox = await sandboxes.started()
        await sandbox.exec("truncate -s 5G big; mkdir out; mv big out; echo x > out/zzz", timeout_s=LONG_S)
        with pytest.raises(RuntimeFault, match="1000000 bytes"):
            await sandbox.get_file("out/big", tmp_path / "got", max_bytes=1_000_000)
        assert not (tmp_path / "got").exists()
        fetched = await sandbox.get_dir("out", tmp_path / "out", max_bytes=1_000_000, max_files=10)
        assert [one.path for one in fetched.refused] == ["big"]
        assert (tmp_path / "out/zzz").read_text() == "x\n"

    async def test_devices_and_sockets_stay_where_they_are(self, sandboxes: Sandboxes, tmp_path: Path) -> None:
        sandbox = await sandboxes.started()
        make = "import socket; socket.socket(socket.AF_UNIX).bind('out/s')"
        assert (await sandbox.exec(f'mkdir out; touch out/a; python3 -c "{make}"', timeout_s=LONG_S)).ok
        fetched = await sandbox.get_dir("out", tmp_path / "out", max_bytes=1000, max_files=10)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
        assert [one.path for one in fetched.refused] in ([], ["s"])
        got = await sandbox.get_dir("/dev", tmp_path / "dev", max_bytes=1000, max_files=1000)
        assert all(path.is_dir() or path.is_symlink() or path.is_file() for path in (tmp_path / "dev").rglob("*"))
        assert {"null", "zero"} <= {one.path for one in got.refused}

    async def test_an_upload_never_removes_a_folder_for_a_file(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        await sandbox.exec("mkdir folder; echo x > folder/x", timeout_s=LONG_S)
        with pytest.raises(RuntimeFault):
            await sandbox.put_bytes(b"y", "folder")
        assert (await sandbox.exec("cat folder/x", timeout_s=LONG_S)).stdout == b"x\n"
        with pytest.raises(RuntimeFault, match="own folder"):
            await sandbox.put_dir(Path(__file__).parent, "/polar/session")


class TestBystanders:
    """Programs of a task, and what of ours runs beside them."""

    async def test_a_tasks_pkill_meets_nothing_of_ours(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        listed = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done"
        seen = await sandbox.exec(listed, timeout_s=LONG_S)
        assert "POLARQ_SHELL" in seen.stdout_text
        assert not [word for word in ("printf", "rm -f", "oom_kill") if word in seen.stdout_text]

    async def test_variables_of_a_task_arrive_whatever_they_are_called(self, sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.started()
        names = "abcdefghijklmnopqrstuvwxyz"
        result = await sandbox.exec(["env"], env={name: f"<{name}>" for name in names}, timeout_s=LONG_S)
        lines = set(result.stdout_text.splitlines())
        assert {f"{name}=<{name}>" for name in names} <= lines
        ours = {line.partition("=")[0] for line in lines if line.startswith(("POLARQ_", "q_"))}
        assert ours == {"POLARQ_RUNTIME_ID"}
