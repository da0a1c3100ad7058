"""Scenario files: what is read, and what a mistake is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarq.testing.inference import Scenario, Turn, load_scenario
from polarq.testing.inference.faults import HttpStatus
from polarq.testing.inference.scenario import InvalidScenario, built_in_scenarios

WHOLE = """
name: weather
tokens_per_s: 50
scripts:
  - name: asks
    turns:
      - content: Let me look.
        reasoning: Hm.
        tool_calls: [{name: get_weather, arguments: {city: Paris}}]
        delay_s: 0.5
      - raw: "<tool_call>broken"
        fault: {kind: http_status, status: 429, retry_after_s: 2, times: 1}
"""


def test_a_scenario_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weather.yaml"
    path.write_text(WHOLE)

    scenario = load_scenario(path)

    first, second = scenario.scripts[0].turns
    assert first.tool_calls[0].arguments == {"city": "Paris"}
    assert second.fault == HttpStatus(kind="http_status", status=429, retry_after_s=2, times=1)


def test_the_built_in_scenarios_load_by_name() -> None:
    assert {"calculator", "echo"} <= set(built_in_scenarios())
    for name in built_in_scenarios():
        assert load_scenario(name).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nscripts: []", "scripts: Tuple should have at least 1 item"),
        ("name: x\nscripts: [{name: a, turns: [{contents: hi}]}]", "did you mean 'content'?"),
        ("name: x\nscripts: [{name: a, turns: [{fault: {kind: explode}}]}]", "scripts.0.turns.0.fault"),
        ("name: x\nscripts: [{name: a, turns: [{raw: r, content: c}]}]", "give 'raw' alone"),
        ("name: x\nscripts: [{name: a, turns: [{}]}, {name: a, turns: [{}]}]", "two scripts have the same name"),
        ("name: [", "cannot be parsed"),
        ("just text", "valid dictionary"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)

    with pytest.raises(InvalidScenario) as caught:
        load_scenario(path)

    assert said in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_lists_the_built_in_names() -> None:
    with pytest.raises(InvalidScenario, match=r"no such file, and no built-in scenario .*calculator"):
        load_scenario("nowhere.yaml")


def test_a_turn_can_be_long_by_repetition() -> None:
    assert Turn(content="word ", repeat=3).text() == "word word word "


def test_a_scenario_of_texts_has_one_script() -> None:
    scenario = Scenario.of("one", "two", tokens_per_s=5.0)

    assert [turn.content for turn in scenario.scripts[0].turns] == ["one", "two"]
    assert scenario.tokens_per_s == 5.0
