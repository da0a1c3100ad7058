"""A primary, its replicas and the Sentinels that watch them: real servers on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from polarq.errors import LedgerUnavailable, NotQueued, TaskNotFound
from polarq.testing.ports import free_port
from polarq.testing.redis import EmbeddedRedis, find_server
from tests.durable.gates import PATIENCE_S
from tests.durable.tls import Certificate, either_front
from tests.worker.conftest import wait_until

T = TypeVar("T")

MASTER = "polarq-test"


class Group:
    """One primary, one replica, and `sentinels` Sentinels that promote the replica once the primary is silent for a
    second. With a certificate clients reach all of them by TLS."""

    def __init__(
        self,
        *,
        sentinels: int = 3,
        password: str | None = None,
        config: tuple[str, ...] = (),
        certificate: Certificate | None = None,
    ) -> None:
        login = (f'masterauth "{password}"',) if password else ()
        # A replica that has just come has its copy at once, without a wait for others.
        config = (*config, *login, "repl-diskless-sync-delay 0")
        self.primary = EmbeddedRedis(appendonly=True, password=password, config=config)
        self._replica_config = config
        self.replica = EmbeddedRedis(appendonly=True, password=password)
        self.password = password
        self._wanted = sentinels
        self.ports: list[int] = []
        self._certificate = certificate
        self._reached: dict[int, int] = {}
        """By a server's own port the one where others reach it."""
        self._fronts = ExitStack()
        self._sentinels: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="polarq-sentinels-"))

    def __enter__(self) -> Self:
        try:
            self.primary.start()
            self._open_front(self.primary.port)
            port = free_port()
            follow = f"replicaof 127.0.0.1 {self.primary.port}"
            announce = f"replica-announce-port {self._open_front(port)}"
            self.replica = EmbeddedRedis(
                port=port, appendonly=True, password=self.password, config=(*self._replica_config, follow, announce)
            ).start()
            wait_until(lambda: self.info(self.replica, "replication")["master_link_status"] == "up", PATIENCE_S)
            for number in range(self._wanted):
                self._start_sentinel(number)
            wait_until(self._all_know_each_other, PATIENCE_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.primary, self.replica):
            if server.pid is not None:
                os.kill(server.pid, signal.SIGCONT)
        for sentinel in self._sentinels:
            sentinel.kill()
            sentinel.wait()
        self.primary.stop()
        self.replica.stop()
        self._fronts.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        hosts = ",".join(f"127.0.0.1:{self._reached[port]}" for port in self.ports)
        if self._certificate is None:
            return f"sentinel://{login}{hosts}/0?master={MASTER}"
        return f"sentinels://{login}{hosts}/0?master={MASTER}&ssl_ca_certs={self._certificate.cert}"

    def _open_front(self, port: int) -> int:
        front = port
        if self._certificate is not None:
            front = self._fronts.enter_context(either_front(self._certificate, port))
        self._reached[port] = front
        return front

    # --- what happens to it

    def stop_sentinel(self, number: int) -> None:
        self._sentinels[number].kill()
        self._sentinels[number].wait()

    def kill_primary(self) -> None:
        """SIGKILL; returns when the Sentinels have made the replica the primary."""
        self.primary.kill()
        self.wait_promoted()

    def wait_replicated(self) -> None:
        """The replica has all that the primary had when this was called."""
        offset = int(self.info(self.primary, "replication")["master_repl_offset"])
        wait_until(lambda: int(self.info(self.replica, "replication")["slave_repl_offset"]) >= offset, PATIENCE_S)

    def wait_promoted(self) -> None:
        wait_until(lambda: self._role(self.replica) == "master", PATIENCE_S)
        living = [port for port, process in zip(self.ports, self._sentinels, strict=True) if process.poll() is None]
        wait_until(lambda: all(self._named_by(port) == self._reached[self.replica.port] for port in living), PATIENCE_S)

    def hang_primary(self) -> None:
        """It keeps its connections and answers nobody; returns when the replica has taken over."""
        assert self.primary.pid is not None
        os.kill(self.primary.pid, signal.SIGSTOP)
        self.wait_promoted()

    def wake_primary(self) -> None:
        """Returns when the Sentinels have made it a replica of its successor."""
        assert self.primary.pid is not None
        os.kill(self.primary.pid, signal.SIGCONT)
        wait_until(lambda: self._role(self.primary) == "slave", PATIENCE_S)

    def cut_replica_off(self) -> None:
        """The replica gets nothing from now on. Returns when the primary knows of none."""
        assert self.replica.pid is not None
        os.kill(self.replica.pid, signal.SIGSTOP)
        with self.connected(self.primary) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")
        wait_until(lambda: int(self.info(self.primary, "replication")["connected_slaves"]) == 0, PATIENCE_S)

    def bring_replica_back(self) -> None:
        assert self.replica.pid is not None
        os.kill(self.replica.pid, signal.SIGCONT)
        self.wait_replicated()

    def kill_primary_with_what_only_it_has(self) -> None:
        """After `cut_replica_off`: the replica takes over without what was written meanwhile."""
        assert self.replica.pid is not None
        self.primary.kill()
        os.kill(self.replica.pid, signal.SIGCONT)
        self.wait_promoted()

    # --- looking at it

    def connected(self, server: EmbeddedRedis) -> redis.Redis:
        return redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=5, retry=Retry(NoBackoff(), 0))

    def info(self, server: EmbeddedRedis, section: str) -> dict[str, str]:
        with self.connected(server) as client:
            return dict(client.info(section))

    def _role(self, server: EmbeddedRedis) -> str | None:
        """None: it let go of who asked, as one does whose role changes, either way."""
        try:
            return self.info(server, "replication")["role"]
        except redis.ConnectionError:
            return None

    def _named_by(self, port: int) -> int:
        with redis.Redis(port=port, socket_timeout=5) as client:
            found = client.sentinel_get_master_addr_by_name(MASTER)
            return int(found[1]) if found else 0

    def _all_know_each_other(self) -> bool:
        """Each Sentinel sees the primary, its replica and the other Sentinels."""
        for port in self.ports:
            with redis.Redis(port=port, socket_timeout=5) as client:
                state = client.sentinel_master(MASTER)
                if state["num-slaves"] != 1 or state["num-other-sentinels"] != self._wanted - 1:
                    return False
        return True

    def _start_sentinel(self, number: int) -> None:
        port = free_port()
        login = [f"sentinel auth-pass {MASTER} {self.password}"] if self.password else []
        lines = [
            "bind 127.0.0.1",
            f"port {port}",
            f"dir {self._folder}",
            f"sentinel monitor {MASTER} 127.0.0.1 {self._reached[self.primary.port]} {self._wanted // 2 + 1}",
            f"sentinel down-after-milliseconds {MASTER} 1000",
            f"sentinel failover-timeout {MASTER} 2000",
            *login,
        ]
        path = self._folder / f"sentinel-{number}.conf"
        path.write_text("\n".join(lines) + "\n")
        with (self._folder / f"sentinel-{number}.log").open("wb") as log:
            command = [str(find_server()[0].path), str(path), "--sentinel"]
            self._sentinels.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        self.ports.append(port)
        self._open_front(port)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with redis.Redis(port=port, socket_timeout=5, retry=Retry(NoBackoff(), 0)) as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, path.with_suffix(".log").read_text()
                time.sleep(0.02)


def wait_for_answer(ask_ledger: Callable[[], T]) -> T | None:
    """What comes once the ledger answers; None: that there is no such task."""
    while True:
        try:
            return ask_ledger()
        except TaskNotFound:
            return None
        except (LedgerUnavailable, NotQueued):
            threading.Event().wait(0.1)
