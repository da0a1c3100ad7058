"""A bench for evaluators: a prepared sandbox, an agent that is a few shell commands, and the verdict on its work."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import HarnessReport, Reward
from polarq.contracts.specs import EvaluatorSpec, RuntimeSpec
from polarq.contracts.task import Task
from polarq.contracts.trajectory import Trajectory
from polarq_worker.evaluators import asking
from polarq_worker.evaluators.base import EvaluationContext, Evaluator, NodeRules
from polarq_worker.evaluators.create import create_evaluator
from polarq_worker.harnesses.base import sandbox_env
from polarq_worker.runtimes.base import Runtime
from polarq_worker.runtimes.local import LocalRuntime

REPO = "/polar/session/repo"
GIT = "git -c user.name=a -c user.email=a@b -c commit.gpgsign=false"
CALC = "def add(a, b):\n    return a - b\n"
TESTS = """\
import pytest
from calc import add

def test_add():
    assert add(1, 2) == 3

@pytest.mark.parametrize("p", ["2 x 3", "two  blanks"])
def test_p(p):
    assert add(len(p), 0) == len(p)
"""
CHECK = """import sys
sys.path.insert(0, ".")
from calc import add
print("PASSED" if add(1, 2) == 3 else "FAILED", "tests/test_calc.py::test_add")
for p in ("2 x 3", "two  blanks"):
    print("PASSED" if add(len(p), 0) == len(p) else "FAILED", f"tests/test_calc.py::test_p[{p}]")
"""
QUICK = {"test_command": "python tests/check.py"}
"""The same tests without pytest, for what is not about pytest."""
EXPECTED = {
    "tests/test_calc.py::test_add": "PASSED",
    "tests/test_calc.py::test_p[2 x 3]": "PASSED",
    "tests/test_calc.py::test_p[two  blanks]": "PASSED",
}
FIX = "printf 'def add(a, b):\\n    return a + b\\n' > calc.py"
FILES = {
    "calc.py": CALC,
    "tests/test_calc.py": TESTS,
    "tests/check.py": CHECK,
    ".gitignore": "ignored*\n__pycache__/\n",
}


class Bench:
    """One rollout's sandboxes. `agent` and `verdict` may be called in any order, as often as wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, str | bytes] = dict(FILES)
        self.recipe = f"{GIT} init -q && {GIT} add -A && {GIT} commit -q -m first"
        self.eval_recipe: str | None = None
        self.env: dict[str, str] = {}
        self.rules = NodeRules(upload_roots=["*"], judge_hosts=["127.0.0.1"])
        self.trajectory = Trajectory(builder="per_request")
        self.runtimes: list[Runtime] = []
        self.evaluator: Evaluator | None = None
        self._baseline: dict[str, Any] = {}

    @property
    def runtime(self) -> Runtime:
        return self.runtimes[0]

    @property
    def session(self) -> str:
        """Where the first sandbox's session will lie, as its programs see it."""
        return LocalRuntime(RuntimeSpec(backend="local"), runtime_id="", root=self.folder / "root0").layout.session_dir

    async def begin(
        self, config: dict[str, Any] | None = None, *, fresh: bool = False, env: dict[str, str] | None = None
    ) -> None:
        """Prepares the sandbox and lets the evaluator look at it."""
        whole = {
            "repo_dir": REPO,
            "test_command": "python -m pytest -p no:cacheprovider -q",
            "expected_output_json": EXPECTED,
            **(config or {}),
        }
        spec = EvaluatorSpec(strategy="test_on_output", config=whole, refresh_runtime=fresh, env=env or {})
        await self.start(spec)

    async def start(self, spec: EvaluatorSpec) -> None:
        """The same with an evaluator of any kind."""
        self.evaluator = create_evaluator(spec, [])
        runtime = await self._prepared(self.recipe)
        baseline = await self.evaluator.baseline(runtime, self._env(runtime), 60)
        self._baseline = json.loads(json.dumps(baseline))

    async def agent(self, *commands: str) -> None:
        for command in commands:
            result = await self.runtime.exec(command, cwd=REPO, timeout_s=60)
            assert result.ok, result

    async def verdict(self, timeout_s: float = 120.0) -> Reward:
        assert self.evaluator is not None
        reward = await self.evaluator.evaluate(self.context(HarnessReport(name="stub", ok=True), timeout_s))
        assert len(reward.model_dump_json()) < 64 * 1024
        return reward

    def context(self, harness: HarnessReport, timeout_s: float = 120.0) -> EvaluationContext:
        async def fresh() -> Runtime:
            return await self._prepared(self.recipe if self.eval_recipe is None else self.eval_recipe)

        return EvaluationContext(
            task=self._task(),
            rollout_id="t1.0",
            trajectory=self.trajectory,
            harness=harness,
            runtime=self.runtime,
            env=self._env(self.runtime),
            timeout_s=timeout_s,
            baseline=self._baseline,
            fresh_runtime=fresh,
            rules=self.rules,
        )

    async def end(self) -> None:
        for runtime in self.runtimes:
            await runtime.stop()

    def new(self, root: Path) -> Runtime:
        """A sandbox, not started."""
        return LocalRuntime(RuntimeSpec(backend="local", workdir=REPO), runtime_id=root.name, root=root)

    async def _prepared(self, recipe: str) -> Runtime:
        runtime = self.new(self.folder / f"root{len(self.runtimes)}")
        self.runtimes.append(runtime)
        await runtime.start()
        for name, content in self.files.items():
            await runtime.put_bytes(content.encode() if isinstance(content, str) else content, f"{REPO}/{name}")
        result = await runtime.exec(recipe, timeout_s=60)
        assert result.ok, result
        return runtime

    def _task(self) -> Task:
        return Task.parse(
            {
                "task_id": "t1",
                "instruction": "x",
                "runtime": {"backend": "local", "env": self.env},
                "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
            }
        )

    def _env(self, runtime: Runtime) -> dict[str, str]:
        return sandbox_env(self._task(), rollout_id="t1.0", layout=runtime.layout)


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was busy is asked again at once."""
    monkeypatch.setattr(asking, "FIRST_BACKOFF_S", 0.01)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    await bench.end()
