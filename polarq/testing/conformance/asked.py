"""The checks of what a task asks of a program: it arrives there, or the task is refused when it is submitted.

Each returns why the task was refused, or a blank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from polarq.contracts.completion import Completion
from polarq.contracts.rollout import Boundary, RolloutState
from polarq.errors import InvalidTask
from polarq.testing.conformance import brought
from polarq.testing.conformance.bench import Bench, Ran
from polarq.testing.conformance.found import Broken, done, ended, recorded_what_was_sampled, solved, steps
from polarq.testing.conformance.mcp_server import TOOL
from polarq.testing.conformance.scenario import LIMIT, Expected
from polarq.testing.inference.scenario import Turn

Run = Callable[..., Ran]
"""A bench's `task`, submitted and waited for."""

MODEL = "House/Word-7B.2"
SAMPLING = {"temperature": 0.25, "top_p": 0.75, "seed": 11}
"""Of the task."""
OWN = 0.5
"""The temperature that the program itself is told to ask for."""
_FILE = re.compile(r"[^\s\"'`<>()]+/SKILL\.md")


class Asked:
    """See the module. `run` runs a task to its end."""

    def __init__(self, bench: Bench, run: Run) -> None:
        self._bench = bench
        self._run = run

    # --- MCP servers

    def mcp(self, expected: Expected) -> str:
        if "stdio" not in self._bench.preset.mcp_transports:
            return self._no_server("stdio")
        server = self._bench.mcp_server("stdio")
        self._called("stdio", self._run("mcp", "mcp", agent={"mcp_servers": [server]}), expected)
        return ""

    def mcp_http(self, expected: Expected) -> str:
        """Both kinds of servers that are reached by an address."""
        refused = []
        for transport in ("streamable-http", "sse"):
            if transport not in self._bench.preset.mcp_transports:
                refused.append(self._no_server(transport))
                continue
            server = self._bench.mcp_server(transport)
            ran = self._run(f"mcp-{transport}", transport, agent={"mcp_servers": [server]}, online=True)
            self._called(transport, ran, expected)
        return refused[0] if len(refused) == 2 else ""

    def _no_server(self, transport: str) -> str:
        agent = {"mcp_servers": [self._bench.mcp_server(transport)]}
        return self._refused(f"no-mcp-{transport}", f"takes no server of transport '{transport}'", agent)

    def _called(self, transport: str, ran: Ran, expected: Expected) -> None:
        turns = self._bench.scenario.calls(transport)
        if not turns:
            raise Broken("its scenario file does not say how the model calls a tool of an MCP server (mcp)")
        done(ran, [*turns, *self._bench.scenario.turns], expected)
        *_, last = turns
        at = len(turns) - 1
        offered = [(tool.get("function") or tool).get("name") for tool in ran.whole[at].tools or []]
        for call in last.tool_calls:
            if TOOL in call.name and call.name not in offered:
                raise Broken(
                    f"the tool {call.name} of the MCP server is not offered, only {', '.join(map(str, offered))}"
                )
        if not last.tool_calls and brought.SERVERS[transport] not in _text(ran.whole[0]):
            raise Broken("the model is not told of the MCP server")
        if brought.CODE not in _text(ran.whole[at + 1]):
            raise Broken(f"the result of the MCP server's tool does not come back: {_newest(ran.whole[at + 1])}")

    # --- skills

    def skills(self, expected: Expected) -> str:
        asks = {"skills_path": brought.SKILL_FOLDER}
        if not self._bench.preset.takes_skills:
            return self._refused("no-skills", "has no skills", asks)
        ran, turns = self._run("skills", "skills", agent=asks), self._bench.scenario.reads
        if not turns:
            raise Broken("its scenario file does not say how the model reads a skill (skill)")
        done(ran, [*turns, *self._bench.scenario.turns], expected)
        first = _text(ran.whole[0])
        if brought.SKILL not in first or brought.GIST not in first:
            raise Broken(f"the skill's name and description are not in the first request: {_around(first)}")
        if untold := [file for file in _files(turns) if not _told(file, first)]:
            raise Broken(f"the model is not told that the skill is {untold[0]}: {_around(first)}")
        if brought.SEALED in first:
            raise Broken("the skill's whole text is in the first request: nothing has to be read")
        if brought.SEALED not in _text(ran.whole[len(turns)]):
            raise Broken(f"the skill's text does not come: {_newest(ran.whole[len(turns)])}")
        return ""

    # --- limits

    def limits(self, expected: Expected) -> str:
        limit = self._bench.preset.turn_limit
        if limit:
            ran = self._run("limits", "endless", agent={"settings": {limit: LIMIT}})
            reason = expected.reason or "agent_limit"
            ended(ran, *_ending(reason), reason)
        else:
            refused = self._refused("no-limits", "model.max_calls", {"settings": {"max_turns": LIMIT}})
            ran = self._run("limits", "endless", model={"max_calls": LIMIT})
            ended(ran, RolloutState.FAILED, Boundary.HARNESS, expected.reason or "call_limit")
        solved(ran)
        steps(ran, range(LIMIT), expected)
        recorded_what_was_sampled(ran)
        last_word = self._bench.scenario.last_word
        told = [number for number, call in enumerate(ran.whole, 1) if last_word in _text(call)]
        if last_word and told != [len(ran.whole)]:
            raise Broken(
                f"'{last_word}' stands in requests {told or 'none'} of {len(ran.whole)}, not in the last alone"
            )
        return "" if limit else refused

    # --- sampling, and the model's name

    def sampling(self, expected: Expected) -> str:
        scenario = self._bench.scenario
        fields = set(self._bench.preset.settings_class.model_fields) - set(scenario.refuses)
        own = scenario.sampling or ({"temperature": OWN} if "temperature" in fields else {})
        if not own:
            self._refused("no-sampling", "model.sampling", {"settings": {"temperature": OWN}})
        agent = {"model_name": MODEL, "settings": own}
        ran = self._run("sampling", "works", agent=agent, model={"sampling": SAMPLING})
        done(ran, scenario.turns, expected)
        for call in ran.sampled:
            if any(call["sampling"].get(name) != value for name, value in SAMPLING.items()):
                raise Broken(f"the engine was asked for {call['sampling']}, not {SAMPLING}")
        for step in ran.whole:
            if not step.model_requested.endswith(MODEL):
                raise Broken(f"the program asks for model '{step.model_requested}', not '{MODEL}'")
            if own and step.overridden.get("temperature") != OWN:
                raise Broken(f"the program was told a temperature of {OWN}, and asks for {step.overridden}")
        return ""

    def _refused(self, name: str, says: str, agent: dict[str, Any]) -> str:
        """The one line with which the task is refused."""
        try:
            self._bench.submit(self._bench.task(name, "works", agent=agent))
        except InvalidTask as exc:
            if len(exc.problems) != 1 or says not in exc.problems[0]:
                raise Broken(f"a task that asks for it is refused with other words: {exc}") from None
            return exc.problems[0]
        raise Broken("the program does not support it, and a task that asks for it is not refused")


def _ending(reason: str) -> tuple[RolloutState, Boundary]:
    return (RolloutState.COMPLETED, Boundary.NONE) if reason == "ok" else (RolloutState.FAILED, Boundary.HARNESS)


def _text(call: Completion) -> str:
    """All that the model is told in a request, with its tools, as one text without escapes."""
    return "\n".join(_texts([call.messages, call.tools]))


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for one in inside for text in _texts(one)]


def _newest(call: Completion) -> str:
    """The newest message, for a finding."""
    text = " ".join(json.dumps(call.messages[-1:], ensure_ascii=False).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _around(text: str) -> str:
    """What a request says about the skill, for a finding."""
    at = text.find(brought.SKILL)
    return "no word of it" if at < 0 else " ".join(text[max(at - 150, 0) : at + 250].split())


def _told(file: str, text: str) -> bool:
    """By its path, or by that of all skills and the rest apart."""
    folder = file.removesuffix(f"/{brought.SKILL}/SKILL.md")
    return file in text or (folder in text and f"{brought.SKILL}/SKILL.md" in text)


def _files(turns: Sequence[Turn]) -> list[str]:
    return [file for turn in turns for text in _texts(turn.model_dump()) for file in _FILE.findall(text)]
