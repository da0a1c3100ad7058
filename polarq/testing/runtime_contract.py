"""What every sandbox backend must do, as tests. A backend's own test file runs them:

    class TestMyRuntime(RuntimeContract):
        @pytest.fixture
        async def runtime(self, tmp_path: Path) -> AsyncIterator[Runtime]:
            runtime = MyRuntime(RuntimeSpec(..., env=CONTRACT_ENV), runtime_id="contract", root=tmp_path / "root")
            await runtime.start()
            yield runtime
            await runtime.stop()

The sandbox needs bash, coreutils and setsid (util-linux).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.errors import RuntimeFault

CONTRACT_ENV = {"CONTRACT_SPEC": "from the spec", "CONTRACT_BOTH": "from the spec"}
"""`env` of the spec that the runtime under test is made with."""
LONG_S = 120.0


class Layout(Protocol):
    @property
    def session_dir(self) -> str: ...
    @property
    def artifacts_dir(self) -> str: ...
    @property
    def agent_log_dir(self) -> str: ...
    @property
    def eval_log_dir(self) -> str: ...


class Result(Protocol):
    @property
    def kind(self) -> ExecKind: ...
    @property
    def ok(self) -> bool: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def signal(self) -> int | None: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...
    @property
    def stdout_text(self) -> str: ...
    @property
    def stderr_text(self) -> str: ...
    @property
    def stdout_bytes(self) -> int: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def message(self) -> str: ...


class Sandbox(Protocol):
    """`polarq_worker.runtimes.base.Runtime`, as far as its tests need it."""

    @property
    def layout(self) -> Layout: ...
    @property
    def host_log_dir(self) -> Path: ...
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float,
        log: str | None = None,
        max_output_bytes: int = 1 << 20,
    ) -> Result: ...
    async def put_file(self, source: Path, target: str) -> None: ...
    async def put_dir(self, source: Path, target: str) -> None: ...
    async def put_bytes(self, data: bytes, target: str, mode: int = 0o644) -> None: ...
    async def get_file(self, source: str, target: Path, max_bytes: int) -> None: ...
    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> None: ...
    async def stop(self) -> None: ...


async def lives(runtime: Sandbox, pid: str) -> bool:
    """Whether a process of the sandbox is there and not a zombie."""
    result = await runtime.exec(f"grep -q '^State:.[^Z]' /proc/{int(pid)}/status", timeout_s=LONG_S)
    return result.ok


async def appears(runtime: Sandbox, path: str) -> str:
    """Waits for a file that is not empty; its text."""
    result = await runtime.exec(f"until [ -s {path} ]; do sleep 0.01; done; cat {path}", timeout_s=LONG_S)
    assert result.ok, result
    return result.stdout_text.strip()


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


class EnvironmentContract:
    """What commands find around them."""

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

    async def test_stopping_may_be_repeated_and_ends_all_work(self, runtime: Sandbox) -> None:
        running = asyncio.ensure_future(runtime.exec("echo x > up; sleep 1000", timeout_s=LONG_S))
        await appears(runtime, "up")
        await runtime.stop()
        await runtime.stop()
        assert (await running).kind is ExecKind.SANDBOX_LOST
        assert (await runtime.exec("true", timeout_s=LONG_S)).kind is ExecKind.SANDBOX_LOST
        with pytest.raises(RuntimeFault):
            await runtime.put_bytes(b"x", "file")


class TransferContract:
    """Files in and out."""

    async def test_a_file_comes_in_and_out_with_its_mode(self, runtime: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "tool.sh"
        source.write_bytes(b"#!/bin/bash\necho ran\n")
        source.chmod(0o755)
        await runtime.put_file(source, "/polar/session/bin/tool")
        assert (await runtime.exec(["./tool"], cwd="/polar/session/bin", timeout_s=LONG_S)).stdout == b"ran\n"
        await runtime.get_file("/polar/session/bin/tool", tmp_path / "back", max_bytes=1000)
        assert (tmp_path / "back").read_bytes() == source.read_bytes()

    async def test_a_folder_replaces_what_was_there(self, runtime: Sandbox, tmp_path: Path) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        for folder, name in ((first, "old"), (second, "new")):
            (folder / "sub").mkdir(parents=True)
            (folder / "sub" / name).write_text(name)
            (folder / "link").symlink_to("sub")
        await runtime.put_dir(first, "data")
        await runtime.put_dir(second, "data")
        result = await runtime.exec("cd data && find . | sort && cat sub/new && readlink link", timeout_s=LONG_S)
        assert result.stdout_text.split() == [".", "./link", "./sub", "./sub/new", "newsub"]

    async def test_a_folder_comes_out_without_its_links(self, runtime: Sandbox, tmp_path: Path) -> None:
        script = "mkdir -p out/sub; echo a > out/sub/a; ln -s /etc/passwd out/passwd; ln -s / out/root; mkfifo out/pipe"
        await runtime.exec(script, timeout_s=LONG_S)
        await runtime.get_dir("out", tmp_path / "got", max_bytes=1000, max_files=10)
        assert sorted(str(p.relative_to(tmp_path / "got")) for p in (tmp_path / "got").rglob("*")) == ["sub", "sub/a"]

    async def test_what_is_fetched_is_limited(self, runtime: Sandbox, tmp_path: Path) -> None:
        await runtime.exec("mkdir out; head -c 5000 /dev/zero > out/big; touch out/{1..30}", timeout_s=LONG_S)
        with pytest.raises(RuntimeFault, match="1000 bytes"):
            await runtime.get_file("out/big", tmp_path / "big", max_bytes=1000)
        with pytest.raises(RuntimeFault, match="20 files"):
            await runtime.get_dir("out", tmp_path / "got", max_bytes=10_000, max_files=20)

    @pytest.mark.parametrize("path", ["../file", "/polar/session/../../file", "a/../../../file"])
    async def test_a_path_that_climbs_is_refused(self, runtime: Sandbox, tmp_path: Path, path: str) -> None:
        with pytest.raises(RuntimeFault, match=r"\.\."):
            await runtime.put_bytes(b"x", path)
        with pytest.raises(RuntimeFault, match=r"\.\."):
            await runtime.get_file(path, tmp_path / "got", max_bytes=1000)

    async def test_links_lead_nothing_out_of_the_sandbox(self, runtime: Sandbox, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_text("secret")
        await runtime.exec(f"ln -s {outside} folder; ln -s {outside}/secret file", timeout_s=LONG_S)
        for path in ("folder/secret", "file"):
            with pytest.raises(RuntimeFault):
                await runtime.get_file(path, tmp_path / "got", max_bytes=1000)
        with pytest.raises(RuntimeFault):
            await runtime.put_bytes(b"planted", "folder/planted")
        await runtime.put_bytes(b"mine", "file")
        assert sorted(path.name for path in outside.iterdir()) == ["secret"]
        assert (outside / "secret").read_text() == "secret"
        assert (await runtime.exec("cat file", timeout_s=LONG_S)).stdout == b"mine"

    async def test_a_pipe_is_not_fetched(self, runtime: Sandbox, tmp_path: Path) -> None:
        await runtime.exec("mkfifo pipe", timeout_s=LONG_S)
        with pytest.raises(RuntimeFault, match="regular file"):
            await runtime.get_file("pipe", tmp_path / "got", max_bytes=1000)

    async def test_a_missing_file_is_named(self, runtime: Sandbox, tmp_path: Path) -> None:
        with pytest.raises(RuntimeFault, match="nothing/here"):
            await runtime.get_file("nothing/here", tmp_path / "got", max_bytes=1000)


class RuntimeContract(CommandContract, OutputContract, EnvironmentContract, LifetimeContract, TransferContract):
    """All of it."""
