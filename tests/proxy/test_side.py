"""Traffic beside the task is told from its steps, and frozen models answer without being trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel, SideKind
from polarq.errors import PolarqError
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, ScriptedInference
from polarq_proxy.app import installed_dialects, placed
from polarq_proxy.call import ModelCall
from polarq_proxy.dialects.base import NativeRequest, Operation
from polarq_proxy.side.rules import SideRules, kind_of, shipped_rules

from .raw_engine import RawCall, answer, raw_engine
from .rig import HELLO, running

FIXTURES = Path(__file__).parent.parent / "fixtures" / "harness"
SIDE = {
    "aider/turn2": "commit_message",
    "aider/turn3": "commit_message",
    "aider-anthropic/turn2": "commit_message",
    "aider-anthropic/turn3": "commit_message",
    "claude-code-compact/turn2": "compaction",
    "codex-compaction/turn2": "compaction",
    "opencode/turn1": "title",
    "opencode-compaction/turn2": "compaction",
}
"""Captured requests that are no steps of their task; every other captured request is one."""
CONDENSE = "You are maintaining a context-aware state summary for an interactive agent.\nYou will be given a list"
"""OpenHands' condenser."""
BASH = {"type": "function", "function": {"name": "bash"}}
CAPTURED = sorted(f"{path.parent.name}/{path.stem}" for path in FIXTURES.glob("*/turn*.json"))


def captured_call(name: str) -> tuple[ModelCall, dict[str, str]]:
    capture = json.loads((FIXTURES / f"{name}.json").read_text("utf-8"))
    headers = dict(capture["headers"])
    place = placed(capture["path"], {})
    native = NativeRequest(place.tail, {}, headers, json.dumps(capture["body"]).encode())
    for dialect in installed_dialects():
        for route in dialect.routes:
            match = route.match("POST", place.tail)
            if match is not None and route.operation is Operation.GENERATE:
                return dialect.parse(native, match), headers
    raise LookupError(f"no dialect speaks {capture['path']}")


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_request_is_a_step_of_its_task_or_its_kind_is_told(name: str) -> None:
    call, headers = captured_call(name)
    assert kind_of(call, "", {"User-Agent": headers.get("User-Agent") or headers.get("user-agent", "")}) == SIDE.get(
        name
    )


def test_every_kind_that_a_fixture_shows_is_looked_for() -> None:
    assert set(SIDE) <= set(CAPTURED)


@pytest.mark.parametrize(
    ("harness", "agent", "call", "kind"),
    [
        ("", "x", ModelCall([{"role": "user", "content": "quota"}], None, {"max_tokens": 1}, "m"), "probe"),
        ("", "x", ModelCall([{"role": "user", "content": "quota"}], None, {}, "m"), None),
        ("", "x", ModelCall([{"role": "user", "content": "Is 7 prime?"}], None, {"max_tokens": 1}, "m"), None),
        (
            "",
            "GeminiCLI-tui/0.61.0/gemini-3.5-flash-lite (linux)",
            ModelCall(HELLO, None, {"response_format": {"type": "json_object"}}, "gemini-3.5-flash-lite"),
            "router",
        ),
        ("", "x", ModelCall([{"role": "system", "content": CONDENSE}, *HELLO], None, {}, "m"), "compaction"),
        ("", "x", ModelCall([{"role": "user", "content": CONDENSE}], None, {}, "m"), "compaction"),
        ("", "x", ModelCall([*HELLO, {"role": "user", "content": CONDENSE}], None, {}, "m"), None),
        ("", "x", ModelCall([{"role": "system", "content": CONDENSE}, *HELLO], [BASH], {}, "m"), None),
        ("autogen", "x", ModelCall([*HELLO, {"role": "tool", "content": "4"}], None, {}, "m"), "reflection"),
        ("ag2", "x", ModelCall([*HELLO, {"role": "tool", "content": "4"}], None, {}, "m"), None),
    ],
)
def test_kinds_that_no_fixture_shows(harness: str, agent: str, call: ModelCall, kind: str | None) -> None:
    assert kind_of(call, harness, {"User-Agent": agent}) == kind


def _says(system: str = "You are an agent.", last: str = "Go on.") -> ModelCall:
    return ModelCall([{"role": "system", "content": system}, {"role": "user", "content": last}], None, {}, "m")


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (
            _says(
                "Generate a short title (four words or less) for this conversation.\n\nTitle what the work is ABOUT",
                "---BEGIN HINTS (optional signals like the working folder)",
            ),
            "title",
        ),
        (
            _says(
                "## Task Context\n- An llm context limit was reached when a user was in a working session",
                "Please summarize the conversation history provided in the system prompt.",
            ),
            "compaction",
        ),
        (_says("You are a context summarization assistant. Your task is to read a conversation"), "compaction"),
        (_says("Generate a short, descriptive title (3-7 words) for a conversation that starts with"), "title"),
        (_says(last="You are a summarization agent creating a context checkpoint. Treat the turns"), "compaction"),
        (_says(last="You are about to hand off your work to another AI agent.\n            Please"), "compaction"),
        (_says(last="You are picking up work from a previous AI agent on this task:\n\n**Original"), "compaction"),
        (_says(last="The next agent has a few questions for you, please answer each of them one"), "compaction"),
        (_says(last="Generate a short title (four words or less) for this conversation."), None),
        (_says("You are a coding agent.", "Summarize the conversation history in notes.md."), None),
    ],
)
def test_harnesses_whose_words_alone_tell_their_side_traffic(call: ModelCall, kind: str | None) -> None:
    """Goose, pi and OpenClaw, Hermes, Terminus-2: no User-Agent of their own, whatever the task calls them."""
    assert kind_of(call, "", {"User-Agent": "OpenAI/JS 7.15.0"}) == kind
    assert kind_of(replace(call, tools=[{"type": "function"}]), "", {}) is None


def test_a_rule_holds_for_the_versions_that_it_names() -> None:
    rules = SideRules.parse(
        {
            "harness": "x",
            "agents": [r"x/(?P<version>[\d.]+)"],
            "rules": [{"kind": "title", "since": "1.10", "before": "2"}],
        }
    )
    for version, fits in {"1.9": False, "1.10": True, "1.99.3": True, "2.0": False}.items():
        named, numbers = rules.version_in(f"x/{version} linux")
        assert named
        assert rules.rules[0].fits(numbers) is fits


def test_a_rule_that_cannot_be_used_says_where() -> None:
    with pytest.raises(PolarqError, match=r"rules\.0\.system.*no regular expression"):
        SideRules.parse({"harness": "x", "rules": [{"kind": "title", "system": "("}]})
    assert {rules.harness for rules in shipped_rules()} >= {"aider", "claude_code", "codex", "opencode"}


def test_the_kinds_that_a_topology_may_name_are_those_that_rules_tell() -> None:
    """The topology is checked where no proxy is installed, so that the list stands with the contracts."""
    assert {rule.kind for file in shipped_rules() for rule in file.rules} == set(SideKind)
    with pytest.raises(PolarqError, match=r"rules\.0\.kind"):
        SideRules.parse({"harness": "x", "rules": [{"kind": "titel"}]})


TITLE = [{"role": "system", "content": "You are a title generator. You output ONLY a title."}, *HELLO]
OPENCODE = {"User-Agent": "opencode/1.18.33"}


async def test_side_traffic_is_recorded_under_its_kind_and_not_trained_on(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await rig.post({"messages": TITLE}, headers=OPENCODE)
        await rig.post({"messages": HELLO}, headers=OPENCODE)
        title, step = await rig.records()
        assert (title.label, title.side_kind, title.trainable) == (CompletionLabel.SIDE, "title", False)
        assert title.sampled_ids
        assert (step.label, step.side_kind, step.trainable) == (CompletionLabel.TRAIN, None, True)


async def test_a_kind_may_be_trained_on_or_answered_by_a_frozen_model(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer("frozen says hi"))

    async with (
        ScriptedInference(scenario=Scenario.of("policy says hi")) as inference,
        raw_engine(act) as frozen,
    ):
        pool = [{"alias": "pool/small", "model": "small-1", "base_url": f"{frozen.url}/v1", "api_key_env": "SMALL_KEY"}]
        options: dict[str, Any] = {"model_pool": pool, "env": {"SMALL_KEY": "sk-secret"}}
        body = {"model": "m", "messages": TITLE}
        treated: dict[str, Any] = {"side_traffic": {"title": "train"}}
        async with running(redis_client, keys, inference.base_url, **treated, **options) as rig:
            await rig.post(body, headers=OPENCODE)
            [record] = await rig.records()
            assert (record.label, record.side_kind, record.trainable) == (CompletionLabel.TRAIN, "title", True)
        treated = {"side_traffic": {"title": "pool/small"}}
        async with running(redis_client, keys, inference.base_url, **treated, **options) as one:
            rig = await one.session(7)
            _, said = await rig.post(body, headers=OPENCODE)
            assert said["choices"][0]["message"]["content"] == "frozen says hi"
            [call], [record] = frozen.calls, await rig.records()
            assert call.headers["authorization"] == "Bearer sk-secret"
            assert call.body["model"] == "small-1"
            assert "return_token_ids" not in call.body
            assert (record.label, record.side_kind, record.trainable) == (CompletionLabel.SIDE, "title", False)
            assert record.untrainable == "answered by the frozen model 'small-1', not by the policy"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_frozen_model_is_asked_for_by_its_alias(redis_client: Redis, keys: Keys, stream: bool) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer("frozen says hi"))

    async with (
        ScriptedInference(scenario=Scenario.of("policy")) as inference,
        raw_engine(act) as frozen,
    ):
        pool = [{"alias": "pool/judge", "model": "judge-1", "base_url": frozen.url}]
        async with running(redis_client, keys, inference.base_url, model_pool=pool) as rig:
            body = {"model": "pool/judge", "messages": HELLO, "stream": stream}
            status, _, data = await rig.raw(body)
            assert status == 200
            assert b"frozen says hi" in data
            [record] = await rig.records()
            assert (record.label, record.side_kind, record.trainable) == (CompletionLabel.SIDE, "pool", False)
            status, refused = await rig.post({"model": "pool/other", "messages": HELLO})
            assert status == 404
            assert "the node has no model 'pool/other'" in refused["error"]["message"]
            assert "pool/judge" in refused["error"]["message"]
            assert len(await rig.records()) == 1


async def test_a_frozen_model_that_fails_is_not_the_policys_fault(redis_client: Redis, keys: Keys) -> None:
    async with ScriptedInference(scenario=Scenario.of("policy")) as inference:
        pool = [{"alias": "pool/judge", "model": "judge-1", "base_url": "http://127.0.0.1:1"}]
        async with running(redis_client, keys, inference.base_url, model_pool=pool) as rig:
            status, refused = await rig.post({"model": "pool/judge", "messages": HELLO})
            assert (status, refused["error"]["code"]) == (503, "engine_down")
            await rig.ask()
            await rig.proxy.recorder.drain()
            assert rig.proxy.health()["status"] == "ok"
            assert int(await redis_client.hget(keys.grant(rig.digest), "faults") or 0) == 0
