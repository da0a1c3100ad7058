"""Whatever lies where a reward should be is read within bounds, and is no reward unless it is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polarq.contracts.specs import EvaluatorSpec, RuntimeSpec
from polarq.errors import EvaluatorFault
from polarq_worker.runtimes.local import LocalRuntime
from tests.evaluators.conftest import EXPECTED, FIX, QUICK, REPO, Bench
from tests.evaluators.odd_rewards import NOT_A_NUMBER, RUN_CASE, each_is_an_outcome
from tests.evaluators.test_harbor import directory, harbor


def script(command: str, reward_from: str = "file") -> EvaluatorSpec:
    return EvaluatorSpec(strategy="script", config={"command": command, "cwd": REPO, "reward_from": reward_from})


async def test_of_a_script(bench: Bench) -> None:
    spec = script(f'R="$POLARQ_REWARD_FILE"; {RUN_CASE}')
    await each_is_an_outcome(bench, spec, {NOT_A_NUMBER: "the reward file is neither a number nor JSON"})


async def test_of_an_object_that_says_it_twice(bench: Bench, tmp_path: Path) -> None:
    twice = '{"reward": 0, "more": {"x": 1, "x": 2}, "reward": 1}'
    await bench.start(script(f"echo '{twice}' > $POLARQ_REWARD_FILE"))
    with pytest.raises(EvaluatorFault, match="neither a number nor JSON without repeated keys"):
        await bench.verdict()
    await bench.start(harbor(directory(tmp_path, f"echo '{twice}' > $VERIFIER_DIR/reward.json")))
    with pytest.raises(EvaluatorFault, match="JSON without repeated keys"):
        await bench.verdict()


async def test_of_a_verifier(bench: Bench, tmp_path: Path) -> None:
    bench.env = {"REPO": f"{bench.session}/repo"}
    await each_is_an_outcome(bench, harbor(directory(tmp_path, f'R="$VERIFIER_DIR/reward.txt"; {RUN_CASE}')), {})


@pytest.mark.parametrize("name", ["reward.txt", "reward.json"])
async def test_of_a_verifier_whose_channel_is_a_file(name: str, bench: Bench, tmp_path: Path) -> None:
    bench.env = {"REPO": f"{bench.session}/repo"}
    await bench.start(harbor(directory(tmp_path, f'mkfifo "$VERIFIER_DIR/{name}"'), reward_channel="file"))
    with pytest.raises(EvaluatorFault, match=rf"^{name} is no regular file"):
        await bench.verdict()


async def test_of_a_last_line_that_is_cut(bench: Bench) -> None:
    """Of what is printed the middle is left out: the end of a long line is not what the line says."""
    await bench.start(script("printf 5; head -c 2M /dev/zero | tr '\\0' 0; echo", "output"))
    with pytest.raises(EvaluatorFault, match="the last line of the script's output has more than 65536 bytes"):
        await bench.verdict()


@pytest.mark.parametrize(
    ("beside", "kept"), [("'[' * 90 + ']' * 90", True), ("'[' * 150 + ']' * 150", False), ("[7] * 20_900", False)]
)
async def test_what_stands_beside_a_reward_is_kept_where_it_can_be(beside: str, kept: bool, bench: Bench) -> None:
    told = f"import os; open(os.environ['POLARQ_REWARD_FILE'], 'w').write('{{\"reward\": 1, \"x\": %s}}' % ({beside}))"
    await bench.start(script(f"python3 - <<'P'\n{told}\nP"))
    reward = await bench.verdict()
    assert (reward.outcome, "reward_json" in reward.report) == (1.0, kept)
    assert reward.report.get("left_out_of_report", []) == ([] if kept else ["reward_json"])


async def test_a_verifier_that_says_much_beside_a_long_reward_is_heard(bench: Bench, tmp_path: Path) -> None:
    bench.env = {"REPO": f"{bench.session}/repo"}
    much = "head -c 4M /dev/zero | tr '\\0' x; echo; head -c 250000 /dev/zero | tr '\\0' ' '"
    both = (
        f'{much} | tee "$VERIFIER_DIR/reward.json" > "$VERIFIER_DIR/reward.txt"; echo 1 >> "$VERIFIER_DIR/reward.txt"'
    )
    await bench.start(harbor(directory(tmp_path, both)))
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["reward_channel"]) == (1.0, "descriptor")


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ("mkfifo out.json", "out.json is no regular file that can be read"),
        ("mkdir out.json", "out.json is no regular file that can be read"),
        ("truncate -s 65M out.json", "out.json has more than 67108864 bytes"),
        ("printf '[%.0s' {1..100000} > out.json", "it is JSON that is nested too deep"),
        ('echo \'{"a::b": "FAILED", "a::b": "PASSED"}\' > out.json', "a key is there twice"),
        ("printf '{\\377' > out.json", "'utf-8' codec can't decode byte 0xff"),
        ("true", "there is no file out.json"),
    ],
)
async def test_of_a_test_report_what_was_printed_counts(report: str, why: str, bench: Bench) -> None:
    await bench.begin({"test_command": f"{report}; {QUICK['test_command']}", "report_path": "out.json"})
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["read_from"]) == (1.0, "output")
    assert why in reward.report["report_problem"]


async def test_a_test_report_is_looked_for_in_the_repository(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = RuntimeSpec(backend="local")
    monkeypatch.setattr(bench, "new", lambda root: LocalRuntime(elsewhere, runtime_id=root.name, root=root))
    bench.recipe = f"cd {bench.session}/repo && {bench.recipe}"
    told = json.dumps(EXPECTED)
    await bench.begin({"test_command": f"echo '{told}' > out.json", "report_path": "out.json"})
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["read_from"]) == (1.0, "report_path")
