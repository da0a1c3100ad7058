"""Scenario files of the conformance suite: what the scripted model says to one program.

    harness: codex
    agent: {settings: {request_retries: 1}}      # the agent of its tasks, beside `harness`
    turns:                                       # a task of two turns; the first writes `hello` into hello.txt
      - tool_calls: [{name: exec_command, arguments: {cmd: printf hello > hello.txt}}]
      - content: hello.txt is written.
    expect:                                      # where it does otherwise than most
      cut: {reason: model_failed, why: it gives up at a stream that broke off}

`{dialect}: {turns: ...}` below `dialects` replaces the turns for one of several dialects. What a task brings is used as
this program uses it:

    mcp:                                         # how the model calls a tool of an MCP server
      - tool_calls: [{name: mcp__NAME__TOOL, arguments: {word: WORD}}]
    skill:                                       # how it reads a skill
      - tool_calls: [{name: exec_command, arguments: {cmd: cat .../skills/NAME/SKILL.md}}]

There NAME stands for the server or the skill, TOOL for the server's tool, WORD for what is asked of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from polarq.contracts.base import Contract
from polarq.contracts.completion import SideKind
from polarq.errors import InvalidInput
from polarq.testing.conformance.brought import SERVERS, SKILL, used
from polarq.testing.inference.faults import CutAfterTokens, Fault, Hang, HttpStatus
from polarq.testing.inference.scenario import Scenario, Script, Turn

CheckName = Literal[
    "works",
    "unstreamed",
    "continues",
    "side",
    "quiet",
    "model_error",
    "overflow",
    "busy",
    "cut",
    "cancelled",
    "timed_out",
    "mcp",
    "mcp_http",
    "skills",
    "limits",
    "sampling",
]
ENOUGH_TOKENS = 200_000
"""The scripted model's context: first requests of some programs have 30,000 tokens."""
OVERFLOW = (
    f"This model's maximum context length is {ENOUGH_TOKENS} tokens. However, you requested 0 output tokens and your"
    f" prompt contains at least {ENOUGH_TOKENS + 1} input tokens, for a total of at least {ENOUGH_TOKENS + 1} tokens."
    " Please reduce the length of the input prompt or the number of requested output tokens."
)


class Expected(Contract):
    """How one check ends for a program, where that is not as for most; `why` says it for the table."""

    reason: str | None = None
    """`Outcome.reason`."""
    calls: int | None = Field(None, ge=0)
    """Steps of the task that were answered whole."""
    skip: bool = False
    """There is nothing of the kind."""
    why: str = ""


class DialectScript(Contract):
    """What differs when the program speaks one of its dialects."""

    agent: dict[str, Any] = {}
    turns: tuple[Turn, ...] | None = None
    mcp: tuple[Turn, ...] | None = None
    sampling: dict[str, Any] | None = None
    refuses: tuple[str, ...] | None = None
    expect: dict[CheckName, Expected] = {}


class ProgramScenario(Contract):
    """See the module."""

    harness: str
    not_run: str = ""
    """Why polarq's own tests do not run it; empty: they do."""
    agent: dict[str, Any] = {}
    turns: tuple[Turn, ...] = Field(min_length=2)
    mcp: tuple[Turn, ...] = ()
    skill: tuple[Turn, ...] = ()
    last_word: str = ""
    """What the program tells the model in the last request at its limit of turns, where it asks for a closing answer
    and does not just stop (`expect.limits.calls`: the requests, that one among them)."""
    sampling: dict[str, Any] = {}
    """Settings that ask for a temperature of 0.5, where the preset has no `temperature` or wants more with it."""
    refuses: tuple[str, ...] = ()
    """Settings of the preset that the program cannot be told over one dialect: a task that asks for one is refused."""
    before: int = Field(0, ge=0)
    """Answers of a model that the program makes up and puts before the first one (examples in its prompt)."""
    dialects: dict[str, DialectScript] = {}
    side: list[SideKind] = []
    """Kinds of side traffic that a task of two turns brings."""
    denied: list[str] = []
    """Hosts that it asks for though it is told not to (patterns of host:port), and does without."""
    agent_s: float = Field(300.0, gt=0)
    """The agent's budget."""
    runtime: dict[str, Any] = {}
    """More of its sandboxes."""
    expect: dict[CheckName, Expected] = {}

    @model_validator(mode="after")
    def _acts_first(self) -> ProgramScenario:
        if not (self.turns[0].tool_calls or self.turns[0].content):
            raise ValueError("the first turn must do something")
        return self

    def of_dialect(self, dialect: str) -> ProgramScenario:
        own = self.dialects.get(dialect, DialectScript())
        settings = {**self.agent.get("settings", {}), **own.agent.get("settings", {})}
        agent = {**self.agent, **own.agent, **({"settings": settings} if settings else {})}
        given = {"turns": own.turns, "mcp": own.mcp, "sampling": own.sampling, "refuses": own.refuses}
        said = {key: turns for key, turns in given.items() if turns is not None}
        return self.model_copy(update={"agent": agent, **said, "expect": {**self.expect, **own.expect}})

    def expected(self, check: CheckName) -> Expected:
        return self.expect.get(check, Expected())

    def calls(self, transport: str) -> list[Turn]:
        """What the model says to call the tool of a task's MCP server."""
        return [used(turn, SERVERS[transport]) for turn in self.mcp]

    @property
    def reads(self) -> list[Turn]:
        """What the model says to read a task's skill."""
        return [used(turn, SKILL) for turn in self.skill]

    def _endless(self) -> list[Turn]:
        """A model that acts for ever, unless it is asked to close."""
        if not self.last_word:
            return [self.turns[0]]
        calls = self.expected("limits").calls or LIMIT
        return [*[self.turns[0]] * (calls - 1), Turn(content="That is all for now.")]

    def scenario(self) -> Scenario:
        """The scripts of all checks: a task asks for one by `[script: NAME]`."""
        made_up = (Turn(content="Never asked for."),) * self.before
        first, last = (*made_up, *self.turns[:-1]), self.turns[-1]

        def ends(name: str, fault: Fault) -> Script:
            """Where the fault passes, so does it for a program that adds a message instead of asking again."""
            after = (last,) if fault.times is not None else ()
            return Script(name=name, turns=(*first, last.model_copy(update={"fault": fault}), *after))

        return Scenario(
            name=self.harness,
            scripts=(
                Script(name="works", turns=(*first, last)),
                Script(name="model_error", turns=(*first, last), fault=HttpStatus(kind="http_status", status=500)),
                ends("overflow", HttpStatus(kind="http_status", status=400, message=OVERFLOW)),
                ends("busy", HttpStatus(kind="http_status", status=429, retry_after_s=1, times=1)),
                ends("cut", CutAfterTokens(kind="cut_after_tokens", after_tokens=CUT_TOKENS, times=1)),
                ends("hang", Hang(kind="hang", after_tokens=2)),
                Script(name="endless", turns=(*made_up, *self._endless())),
                Script(name="mcp", turns=(*made_up, *self.calls("stdio"), *self.turns)),
                Script(name="sse", turns=(*made_up, *self.calls("sse"), *self.turns)),
                Script(name="streamable-http", turns=(*made_up, *self.calls("streamable-http"), *self.turns)),
                Script(name="skills", turns=(*made_up, *self.reads, *self.turns)),
            ),
        )


CUT_TOKENS = 3
LIMIT = 2
"""Turns that a program is to stop after."""


def shipped() -> tuple[str, ...]:
    """Harnesses that have a scenario file here."""
    return tuple(sorted(Path(entry.name).stem for entry in _folder().iterdir() if entry.name.endswith(".yaml")))


def load(harness: str, own: Path | None = None) -> ProgramScenario:
    """The program's scenario: of the file `own`, else of the one that ships. Raises `InvalidInput`."""
    what = f"conformance scenario of harness '{harness}'"
    try:
        text = Path(own).read_text("utf-8") if own is not None else (_folder() / f"{harness}.yaml").read_text("utf-8")
        return ProgramScenario.parse(_mapping(yaml.safe_load(text), what), what=what, error=InvalidInput)
    except FileNotFoundError:
        class_says = "write one, and name it in the class's `conformance` (docs/adding-a-harness.md)"
        missing = f"there is no file {own}; is it in the package's data?"
        raise InvalidInput(what, [missing if own is not None else f"none ships; {class_says}"]) from None
    except OSError as exc:
        raise InvalidInput(what, [f"{own} cannot be read: {exc.strerror}"]) from None
    except UnicodeDecodeError as exc:
        raise InvalidInput(what, [f"{own} is not UTF-8 text (byte {exc.start})"]) from None
    except yaml.YAMLError as exc:
        raise InvalidInput(what, [f"cannot be parsed: {' '.join(str(exc).split())}"]) from None


def _mapping(data: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise InvalidInput(what, ["it has to be a mapping"])
    return data


def _folder() -> Any:
    return files("polarq.testing.conformance") / "programs"
