"""Where a session's time went, in the words of Polar's later line: what was, and nothing else."""

from __future__ import annotations

from polarq.contracts.rollout import Timing
from polarq.contracts.sandbox import ExecCategory, ExecTimesReport, SandboxReport
from polarq.http.polar_json import timing, timing_detail

TIMES = ExecTimesReport(
    total_s=3.0,
    count=4,
    failed=2,
    timed_out=1,
    seconds={ExecCategory.AGENT: 2.5, ExecCategory.VERIFIER: 0.5},
    counts={ExecCategory.AGENT: 3, ExecCategory.VERIFIER: 1},
)


def test_each_part_is_told_in_milliseconds_under_polars_key() -> None:
    spent = Timing(
        queue_s=1, prepare_s=2, sandbox_start_s=0.5, recipe_s=1.25, ready_s=3, agent_s=4, agent_setup_s=0.25,
        agent_exec_s=3.5, agent_postprocess_s=0.125, post_queue_s=0.75, build_s=5, evaluate_s=6,
        eval_sandbox_start_s=0.5, eval_recipe_s=2, teardown_s=7, sandbox_stop_s=6.5, total_s=30,
    )  # fmt: skip
    told = timing_detail(spent, SandboxReport(backend="local", exec_times=TIMES))
    assert told == (
        {
            "register_to_init_queue_ms": 1000, "init_ms": 2000, "run_ms": 4000, "postrun_ms": 18000,
            "container_start_ms": 500, "prepare_ms": 1250, "ready_queue_ms": 3000, "agent_setup_ms": 250,
            "agent_exec_ms": 3500, "agent_postprocess_ms": 125, "postrun_queue_ms": 750, "build_ms": 5000,
            "eval_ms": 6000, "eval_container_start_ms": 500, "eval_prepare_ms": 2000, "runtime_stop_ms": 6500,
            "e2e_ms": 31000, "runtime_exec_ms": 3000, "runtime_exec_count": 4, "runtime_exec_timeout_count": 1,
            "runtime_exec_failure_count": 2, "runtime_exec_cancelled_count": 0,
            "runtime_exec_ms_by_category": {"agent": 2500, "verifier": 500},
            "runtime_exec_count_by_category": {"agent": 3, "verifier": 1},
        }
    )  # fmt: skip


def test_what_was_not_reached_or_is_not_there_has_no_key() -> None:
    assert timing_detail(Timing(queue_s=1, total_s=2), None) == {"register_to_init_queue_ms": 1000, "e2e_ms": 3000}
    assert set(timing(Timing(queue_s=1, sandbox_start_s=2, total_s=2))) == {"register_to_init_queue_ms"}
