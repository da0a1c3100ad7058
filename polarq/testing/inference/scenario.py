"""Scenarios: what the scripted model says, turn by turn. Read from YAML, or built in Python.

    name: weather
    scripts:
      - name: asks_the_tool
        turns:
          - content: Let me look it up.
            tool_calls: [{name: get_weather, arguments: {city: Paris}}]
          - content: It is sunny in Paris.

Which script and turn answers a request is `polarq.testing.inference.selection`'s business.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from polarq.contracts.base import Contract
from polarq.errors import InvalidInput
from polarq.testing.inference.faults import Fault
from polarq.testing.inference.rendering import to_json

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"


class InvalidScenario(InvalidInput):
    """The scenario is not there or cannot be used."""


class ToolCall(Contract):
    """One call that the model makes. `arguments` is sampled as one line of JSON, keys in this order."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = {}


class Turn(Contract):
    """One answer of the model: `raw` (exactly this text), or thinking, content and tool calls.

    `repeat` writes the content so many times, for long answers. `delay_s` passes before the first token,
    then tokens come at `tokens_per_s` (None: as the script, the scenario or the server says; at once if none does).
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    raw: str | None = None
    repeat: int = Field(1, ge=1)
    delay_s: float | None = Field(None, ge=0)
    tokens_per_s: float | None = Field(None, gt=0)
    fault: Fault | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.raw is not None and (self.content or self.reasoning or self.tool_calls):
            raise ValueError("give 'raw' alone, or content, reasoning and tool_calls")
        return self

    def text(self, *, thinking: bool = True) -> str:
        """The text that is sampled, without the end-of-turn token: what the chat template would render for the
        same message, so that a re-rendered history continues the sampled ids exactly."""
        if self.raw is not None:
            return self.raw * self.repeat
        content = self.content * self.repeat
        calls = [
            f'<tool_call>\n{{"name": {to_json(call.name)}, "arguments": {to_json(call.arguments)}}}\n</tool_call>'
            for call in self.tool_calls
        ]
        if calls:
            content = "\n".join([content.strip(), *calls] if content.strip() else calls)
        reasoning = self.reasoning.strip()
        return f"<think>\n{reasoning}\n</think>\n\n{content}" if reasoning and thinking else content


class Script(Contract):
    """One way a conversation goes. After the last turn, the last turn is said again."""

    name: str = Field(pattern=NAME_PATTERN)
    turns: tuple[Turn, ...] = Field(min_length=1)
    delay_s: float | None = Field(None, ge=0)
    tokens_per_s: float | None = Field(None, gt=0)
    fault: Fault | None = None

    def turn(self, index: int) -> Turn:
        return self.turns[min(index, len(self.turns) - 1)]


class Scenario(Contract):
    """A list of scripts. `fault`, `delay_s` and `tokens_per_s` hold where neither turn nor script says otherwise.

    `drift_seed` makes the model sample other ids for its texts than the tokenizer would encode them to, so that
    histories which are re-rendered from text no longer continue the sampled ids.
    """

    name: str = Field(pattern=NAME_PATTERN)
    description: str = ""
    scripts: tuple[Script, ...] = Field(min_length=1)
    delay_s: float = Field(0.0, ge=0)
    tokens_per_s: float | None = Field(None, gt=0)
    fault: Fault | None = None
    drift_seed: int | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = self.script_names
        if len(set(names)) != len(names):
            raise ValueError(f"two scripts have the same name: {', '.join(names)}")
        return self

    @property
    def script_names(self) -> tuple[str, ...]:
        return tuple(script.name for script in self.scripts)

    @classmethod
    def of(cls, *texts: str, name: str = "inline", **settings: Any) -> Self:
        """A scenario of one script that says `texts`, one a turn."""
        turns = tuple(Turn(content=text) for text in texts)
        return cls(name=name, scripts=(Script(name="only", turns=turns),), **settings)


def built_in_scenarios() -> tuple[str, ...]:
    """Names of the scenarios that ship with polarq."""
    folder = files("polarq.testing.inference").joinpath("scenarios")
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def load_scenario(source: str | Path) -> Scenario:
    """The scenario of that name, or of that YAML file. Raises `InvalidScenario` with one line per mistake."""
    if isinstance(source, str) and source in built_in_scenarios():
        text = files("polarq.testing.inference").joinpath("scenarios", f"{source}.yaml").read_text("utf-8")
        return _parsed(text, f"scenario {source}")
    path = Path(source)
    what = f"scenario file {path}"
    try:
        return _parsed(path.read_text(encoding="utf-8"), what)
    except FileNotFoundError:
        problem = f"there is no such file, and no built-in scenario of that name ({', '.join(built_in_scenarios())})"
        raise InvalidScenario(what, [problem]) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidScenario(what, [f"cannot be read: {exc}"]) from None


def _parsed(text: str, what: str) -> Scenario:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise InvalidScenario(what, [f"cannot be parsed: {' '.join(str(exc).split())}"]) from None
    return Scenario.parse(data, what=what, error=InvalidScenario)
