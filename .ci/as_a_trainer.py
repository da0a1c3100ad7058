"""What a trainer relies on, in an environment that has `polarq` alone. Run by .ci/package."""

import importlib.util
import sys

import polarq
from polarq import Task, submit_rollout
from polarq.errors import InvalidTask, LedgerUnavailable
from polarq.ledger.scripts import script

for heavy in ("aiohttp", "uvloop", "vllm", "sglang", "minisweagent", "flower"):
    assert importlib.util.find_spec(heavy) is None, f"installing polarq alone brought {heavy}"
assert script("claim").source, "the ledger's scripts are not in the package"

task = {"instruction": "x", "agent": {"harness": "mini_swe_agent"}, "runtime": {"backend": "local"}}
assert Task.load(task).num_samples == 1
try:
    submit_rollout.delay({**task, "num_smaples": 2})
except InvalidTask as exc:
    assert "num_samples" in str(exc)
else:
    sys.exit("a bad task did not raise in the caller")
try:
    submit_rollout.delay(task)
except LedgerUnavailable as exc:
    assert "POLARQ_REDIS_URL" in str(exc)
else:
    sys.exit("a Redis that is not there was not noticed")
print(f"polarq {polarq.__version__} as a trainer sees it: ok")
