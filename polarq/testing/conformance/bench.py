"""Where the checks run: a whole polarq on this machine for one program, its sandboxes kept apart and offline."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

import httpx
import yaml

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.task import Task
from polarq.errors import PolarqError
from polarq.ledger.connection import AsyncLedger
from polarq.registry import plugin
from polarq.store.completions import read_completions
from polarq.testing.conformance import brought
from polarq.testing.conformance.mcp_server import Web
from polarq.testing.conformance.scenario import ENOUGH_TOKENS, ProgramScenario
from polarq.testing.stack import LocalStack

INSTRUCTION = "Write the word hello, without a line break, into the file hello.txt in this folder. [script: {script}]"
REPO = "/polar/session/repo"
TEST_ID = "hello.t::the_file_holds_the_word"
PREPARE_S = 900.0
WAIT_S = 1800.0
DRAIN_GRACE_S = 5.0
"""Nobody waits for a rollout once the bench is taken down."""


def default_cache() -> Path:
    """Below the user's own caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polarq" / "conformance"


@contextmanager
def alone_in(state: Path, waits: Callable[[Path], None] = lambda _: None) -> Iterator[None]:
    """Waits until nobody else has this folder of a worker's state: two workers of one node that do not know of each
    other take each other's sandboxes for leftovers. `waits` is told that somebody has it."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits(state)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Ran:
    """One rollout: its result, what was recorded of it, and what the model really sampled for it."""

    result: RolloutResult
    recorded: list[Completion]
    sampled: list[dict[str, Any]]

    @property
    def whole(self) -> list[Completion]:
        """Steps of the task that were answered."""
        return [call for call in self.recorded if call.label is CompletionLabel.TRAIN and not call.incomplete]

    @property
    def side(self) -> list[Completion]:
        return [call for call in self.recorded if call.label is CompletionLabel.SIDE]


class Bench:
    """One program in one dialect and one backend. `runtime` is the sandbox's spec; `cache` a folder in which what was
    installed is kept from one run to the next; `held` as `LocalStack` takes it; `waits` is told that another bench has
    that folder, before this one waits for it."""

    def __init__(
        self,
        scenario: ProgramScenario,
        dialect: str,
        runtime: Mapping[str, Any],
        *,
        cache: Path,
        node: Mapping[str, Any] | None = None,
        held: Callable[[], AbstractContextManager[None]] = nullcontext,
        waits: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self.scenario = scenario.of_dialect(dialect)
        self.dialect = dialect
        self.preset: Any = plugin("harnesses", scenario.harness)
        """The preset's class."""
        self._runtime = dict(runtime)
        self._node = dict(node or {})
        self._state = cache / f"{self._runtime.get('backend', 'local')}-{scenario.harness}"
        self._held = held
        self._waits = waits
        self._open: set[str] = set()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            with self._held():
                home = Path(mkdtemp(prefix="polarq-conformance-"))
                undo.callback(shutil.rmtree, home, ignore_errors=True)
            undo.enter_context(alone_in(self._state, self._waits))
            self.stack = undo.enter_context(self._stack(home))
            self._web = undo.enter_context(Web())
            undo.callback(self._cancel_open)
            # One for all questions: each new one would read the certificates of the machine again.
            self._inference = undo.enter_context(
                httpx.Client(base_url=self.stack.inference_url, timeout=60, trust_env=False)
            )
            self._undo = undo.pop_all()
        return self

    def _stack(self, home: Path) -> LocalStack:
        file = home / "scenario.yaml"
        data = self.scenario.scenario().model_dump(mode="json", exclude_none=True)
        file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        return LocalStack(
            home,
            scenario=str(file),
            nodes={"node0": {"proxy": {"context": "exact"}, "max_run_workers": 2, **self._node}},
            sections={"gateway": {"drain_grace_s": DRAIN_GRACE_S}},
            env={"POLARQ_STATE_DIR": str(self._state)},
            isolation="bubblewrap",
            max_model_len=ENOUGH_TOKENS,
            bound=True,
            held=self._held,
        )

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def task(
        self,
        name: str,
        script: str,
        agent_s: float | None = None,
        *,
        agent: Mapping[str, Any] | None = None,
        online: bool = False,
        **more: Any,
    ) -> Task:
        """A task that the model answers by a script. `agent` is more of its agent; `online` lets its sandbox reach what
        listens on this machine."""
        own, asked = self.scenario.agent, agent or {}
        settings = {**own.get("settings", {}), **asked.get("settings", {}), "dialect": self.dialect}
        prepare = {"type": "exec", "command": f"mkdir -p {REPO} && cd {REPO} && git init -q"}
        runtime = {**self._runtime, **self.scenario.runtime}
        test = f'[ "$(cat hello.txt)" = hello ] && echo "PASSED {TEST_ID}" || echo "FAILED {TEST_ID}"'
        return Task.parse(
            {
                "task_id": name,
                "instruction": INSTRUCTION.format(script=script),
                "agent": {**own, **asked, "harness": self.scenario.harness, "settings": settings},
                "runtime": {
                    "network_policy": "proxy-only",
                    "workdir": REPO,
                    **runtime,
                    **(self._online() if online else {}),
                    "prepare": [prepare, brought.prepared(), *runtime.get("prepare", [])],
                },
                "evaluator": {
                    "strategy": "test_on_output",
                    "config": {
                        "repo_dir": REPO,
                        "test_command": test,
                        "expected_output_json": {TEST_ID: "PASSED"},
                        "test_timeout": 60,
                    },
                },
                "timeout_seconds": PREPARE_S + self.scenario.agent_s,
                "timeouts": {"prepare_s": PREPARE_S, "agent_s": agent_s or self.scenario.agent_s},
                **more,
            }
        )

    def _online(self) -> dict[str, str]:
        network = {"network": "host"} if self._runtime.get("backend") == "docker" else {}
        return {"network_policy": "full", **network}

    def mcp_server(self, transport: str) -> dict[str, Any]:
        """A task's entry for the server, over that transport."""
        if transport == "stdio":
            return brought.by_stdio()
        return {"name": brought.SERVERS[transport], "transport": transport, "url": self._web.url(transport)}

    def submit(self, task: Task) -> None:
        self._open.add(task.task_id)
        self.stack.client.submit(task)

    def _cancel_open(self) -> None:
        """What still runs is stopped at once, so that the worker has nothing to wait for."""
        for name in self._open:
            with suppress(PolarqError):  # the worker ends in any case
                self.stack.client.cancel(name)

    def ended(self, name: str) -> Ran:
        """Waits for a rollout's end."""
        (result,) = self.stack.client.wait(name, WAIT_S).results
        (record,) = self.stack.client.record(name).rollouts
        self._open.discard(name)
        return Ran(
            result, asyncio.run(self._recorded(result.rollout_id, record.attempt, record.token)), self._sampled(name)
        )

    def cancel_at(self, name: str, tokens: int) -> None:
        """Cancels a rollout once its second call has been answered so many tokens of."""
        deadline = time.monotonic() + WAIT_S
        second = self.scenario.before + 1
        while not any(
            call["turn_index"] >= second and len(call["sampled_ids"]) >= tokens for call in self._sampled(name)
        ):
            if time.monotonic() > deadline or self.stack.client.head(name).state.terminal:
                return
            time.sleep(0.1)  # of another program, which tells nobody
        self.stack.client.cancel(name)

    async def _recorded(self, rollout_id: str, attempt: int, token: int) -> list[Completion]:
        calls = self.stack.client.ledger.calls
        ledger = AsyncLedger(self.stack.client.url, calls)
        try:
            return await read_completions(ledger.redis, calls.keys, rollout_id, attempt, token)
        finally:
            await ledger.aclose()

    def _sampled(self, name: str) -> list[dict[str, Any]]:
        answer = self._inference.get("/scripted/ledger", params={"session_id": f"{name}.0"})
        calls: list[dict[str, Any]] = answer.raise_for_status().json()["calls"]
        return calls
