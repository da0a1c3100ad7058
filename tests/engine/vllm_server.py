"""A real vLLM server on loopback: started, waited for, warmed up and stopped, by its own pid and process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from polarq.testing.ports import free_port

from .server import Server

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 32_768
START_DEADLINE_S = 420.0
"""A fresh environment has no byte-code and took up to two minutes on two cores; the rest is room for slower ones."""
WARM_UP_DEADLINE_S = 180.0
"""The first request compiles the sampler's kernels, 20 to 40 s, unless the kept cache has them."""
STOP_GRACE_S = 20.0
LOG_TAIL_CHARS = 4000

FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--max-model-len", str(MAX_MODEL_LEN)),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    *("--enable-prompt-tokens-details", "--enable-request-id-headers", "--enable-server-load-tracking"),
    "--enable-scale-out",
    # What the scripted server's template does by default; without it earlier thinking is dropped from prompts.
    *("--default-chat-template-kwargs", '{"keep_thinking": true}'),
)


class EngineDidNotStart(Exception):
    """The server ended or stayed silent; the message carries the end of its log."""


@dataclass(frozen=True)
class Started:
    """A server of our own, and how long it took."""

    server: Server
    start_s: float
    warm_up_s: float


@contextlib.contextmanager
def run_vllm(model_dir: Path, cache: Path, log: Path) -> Iterator[Started]:
    """Serve `model_dir` until the block ends. `cache` is kept between runs: the compiled kernels lie there."""
    base_url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(model_dir, base_url),
            env=_environment(cache),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the server makes two more processes; they share its group and are stopped with it
        )
    with _guard(process.pid):
        try:
            _wait_until_healthy(base_url, process, log)
            healthy = time.monotonic()
            _warm_up(base_url)
            warm = time.monotonic()
            server = Server("vllm", base_url, MODEL_NAME, MAX_MODEL_LEN, model_dir, started_here=True)
            yield Started(server, healthy - started, warm - healthy)
        finally:
            _stop(process)


def _command(model_dir: Path, base_url: str) -> list[str]:
    # The `vllm` command of the CPU build does not start (it wants metadata of a package named vllm); the module does.
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    port = base_url.rsplit(":", 1)[1]
    return [
        *module,
        "--model",
        str(model_dir),
        "--served-model-name",
        MODEL_NAME,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        *FLAGS,
    ]


def _environment(cache: Path) -> dict[str, str]:
    own = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(cache / "hf"),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "2",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | own


@contextlib.contextmanager
def _guard(group: int) -> Iterator[None]:
    """Kill the process group if this process dies inside the block and cannot stop it any more.

    The guard waits for the end of a pipe that only this process holds. A death signal on the server would not do: in
    start-up it ignores a soft one, and a hard one leaves its children behind.
    """
    guard = subprocess.Popen(
        ["sh", "-c", f"read -r line; kill -s KILL -- -{group}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with guard:
        try:
            yield
        finally:
            guard.kill()


def _wait_until_healthy(base_url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineDidNotStart(f"vLLM ended with code {process.returncode} before it was healthy:\n{_tail(log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{base_url}/health", timeout=5.0).is_success:
                return
        time.sleep(0.5)
    raise EngineDidNotStart(f"vLLM was not healthy after {START_DEADLINE_S:.0f} s:\n{_tail(log)}")


def _warm_up(base_url: str) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "warm up"}],
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
    }
    httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=WARM_UP_DEADLINE_S).raise_for_status()


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then end whatever is left of its process group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
