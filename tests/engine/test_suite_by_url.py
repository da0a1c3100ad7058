"""The suite runs against a server that it did not start. Shown with the scripted one in SGLang's clothes, so that it is
ready for the day on which there is a machine for a real one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
START_S = 60.0

pytestmark = pytest.mark.engine


@pytest.fixture
def scripted_sglang(tmp_path: Path) -> Iterator[str]:
    """Its URL. In a process of its own, as the real one would be."""
    port_file = tmp_path / "port"
    settings = ("--engine", "sglang", "--scenario", str(HERE / "scripted.yaml"), "--served-model-name", "tiny")
    pace = ("--tokens-per-s", "600", "--max-model-len", "16384", "--port-file", str(port_file))
    process = subprocess.Popen([sys.executable, "-m", "polarq.testing.inference", *settings, *pace])
    try:
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.timeout(600)
def test_the_suite_passes_on_a_server_in_sglangs_clothes(scripted_sglang: str) -> None:
    if os.environ.get("POLARQ_ENGINE_URL"):
        pytest.skip("this run is one by URL already")
    env = {**os.environ, "POLARQ_ENGINE": "sglang", "POLARQ_ENGINE_URL": scripted_sglang, "POLARQ_ENGINE_MODEL": "tiny"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "engine"]
    files = [str(HERE / name) for name in ("test_proxy_records.py", "test_sglang_fields.py", "test_vllm_fields.py")]
    ran = subprocess.run([*command, *files], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
    counted = re.search(r"(\d+) passed, (\d+) skipped", ran.stdout)
    assert counted is not None, ran.stdout[-1000:]
    assert int(counted[1]) > 40


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"POLARQ_ENGINE": "tgi"}, "POLARQ_ENGINE is 'tgi': say vllm or sglang"),
        ({"POLARQ_ENGINE": "sglang"}, "say where one runs with POLARQ_ENGINE_URL"),
        ({"POLARQ_ENGINE": "sglang", "POLARQ_ENGINE_URL": "http://127.0.0.1:9"}, "http://127.0.0.1:9: "),
    ],
)
def test_what_is_missing_is_said_in_one_line(env: dict[str, str], words: str) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("POLARQ_ENGINE")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-x", "-m", "engine"]
    file = str(HERE / "test_sglang_fields.py")
    ran = subprocess.run([*command, file], env={**plain, **env}, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert words in ran.stdout
    assert "Traceback" not in ran.stdout
