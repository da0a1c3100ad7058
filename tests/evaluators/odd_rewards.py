"""What a script or a verifier may leave where its reward should be, and what an evaluator says of each."""

from __future__ import annotations

import pytest

from polarq.contracts.rollout import Boundary, RolloutState
from polarq.contracts.specs import EvaluatorSpec
from polarq_worker.outcomes import StageFailed
from polarq_worker.stages.faults import of_evaluate
from tests.evaluators.conftest import Bench

RUN_CASE = ". ../case"
"""Of a script in the repository: the case at hand, with `$R` for the reward's path."""
NOT_REGULAR, TOO_MUCH, NOT_A_NUMBER = "no regular file", "more than", "no number"
CASES = {
    'rm -f "$R"; mkfifo "$R"': NOT_REGULAR,
    'rm -f "$R"; mkdir "$R"; echo 1 > "$R/reward"': NOT_REGULAR,
    'echo 1 > "$R.other"; ln -sf "$R.other" "$R"': NOT_REGULAR,
    'ln -sf /etc/passwd "$R"': NOT_REGULAR,
    'ln -sf /dev/zero "$R"': NOT_REGULAR,
    'ln -sf /nowhere "$R"': NOT_REGULAR,
    "head -c 128M /dev/zero | tr '\\0' 1 > \"$R\"": TOO_MUCH,
    'truncate -s 64G "$R"': TOO_MUCH,
    'truncate -s 64 "$R"': NOT_A_NUMBER,
    "printf '\\377\\000\\033[2J\\n1' > \"$R\"": NOT_A_NUMBER,
    "printf '1%.0s' {1..60000} > \"$R\"": "is inf, which is no reward",
}


async def each_is_an_outcome(bench: Bench, spec: EvaluatorSpec, told: dict[str, str]) -> None:
    """Every case ends with one line, and without a reward. `told` has other words for some of the above."""
    await bench.start(spec)
    for case, says in CASES.items():
        await bench.agent(f"cat > ../case <<'END'\n{case}\nEND")
        with pytest.raises(StageFailed) as caught, of_evaluate(60):
            await bench.verdict(60)
        outcome = caught.value.outcome
        assert (outcome.state, outcome.boundary) == (RolloutState.FAILED, Boundary.EVALUATOR), case
        assert told.get(says, says) in outcome.message, (case, outcome.message)
        assert (outcome.reason, "\n" in outcome.message) == ("evaluator_failed", False), case
