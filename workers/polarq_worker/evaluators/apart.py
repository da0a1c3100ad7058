"""Runs what reads a policy's own words with a large library (a computer algebra system, regular expressions of others)
in a sandbox of its own, which has nothing but the request: what hangs, eats memory or breaks out of the library there
harms no worker."""

from __future__ import annotations

import json
import secrets
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import EvaluatorFault, SandboxLost
from polarq_worker.evaluators.base import EvaluationContext, EvaluationTimedOut
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.local import LocalRuntime

MEMORY_KB = 4 * 1024 * 1024
MAX_REPLY_BYTES = 16 * 1024 * 1024
OUT_OF_MEMORY = 87
"""What the programs exit with when Python had no memory for them."""
_LIMITED = 'ulimit -S -t "$1" && ulimit -v "$2" -c 0 && shift 2 && exec "$@"'


class TooMuch(Exception):
    """It used up its processor time or memory: that is in the request, not in how busy the machine is."""


async def run_apart(
    context: EvaluationContext, program: ModuleType, request: Any, *, cpu_s: int, timeout_s: float
) -> dict[str, Any]:
    """The JSON reply of one of `evaluators.checks`. Raises `TooMuch`, `EvaluatorFault`, `RuntimeFault`."""
    name = f"apart-{secrets.token_hex(6)}"
    theirs = context.runtime.host
    # Without `folder`: it lies in the folder of the rollout's own sandbox and goes with it, whatever happens.
    host = Host(node_id=theirs.node_id, settings=theirs.settings, private=theirs.private)
    spec = RuntimeSpec(backend="local")
    runtime = LocalRuntime(spec, runtime_id=name, root=context.runtime.root / name, host=host)
    try:
        await runtime.start(online=not LocalRuntime.keeps_offline(host))
        target = f"{runtime.layout.session_dir}/check.py"
        await runtime.put_file(Path(program.__file__ or ""), target)
        result = await runtime.exec(
            ["bash", "-c", _LIMITED, "bash", str(cpu_s), str(MEMORY_KB), sys.executable, "-I", target],
            stdin=json.dumps(request).encode(),
            timeout_s=timeout_s,
            max_output_bytes=MAX_REPLY_BYTES,
            category=ExecCategory.VERIFIER,
        )
    finally:
        await runtime.stop()
    what = f"evaluators.checks.{Path(program.__file__ or '').stem}"
    if result.kind is ExecKind.TIMED_OUT:
        raise EvaluationTimedOut(f"{what}: {result.why}; raise timeouts.evaluate_s")
    if result.kind is ExecKind.SANDBOX_LOST:
        raise SandboxLost(f"{what}: {result.why}")
    if result.signal == signal.SIGXCPU or result.exit_code == OUT_OF_MEMORY:
        raise TooMuch(result.why)
    if not result.ok:
        raise EvaluatorFault(f"{what}: {result.why}")
    try:
        reply = json.loads(result.stdout)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise EvaluatorFault(f"{what}: its reply is no JSON object")
    return reply
