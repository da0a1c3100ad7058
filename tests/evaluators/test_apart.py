"""A check that is run apart: its reply, that the answer was too much for it, or why there is none."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polarq.contracts.rollout import HarnessReport
from polarq.contracts.specs import EvaluatorSpec
from polarq.errors import EvaluatorFault
from polarq_worker.evaluators.apart import TooMuch, run_apart
from polarq_worker.evaluators.base import EvaluationTimedOut
from tests.evaluators.conftest import Bench


async def reply(bench: Bench, folder: Path, code: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
    program = ModuleType("program")
    program.__file__ = str(folder / "program.py")
    Path(program.__file__).write_text(code)
    await bench.start(EvaluatorSpec(strategy="session_completed"))
    context = bench.context(HarnessReport(name="stub", ok=True))
    return await run_apart(context, program, {"a": 1}, cpu_s=1, timeout_s=timeout_s)


async def test_it_reads_the_request_and_its_reply_is_an_object(bench: Bench, tmp_path: Path) -> None:
    noisy = "import sys; sys.stderr.write('x' * (17 << 20)); print(sys.stdin.read())"
    assert await reply(bench, tmp_path, noisy) == {"a": 1}


@pytest.mark.parametrize("code", ["while True: pass", "import sys; sys.exit(87)"])
async def test_what_uses_up_its_processor_time_or_memory_is_too_much(code: str, bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(TooMuch):
        await reply(bench, tmp_path, code)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('[' * 100_000)", "its reply is no JSON object"),
        ("print('[1]')", "its reply is no JSON object"),
        ("pass", "its reply is no JSON object"),
        ("print('{}', 'x' * (17 << 20))", "its reply is no JSON object"),
        ("print('{}'); raise ValueError('why')", "exit code 1: ValueError: why"),
    ],
)
async def test_what_replies_nothing_is_at_fault_and_not_the_answer(
    code: str, says: str, bench: Bench, tmp_path: Path
) -> None:
    with pytest.raises(EvaluatorFault, match=f"evaluators.checks.program: {says}"):
        await reply(bench, tmp_path, code)


async def test_a_machine_that_is_too_busy_is_no_wrong_answer(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(EvaluationTimedOut, match=r"timed out .*; raise timeouts\.evaluate_s"):
        await reply(bench, tmp_path, "import time; time.sleep(60)", timeout_s=0.3)
