"""What every sandbox backend must do, as tests. A backend's own test file runs them:

    class TestMyRuntime(RuntimeContract):
        @pytest.fixture
        async def new(self, tmp_path: Path) -> AsyncIterator[New]:
            made = []
            host = Host("node0", "1", tmp_path / "kept")

            def new(runtime_id: str) -> Runtime:
                made.append(MyRuntime(SPEC, runtime_id=runtime_id, root=tmp_path / runtime_id, host=host))
                return made[-1]

            yield new
            for runtime in made:
                await runtime.stop()

with `env=CONTRACT_ENV` in its spec. What a backend cannot do it says with a reason (`no_users`, `no_snapshots`,
`no_offline`); then the suite looks that it refuses. The sandbox needs bash, coreutils, grep, getent and setsid.
"""

from __future__ import annotations

import asyncio
import hashlib
import os

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.errors import RuntimeFault
from polarq.testing.runtime_contract_files import HostileFilesContract, TransferContract
from polarq.testing.runtime_contract_lives import AloneContract, BrokenOffContract, OfflineContract, SnapshotContract
from polarq.testing.runtime_protocols import CONTRACT_ENV, LONG_S, New, Sandbox, appears, lives

__all__ = ["CONTRACT_ENV", "New", "RuntimeContract", "Sandbox", "appears", "lives"]


class CommandContract:
    """Running commands."""

    async def test_a_command_reports_its_exit_code_and_both_streams(self, runtime: Sandbox) -> None:
        result = await runtime.exec("echo out; echo err >&2; exit 3", timeout_s=LONG_S)
        assert (result.kind, result.exit_code, result.signal) == (ExecKind.EXITED, 3, None)
        assert (result.stdout, result.stderr, result.ok) == (b"out\n", b"err\n", False)

    async def test_a_failing_part_of_a_pipe_fails_the_command(self, runtime: Sandbox) -> None:
        result = await runtime.exec("false | cat", timeout_s=LONG_S)
        assert result.exit_code == 1

    async def test_a_writer_into_a_closed_pipe_ends_quietly(self, runtime: Sandbox) -> None:
        result = await runtime.exec("yes | head -n 1", timeout_s=LONG_S)
        assert (result.exit_code, result.stdout, result.stderr) == (128 + 13, b"y\n", b"")

    async def test_a_list_is_an_argv_that_no_shell_reads(self, runtime: Sandbox) -> None:
        result = await runtime.exec(["printf", "%s|", "a b", "$HOME", "'\"`"], timeout_s=LONG_S)
        assert result.stdout == b"a b|$HOME|'\"`|"

    async def test_a_command_killed_by_a_signal_says_so(self, runtime: Sandbox) -> None:
        result = await runtime.exec("kill -9 $$", timeout_s=LONG_S)
        assert (result.kind, result.exit_code, result.signal) == (ExecKind.SIGNALLED, None, 9)

    async def test_a_timed_out_command_keeps_its_partial_output(self, runtime: Sandbox) -> None:
        result = await runtime.exec("echo before; echo error >&2; sleep 1000", timeout_s=1.0)
        assert (result.kind, result.exit_code) == (ExecKind.TIMED_OUT, None)
        assert (result.stdout, result.stderr) == (b"before\n", b"error\n")

    async def test_a_timeout_kills_also_what_left_the_session(self, runtime: Sandbox) -> None:
        # A daemon: its parent has ended, its session and its environment are its own.
        script = "(setsid env -i bash -c 'echo $$ > stray; sleep 1000' &) ; sleep 1000 & echo $! > child; wait"
        result = await runtime.exec(script, timeout_s=2.0)
        assert result.kind is ExecKind.TIMED_OUT
        for name in ("stray", "child"):
            assert not await lives(runtime, await appears(runtime, name))

    async def test_a_process_that_ignores_every_signal_it_can_ends_with_its_time(self, runtime: Sandbox) -> None:
        deaf = "trap '' TERM INT HUP QUIT; echo $$ > deaf; while :; do sleep 1000; done"
        await runtime.put_bytes(deaf.encode(), "script")
        result = await runtime.exec("(setsid bash script &); bash script", timeout_s=2.0)
        assert result.kind is ExecKind.TIMED_OUT
        assert not await lives(runtime, await appears(runtime, "deaf"))

    async def test_cancelling_kills_the_command_and_is_raised_again(self, runtime: Sandbox) -> None:
        running = asyncio.ensure_future(runtime.exec("echo $$ > pid; sleep 1000", timeout_s=LONG_S))
        pid = await appears(runtime, "pid")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not await lives(runtime, pid)

    async def test_a_missing_program_could_not_start(self, runtime: Sandbox) -> None:
        result = await runtime.exec(["no-such-program"], timeout_s=LONG_S)
        assert result.kind is ExecKind.COULD_NOT_START
        assert "no-such-program" in result.message
        assert "\n" not in result.message

    async def test_a_missing_folder_could_not_start(self, runtime: Sandbox) -> None:
        result = await runtime.exec("true", cwd="/no/such/folder", timeout_s=LONG_S)
        assert result.kind is ExecKind.COULD_NOT_START
        assert "/no/such/folder" in result.message

    async def test_a_script_of_two_megabytes_runs(self, runtime: Sandbox) -> None:
        script = f"read -r -d '' text <<'END'\n{'x' * 2_000_000}\nEND\necho ${{#text}}"
        result = await runtime.exec(script, timeout_s=LONG_S)
        assert result.stdout_text.strip() == "2000000", result

    async def test_without_stdin_a_reader_sees_the_end_at_once(self, runtime: Sandbox) -> None:
        result = await runtime.exec("cat > /dev/null; echo work", timeout_s=LONG_S)
        assert result.stdout == b"work\n"

    async def test_three_megabytes_of_stdin_arrive_whole_and_end(self, runtime: Sandbox) -> None:
        data = os.urandom(3_000_000)
        result = await runtime.exec("sha256sum", stdin=data, timeout_s=LONG_S)
        assert result.stdout_text.split()[:1] == [hashlib.sha256(data).hexdigest()]

    async def test_stdin_that_nobody_reads_is_no_error(self, runtime: Sandbox) -> None:
        result = await runtime.exec("exec <&-; echo done", stdin=b"x" * 3_000_000, timeout_s=LONG_S)
        assert (result.ok, result.stdout) == (True, b"done\n")

    async def test_commands_can_run_side_by_side(self, runtime: Sandbox) -> None:
        # Each waits for the other: one after the other they would never end.
        results = await asyncio.gather(
            runtime.exec("echo x > one; until [ -s two ]; do sleep 0.01; done", timeout_s=LONG_S),
            runtime.exec("echo x > two; until [ -s one ]; do sleep 0.01; done", timeout_s=LONG_S),
        )
        assert all(result.ok for result in results)


class OutputContract:
    """What commands print."""

    @pytest.mark.parametrize("script", ["printf 'ok\\360\\237\\n'", "printf 'a\\0b'"])
    async def test_odd_bytes_are_kept_and_replaced_only_in_text(self, runtime: Sandbox, script: str) -> None:
        result = await runtime.exec(script, timeout_s=LONG_S, log="odd")
        expected = {True: b"ok\xf0\x9f\n", False: b"a\0b"}["ok" in script]
        assert (result.exit_code, result.stdout) == (0, expected)
        assert result.stdout_text == expected.decode("utf-8", "replace")
        assert (runtime.host_log_dir / "odd.stdout").read_bytes() == expected

    async def test_random_bytes_come_through_unchanged(self, runtime: Sandbox) -> None:
        result = await runtime.exec("head -c 300000 /dev/urandom | tee bytes; sha256sum < bytes >&2", timeout_s=LONG_S)
        assert result.stderr_text.split()[:1] == [hashlib.sha256(result.stdout).hexdigest()]

    async def test_output_is_bounded_to_its_head_and_tail(self, runtime: Sandbox) -> None:
        result = await runtime.exec(
            "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last",
            timeout_s=LONG_S,
            max_output_bytes=1000,
        )
        assert (result.exit_code, result.truncated, result.stdout_bytes) == (0, True, 5_000_012)
        assert len(result.stdout) < 1200
        assert result.stdout.startswith(b"first\n") and result.stdout.endswith(b"last\n")

    async def test_the_log_holds_the_whole_output(self, runtime: Sandbox) -> None:
        await runtime.exec("seq 100000; echo problem >&2", timeout_s=LONG_S, log="agent/step.00", max_output_bytes=100)
        assert (runtime.host_log_dir / "agent/step.00.stdout").read_text().split() == [str(n) for n in range(1, 100001)]
        assert (runtime.host_log_dir / "agent/step.00.stderr").read_text() == "problem\n"

    async def test_the_log_is_written_while_the_command_runs(self, runtime: Sandbox) -> None:
        script = "echo soon; until [ -e go ]; do sleep 0.01; done"
        running = asyncio.ensure_future(runtime.exec(script, timeout_s=LONG_S, log="live"))
        log = runtime.host_log_dir / "live.stdout"
        # Another process writes it, and says nothing.
        while not (log.exists() and log.read_bytes() == b"soon\n") and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not running.done(), await running
        await runtime.put_bytes(b"", "go")
        assert (await running).ok

    async def test_a_flood_of_output_ends_with_its_time_and_harms_nobody(self, runtime: Sandbox) -> None:
        result = await runtime.exec("yes flood", timeout_s=1.0, max_output_bytes=10_000, log="flood")
        assert (result.kind, result.truncated) == (ExecKind.TIMED_OUT, True)
        assert len(result.stdout) < 11_000
        assert (await runtime.exec("echo on", timeout_s=LONG_S)).stdout == b"on\n"


class EnvironmentContract:
    """What commands find around them."""

    no_users = ""
    """Why commands cannot run as another user, if so."""
    other_user = "1234"

    async def test_a_command_runs_as_the_user_that_it_names(self, runtime: Sandbox) -> None:
        result = await runtime.exec(["id", "-u"], user=self.other_user, timeout_s=LONG_S)
        if self.no_users:
            assert result.kind is ExecKind.COULD_NOT_START
            assert "user" in result.message and "\n" not in result.message
        else:
            assert result.stdout_text.split() == [self.other_user], result

    async def test_there_is_a_home_a_path_and_room_for_temporary_files(self, runtime: Sandbox) -> None:
        script = 'echo x > "$HOME/file" && cat "$HOME/file" && echo y > "$(mktemp)" && command -v env > /dev/null'
        result = await runtime.exec(script, timeout_s=LONG_S)
        assert (result.ok, result.stdout) == (True, b"x\n"), result

    async def test_the_environment_is_the_specs_then_the_calls(self, runtime: Sandbox) -> None:
        result = await runtime.exec(
            'echo "$CONTRACT_SPEC|$CONTRACT_BOTH|$CONTRACT_CALL"',
            env={"CONTRACT_BOTH": "from the call", "CONTRACT_CALL": "too"},
            timeout_s=LONG_S,
        )
        assert result.stdout_text.strip() == "from the spec|from the call|too"

    async def test_nothing_of_the_workers_environment_is_seen(
        self, runtime: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("POLARQ_REDIS_URL", "HTTPS_PROXY", "http_proxy", "ENGINE_API_KEY", "PYTHONPATH"):
            monkeypatch.setenv(name, "a-secret-of-the-worker")
        result = await runtime.exec(["env"], timeout_s=LONG_S)
        assert "a-secret-of-the-worker" not in result.stdout_text

    async def test_no_descriptor_of_the_worker_is_open(self, runtime: Sandbox) -> None:
        result = await runtime.exec(["bash", "-c", "ls /proc/$$/fd; true"], timeout_s=LONG_S)
        assert {int(name) for name in result.stdout_text.split()} <= {0, 1, 2, 255}, result

    async def test_the_session_has_its_folders(self, runtime: Sandbox) -> None:
        layout = runtime.layout
        for folder in (layout.session_dir, layout.artifacts_dir, layout.agent_log_dir, layout.eval_log_dir):
            assert (await runtime.exec("echo x > file", cwd=folder, timeout_s=LONG_S)).ok

    async def test_polars_session_path_leads_to_the_session(self, runtime: Sandbox) -> None:
        await runtime.exec("mkdir deep", cwd="/polar/session", timeout_s=LONG_S)
        await runtime.exec("echo here > file", cwd="/polar/session/deep", timeout_s=LONG_S)
        result = await runtime.exec("cat deep/file", cwd=runtime.layout.session_dir, timeout_s=LONG_S)
        assert result.stdout == b"here\n"


class LifetimeContract:
    """What outlives what."""

    async def test_a_command_returns_when_it_ends_even_if_its_children_hold_the_pipe(self, runtime: Sandbox) -> None:
        result = await runtime.exec("echo started; sleep 1000 & echo $! > pid", timeout_s=LONG_S)
        assert (result.kind, result.stdout) == (ExecKind.EXITED, b"started\n")
        assert await lives(runtime, await appears(runtime, "pid"))

    @pytest.mark.parametrize("how", ["nohup bash service &", "setsid bash service &", "(bash service &)"])
    async def test_a_service_left_behind_goes_on_and_may_print(self, runtime: Sandbox, how: str) -> None:
        waits = "echo $$ > pid; until [ -e go ]; do sleep 0.01; done"
        service = f"{waits}; seq 1000 || exit 1; echo served > answer; sleep 1000"
        await runtime.put_bytes(service.encode(), "service")
        assert (await runtime.exec(how, timeout_s=LONG_S)).ok
        pid = await appears(runtime, "pid")
        await runtime.exec("touch go", timeout_s=LONG_S)
        assert await appears(runtime, "answer") == "served"
        assert await lives(runtime, pid)

    async def test_no_zombie_of_thousands_of_short_processes_is_left(self, runtime: Sandbox) -> None:
        for _ in range(3):
            script = "for i in $(seq 100); do sh -c '(sleep 0.05 &)'; done"
            assert (await runtime.exec(script, timeout_s=LONG_S)).ok
        look = "grep -lE '^State:.Z' /proc/[0-9]*/status | xargs -r grep -l '^Name:.sleep'"
        assert (await runtime.exec(f"while {look}; do sleep 0.05; done 2> /dev/null", timeout_s=LONG_S)).ok

    async def test_it_is_alive_until_it_is_stopped(self, runtime: Sandbox) -> None:
        assert await runtime.alive()
        assert runtime.isolation
        await runtime.stop()
        assert not await runtime.alive()

    async def test_stopping_may_be_repeated_and_ends_all_work(self, runtime: Sandbox) -> None:
        running = asyncio.ensure_future(runtime.exec("echo x > up; sleep 1000", timeout_s=LONG_S))
        await appears(runtime, "up")
        await runtime.stop()
        await runtime.stop()
        assert (await running).kind is ExecKind.SANDBOX_LOST
        assert (await runtime.exec("true", timeout_s=LONG_S)).kind is ExecKind.SANDBOX_LOST
        with pytest.raises(RuntimeFault):
            await runtime.put_bytes(b"x", "file")


class RuntimeContract(
    CommandContract,
    OutputContract,
    EnvironmentContract,
    LifetimeContract,
    TransferContract,
    HostileFilesContract,
    SnapshotContract,
    OfflineContract,
    BrokenOffContract,
    AloneContract,
):
    """All of it."""

    @pytest.fixture
    async def runtime(self, new: New) -> Sandbox:
        runtime = new("contract")
        await runtime.start()
        return runtime
