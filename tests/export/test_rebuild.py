"""Captured calls in a file, and trajectories built anew of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.contracts import Completion, Outcome, Reward, RolloutResult, RolloutState, VersionSpan
from polarq.errors import InvalidInput, UnknownPlugin
from polarq.export.completions import Completions, read_completions_file
from polarq.export.jsonl import read_lines
from polarq.export.rebuild import make_builder, rebuilt
from polarq.trajectory.per_request import PerRequestBuilder
from tests.export.samples import looking, looking_calls, result, said, session, written
from tests.trajectory.calls import call


def in_a_file(path: Path, calls: list[Completion]) -> tuple[RolloutResult, list[Completion]]:
    path.unlink(missing_ok=True)
    written(Completions(lambda _: calls), path, result(0, calls))
    ((back, captured, _),) = read_completions_file(read_lines(path))
    return back, captured


def test_calls_come_back_whole_with_their_rollouts_result(tmp_path: Path) -> None:
    back, captured = in_a_file(tmp_path / "c.jsonl", session())
    assert captured == session()
    assert back == result(0).model_copy(update={"trajectory": None})


@given(st.data())
def test_any_calls_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    ids, words = st.lists(st.integers(0, 3), max_size=6), st.lists(st.sampled_from("ab"), min_size=1, max_size=4)
    calls = []
    for seq in range(data.draw(st.integers(1, 5))):
        parent = data.draw(st.one_of(st.none(), st.integers(0, 6)))
        calls.append(call(seq, data.draw(ids), data.draw(ids), messages=said(*data.draw(words)), parent=parent))
    assert in_a_file(tmp_path_factory.mktemp("c") / "c.jsonl", calls)[1] == calls


def test_a_file_grows_with_its_tokens(tmp_path: Path) -> None:
    def size(turns: int) -> int:
        seen, words, calls = list(range(10_000, 10_100)), ["q"], []
        for seq in range(turns):
            sampled = list(range(20_000 + seq * 50, 20_050 + seq * 50))
            calls.append(call(seq, list(seen), sampled, messages=said(*words)))
            seen, words = [*seen, *sampled], [*words, f"a{seq}", f"b{seq}"]
        path = tmp_path / "c.jsonl"
        in_a_file(path, calls)
        return path.stat().st_size

    assert size(80) < 2.2 * size(40)


def test_rebuilt_as_it_was_it_is_the_same(tmp_path: Path) -> None:
    back, captured = in_a_file(tmp_path / "c.jsonl", session())
    again, before = rebuilt(make_builder("prefix_merging", {}), back, captured), result(0)
    assert again.trajectory is not None
    assert before.trajectory is not None
    assert again.trajectory.traces == before.trajectory.traces
    assert again.trajectory.fidelity == before.trajectory.fidelity
    assert (again.outcome, again.reward) == (before.outcome, before.reward)


def test_another_builder_makes_other_traces_of_the_same_tokens() -> None:
    before = result(0)
    own = before.model_copy(update={"reward": Reward(outcome=0.5, trace_rewards=[0.1, 0.9], evaluator="e")})
    again = rebuilt(make_builder("per_request", {}), own, session())
    assert again.trajectory is not None
    assert [trace.reward for trace in again.trajectory.traces] == [0.5, 0.5, 0.5]
    assert again.reward == Reward(outcome=0.5, evaluator="e")
    assert again.trajectory.fidelity.trainable_tokens == 4
    assert again.trajectory.traces[0].loss_mask == PerRequestBuilder({}).build(session()).traces[0].loss_mask


def test_rewards_of_turns_go_with_their_calls_where_all_are_known() -> None:
    before, calls = looking(), looking_calls()
    again = rebuilt(make_builder("per_request", {}), before, calls)
    assert again.trajectory is not None
    assert again.reward is not None
    assert again.reward.turn_rewards == [[0.25], [1.0]]
    assert [turn.reward for trace in again.trajectory.traces for turn in trace.turns] == [0.25, 1.0]
    more = rebuilt(make_builder("per_request", {}), before, [*calls, call(2, [1], [2])])
    assert more.reward is not None
    assert more.reward.turn_rewards is None
    elsewhere = rebuilt(make_builder("per_request", {}), before.model_copy(update={"trajectory": None}), calls)
    assert elsewhere.reward is not None
    assert (elsewhere.reward.outcome, elsewhere.reward.turn_rewards) == (1.0, None)


def test_rewards_of_turns_go_with_their_calls_through_a_file(tmp_path: Path) -> None:
    path, before = tmp_path / "c.jsonl", looking()
    written(Completions(lambda _: looking_calls()), path, before)
    ((back, captured, turns),) = read_completions_file(read_lines(path))
    again = rebuilt(make_builder("prefix_merging", {}), back, captured, turns)
    assert (again.trajectory, again.reward) == (before.trajectory, before.reward)
    lines = path.read_text()
    for wrong in ('{"0": "1"}', '{"x": 1}', '{"0": true}', "[1]"):
        path.write_text(lines.replace('{"0":0.25,"1":1.0}', wrong))
        with pytest.raises(InvalidInput, match="rebuild: ") as caught:
            list(read_completions_file(read_lines(path)))
        assert "\n" not in str(caught.value)
    path.write_text(lines.replace(',"turn_rewards":{"0":0.25,"1":1.0}', ""))
    ((_, _, turns),) = read_completions_file(read_lines(path))
    assert turns == {}  # a file of before


def test_pictures_are_built_anew_from_what_was_captured(tmp_path: Path) -> None:
    _, captured = in_a_file(tmp_path / "c.jsonl", looking_calls())
    again, before = rebuilt(make_builder("prefix_merging", {}), looking(), captured), looking()
    assert again.trajectory is not None
    assert before.trajectory is not None
    assert again.trajectory.traces == before.trajectory.traces
    assert [one.images for one in again.trajectory.traces] == [captured[1].images]


def test_what_was_not_trainable_does_not_become_so_and_nothing_left_is_none() -> None:
    failed = Outcome(state=RolloutState.FAILED, reason="x")
    assert not rebuilt(make_builder("per_request", {}), result(0, outcome=failed), session()).outcome.trainable
    assert not rebuilt(make_builder("per_request", {}), result(0), session()[2:]).outcome.trainable


def test_the_prompts_have_as_many_start_tokens_as_the_engines(tmp_path: Path) -> None:
    """Case T06: id 1 is the start token. A rebuild renders nothing: what the engine saw is what is built."""
    _, captured = in_a_file(tmp_path / "c.jsonl", session())
    again = rebuilt(make_builder("prefix_merging", {}), result(0), captured)
    assert again.trajectory is not None
    first = again.trajectory.traces[0]
    assert [*first.prompt_ids, *first.response_ids] == [*session()[1].prompt_ids, *session()[1].sampled_ids]
    assert first.prompt_ids.count(1) == 1


def test_a_wrong_file_or_builder_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    in_a_file(path, session())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(InvalidInput, match="ends in the middle of a rollout"):
        list(read_completions_file(read_lines(path)))
    path.write_text(lines[1])
    with pytest.raises(InvalidInput, match=r"no file of polarq\.completions/1"):
        list(read_completions_file(read_lines(path)))
    path.write_text(lines[0] + lines[2] + lines[1] + lines[3])
    with pytest.raises(InvalidInput, match="not valid"):
        list(read_completions_file(read_lines(path)))
    with pytest.raises(InvalidInput, match="emit"):
        make_builder("prefix_merging", {"emit": "x"})
    with pytest.raises(InvalidInput, match="takes no settings"):
        make_builder("per_request", {"x": 1})
    with pytest.raises(UnknownPlugin, match="is not installed here"):
        make_builder("none", {})


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"logprobs": [-9999.0, -0.5]}, "log-probabilities that cannot be any"),
        ({"logprobs": [0.5, -0.5]}, "log-probabilities that cannot be any"),
        (
            {"weight_versions": [VersionSpan(version="1", start=0, end=9)]},
            "the policy version spans do not cover the sampled ids",
        ),
    ],
)
def test_what_no_recorder_would_trust_of_a_file_is_not_trained_on(
    tmp_path: Path, values: dict[str, Any], why: str
) -> None:
    foreign = [session()[0].model_copy(update=values), *session()[1:]]
    back, captured = in_a_file(tmp_path / "c.jsonl", foreign)
    again = rebuilt(make_builder("prefix_merging", {}), back, captured)
    assert again.trajectory is not None
    assert again.trajectory.fidelity.untrainable["0"] == why


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"prompt_ids": [2**40]}, "prompt_ids holds something other than token ids"),
        ({"sampled_ids": [-1, 5]}, "sampled_ids holds something other than token ids"),
        ({"prompt_shared": -1}, "it shares less than nothing"),
        ({"seq": 0}, "seq 0 is there twice"),
    ],
)
def test_a_call_that_no_engine_made_is_one_line(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    path = tmp_path / "c.jsonl"
    in_a_file(path, session())
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = json.dumps({**json.loads(lines[2]), **values}) + "\n"
    path.write_text("".join(lines))
    with pytest.raises(InvalidInput, match=told):
        list(read_completions_file(read_lines(path)))
