"""The server as a program."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

PROGRAM = [sys.executable, "-m", "polarq.testing.inference"]


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program and its first line; killed if the test leaves it running."""
    process = subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def finished(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_the_program_prints_its_url_answers_and_stops_on_a_signal(tmp_path: Path, how: signal.Signals) -> None:
    port_file = tmp_path / "port"

    with running("--served-model-name", "demo", "--port-file", str(port_file)) as (process, line):
        found = re.fullmatch(r"scripted inference on (\S+)/v1, model demo, scenario calculator\n", line)
        assert found and found[1] == f"http://127.0.0.1:{port_file.read_text().strip()}"
        models = httpx.get(f"{found[1]}/v1/models", trust_env=False).json()
        process.send_signal(how)
        out, err = process.communicate(timeout=20)

    assert models["data"][0]["id"] == "demo"
    assert (process.returncode, out, err) == (0, "", "")


def test_the_program_reads_a_scenario_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{name: mine, scripts: [{name: a, turns: [{content: hello}]}]}")

    with running("--scenario", str(path)) as (_, line):
        assert line.endswith("scenario mine\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "nowhere"], "no built-in scenario of that name"),
        (["--max-model-len", "3"], "max_model_len"),
        (["--served-model-name", "a:b"], "served_model_name"),
    ],
)
def test_a_bad_option_is_one_line_and_a_failure(arguments: list[str], said: str) -> None:
    done = finished(*PROGRAM, *arguments)

    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_a_taken_port_is_one_line_and_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = finished(*PROGRAM, "--port", str(port))

    assert done.returncode == 2
    assert done.stderr == f"127.0.0.1:{port} is taken; choose another port, or 0 for any\n"


def test_importing_the_package_loads_neither_aiohttp_nor_tokenizers() -> None:
    code = "import sys, polarq.testing.inference; print(sorted({'aiohttp', 'tokenizers', 'jinja2'} & set(sys.modules)))"

    done = finished(sys.executable, "-c", code)

    assert done.stdout == "[]\n"


def test_the_program_takes_either_engines_clothes() -> None:
    with running("--engine", "sglang", "--engine-version", "0.5.19") as (_, line):
        url = line.split()[3].removesuffix("/v1,")
        assert httpx.get(f"{url}/server_info", trust_env=False).json()["version"] == "0.5.19"
    with running("--scale-out") as (_, line):
        url = line.split()[3].removesuffix("/v1,")
        told = httpx.post(f"{url}/inference/v1/generate", json={"token_ids": [5]}, trust_env=False)
        assert told.status_code == 200
