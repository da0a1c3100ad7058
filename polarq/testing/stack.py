"""A whole polarq on one machine, each part a real process: Redis, a scripted inference server, workers, their proxies.

For the demo, for tests, for trying a change. Workers are started exactly as an operator starts them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

import yaml

from polarq.client import Client
from polarq.errors import PolarqError
from polarq.settings import Settings
from polarq.testing.inference.tokenizer import load_tokenizer
from polarq.testing.ports import free_port
from polarq.testing.program import Program
from polarq.testing.redis import EmbeddedRedis
from polarq.topology import Topology, load_topology

START_TIMEOUT_S = 180.0
"""Much: on a machine that does other things as well, a worker has taken a minute. One that ends is noticed at once."""


class PartDidNotStart(PolarqError):
    """A part of the stack ended or stayed silent. `log` is where it wrote, `last_lines` how that ends."""

    def __init__(self, what: str, program: Program) -> None:
        self.log = program.log
        self.last_lines = program.last_lines()
        super().__init__(what)
        self.add_note(self.last_lines)  # tests and tracebacks show it; a command prints it in its own way

    def __str__(self) -> str:
        return f"{self.args[0]} (its log: {self.log})"


class LocalStack:
    """Starts parts in the folder `home` and stops them in reverse order.

    `nodes` overrides the topology's node entries (by default one, `node0`); `sections` adds topology sections. With
    `redis_url` a Redis that is there already is used, and none is started. With `bound` the programs end with whoever
    started them, however that ends. `before` is what a node's worker is started with in front of its command (`env
    TZ=...`, `ip netns exec ...`), which has to become the worker itself. `isolation` is that of the nodes' local
    sandboxes, where `nodes` does not say it: none, so that what is looked at can lie on the machine. `max_model_len` is
    the context of the scripted model. Each part is started in a block of `held`, where a signal can be made to wait:
    one that tears a start apart leaves a part that cannot be stopped.
    """

    def __init__(
        self,
        home: Path,
        *,
        scenario: str = "calculator",
        nodes: Mapping[str, Mapping[str, Any]] | None = None,
        sections: Mapping[str, Any] | None = None,
        redis: EmbeddedRedis | None = None,
        redis_url: str | None = None,
        env: Mapping[str, str] | None = None,
        prefix: str = "polarq",
        bound: bool = False,
        before: Mapping[str, Sequence[str]] | None = None,
        isolation: str = "none",
        max_model_len: int | None = None,
        held: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.home = home.resolve()
        self.scenario = scenario
        self.redis = redis or EmbeddedRedis()
        self._own_redis = redis is None and redis_url is None
        self._redis_url = redis_url
        self._nodes = dict(nodes or {"node0": {}})
        self._sections = dict(sections or {})
        self._extra_env = dict(env or {})
        self._prefix = prefix
        self._bound = bound
        self._before = dict(before or {})
        self._isolation = isolation
        self._max_model_len = max_model_len
        self._held = held
        self.inference: Program | None = None
        self.inference_url = ""
        self.workers: dict[str, Program] = {}
        self._client: Client | None = None

    # --- parts

    def start(self) -> Self:
        """Everything: Redis, inference, one worker per node. Returns when each is ready."""
        try:
            if self._own_redis:
                with self._held():
                    self.redis.start()
            with self._held():
                self.start_inference(wait=False)
            self.wait_for_inference()
            self.write_topology()
            for node_id in self._nodes:
                with self._held():
                    self.start_worker(node_id, wait=False)
            for node_id in self._nodes:
                self.wait_for_node(node_id)
        except BaseException:
            self.stop()
            raise
        return self

    def start_inference(self, port: int = 0, *, wait: bool = True) -> None:
        """Without `wait` a port has to be chosen, and `wait_for_inference` returns when it answers."""
        port_file = self.home / "inference.port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "polarq.testing.inference", "--scenario", self.scenario]
        command += ["--served-model-name", "scripted", "--port", str(port), "--port-file", str(port_file)]
        if self._max_model_len is not None:
            command += ["--max-model-len", str(self._max_model_len)]
        self.inference = self._program("inference", command, "inference.log").start()
        self.inference_url = f"http://127.0.0.1:{port}"
        if wait:
            self.wait_for_inference()

    def wait_for_inference(self) -> None:
        """Returns when the inference server listens. Raises `PartDidNotStart`."""
        assert self.inference is not None
        port_file = self.home / "inference.port"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (port_file.exists() and port_file.read_text().strip()):
            self._still_runs(self.inference, deadline)
            time.sleep(0.02)
        self.inference_url = f"http://127.0.0.1:{port_file.read_text().strip()}"

    @property
    def topology_path(self) -> Path:
        return self.home / "topology.yaml"

    def write_topology(self) -> None:
        nodes = [
            {
                "id": node_id,
                "host": "127.0.0.1",
                "port": free_port(),
                "model_served": "scripted",
                "default_runtime": {"backend": "local"},
                **more,
                "inference": self._inference(more.get("inference", {})),
                "runtimes": {"local": {"isolation": self._isolation}, **more.get("runtimes", {})},
            }
            for node_id, more in self._nodes.items()
        ]
        data: dict[str, Any] = {"redis": {"prefix": self._prefix}, **self._sections}
        data["gateway"] = {"heartbeat_interval_seconds": 1.0, **self._sections.get("gateway", {}), "nodes": nodes}
        self.topology_path.parent.mkdir(parents=True, exist_ok=True)
        self.topology_path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")

    def _inference(self, own: Any) -> Any:
        """The scripted server with a node's `own` settings of it; other servers as they are."""
        if isinstance(own, list) or "base_url" in own:
            return own
        image_token_id = load_tokenizer().image_token_id
        return {"engine": "vllm", "base_url": self.inference_url, "image_token_id": image_token_id, **own}

    @property
    def env(self) -> dict[str, str]:
        """The environment of every part, and of whoever wants to talk to the stack."""
        bin_dir = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "PATH": os.pathsep.join([bin_dir, os.environ.get("PATH", os.defpath)]),
            "POLARQ_TOPOLOGY": str(self.topology_path),
            "POLARQ_REDIS_URL": self._redis_url or self.redis.url,
            "POLARQ_STATE_DIR": str(self.home / "state"),
            **self._extra_env,
        }

    def start_worker(self, node_id: str = "node0", *, wait: bool = True) -> Program:
        """`celery -A polarq worker -Q <node_id>`, and nothing else but what the node's `before` says."""
        command = ["celery", "-A", "polarq", "worker", "-Q", node_id]
        celery = Path(sys.executable).parent / "celery"
        command[0] = str(celery) if celery.exists() else "celery"
        command = [*self._before.get(node_id, ()), *command]
        self.workers[node_id] = self._program(f"worker {node_id}", command, f"worker-{node_id}.log").start()
        if wait:
            self.wait_for_node(node_id)
        return self.workers[node_id]

    def _program(self, name: str, command: list[str], log: str) -> Program:
        return Program(name, command, self.home / "logs" / log, self.env, cwd=self.home, bound=self._bound)

    def wait_for_node(self, node_id: str = "node0") -> None:
        """Returns when the node has announced itself under its present process. Raises `PartDidNotStart`."""
        worker = self.workers[node_id]
        ledger = self.client.ledger
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            after = ledger.do(ledger.calls.last_event_id())
            if any(n.node_id == node_id and n.alive and n.pid == worker.pid for n in ledger.nodes()):
                return
            self._still_runs(worker, deadline)
            ledger.wait_events(after, 0.25)

    def check_worker(self, node_id: str = "node0") -> None:
        """Raises `PartDidNotStart` when the worker has ended."""
        worker = self.workers[node_id]
        if worker.exit_code is not None:
            raise PartDidNotStart(f"the {worker.name} ended with code {worker.exit_code}", worker)

    def _still_runs(self, program: Program, deadline: float) -> None:
        if program.exit_code is not None:
            raise PartDidNotStart(
                f"the {program.name} ended with code {program.exit_code} before it was ready", program
            )
        if time.monotonic() > deadline:
            raise PartDidNotStart(f"the {program.name} was not ready within {START_TIMEOUT_S:g} s", program)

    # --- using it

    @property
    def settings(self) -> Settings:
        return Settings.from_env(self.env)

    @property
    def topology(self) -> Topology:
        return load_topology(self.topology_path)

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self.topology, self.settings)
        return self._client

    # --- end

    def stop(self) -> None:
        """Stops what was started, in reverse order. Never raises for a part that is already gone."""
        with ExitStack() as parts:  # each is stopped, even if stopping another is interrupted
            if self._own_redis:
                parts.callback(self.redis.stop)
            if self.inference is not None:
                parts.callback(self.inference.stop)
            if self._client is not None:
                parts.callback(self._client.close)
                self._client = None
            for worker in self.workers.values():
                parts.callback(worker.stop)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
