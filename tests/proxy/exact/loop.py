"""A small agent loop over exact mode: what goes to the engine, and whether it is what it must be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from polarq.registry import plugin
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn, load_tokenizer
from polarq.testing.inference.rendering import render
from polarq.topology import InferenceEndpoint
from polarq_proxy.call import Answer, Choice, ModelCall
from polarq_proxy.endpoints import Endpoint
from polarq_proxy.exact.base import Bridge, Missed
from polarq_proxy.exact.context import ExactContext, Plan
from polarq_proxy.exact.engine import EngineRenderer
from polarq_proxy.exact.suffix import Suffixes
from polarq_proxy.jsons import encode

Message = dict[str, Any]

TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Runs {name}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read", "write")
]
SYSTEM: Message = {"role": "system", "content": "You are an agent that works on files."}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def result(text: str, call_id: str = "call") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def reading(path: str, thinking: str = "", content: str = "", calls: int = 1) -> Turn:
    """A turn that calls a tool, or several at once."""
    made = tuple(ToolCall(name="read", arguments={"path": f"{path}.{at}", "lines": [at, 2.5]}) for at in range(calls))
    return Turn(reasoning=thinking, content=content, tool_calls=made)


def scenario(*turns: Turn, **settings: Any) -> Scenario:
    return Scenario(name="loop", scripts=(Script(name="only", turns=turns),), **settings)


@dataclass
class Turned:
    """One call and what came of it."""

    plan: Plan
    call: ModelCall
    answer: Answer

    @property
    def message(self) -> Message:
        return self.answer.choices[0].message

    @property
    def ids(self) -> list[int]:
        """Prompt and sample."""
        return [*(self.answer.prompt_ids or ()), *(self.answer.choices[0].ids or ())]


@dataclass
class Loop:
    endpoint: Endpoint
    render: EngineRenderer
    suffixes: Suffixes
    keep_thinking: bool = True
    context: ExactContext = field(default_factory=ExactContext)
    turns: list[Turned] = field(default_factory=list)

    @property
    def missed(self) -> list[Missed]:
        return [turn.plan.missed for turn in self.turns if turn.plan.missed]

    async def ask(self, call: ModelCall, ids: list[int] | None = None) -> Answer:
        """Samples, with nothing remembered."""
        request = self.endpoint.engine.request(call, "scripted", stream=False, prompt_ids=ids)
        async with self.endpoint.upstream.post(request.path, encode(request.body), {}) as response:
            data = await response.read()
        assert response.status == 200, data
        return self.endpoint.engine.read(data)

    async def say(self, messages: Sequence[Message], tools: list[Message] | None = None, **options: Any) -> Turned:
        """One call as the proxy makes it. Whatever was sent as ids is checked."""
        call = ModelCall(list(messages), tools, options, "", choices=options.get("n", 1))
        plan = await self.context.prompt(call, self.suffixes)
        answer = await self.ask(call, plan.ids)
        for choice in answer.choices:
            self.context.sampled(plan, answer.prompt_ids, choice)
        turn = Turned(plan, call, answer)
        self.turns.append(turn)
        if plan.ids is not None:
            assert answer.prompt_ids == plan.ids
            self.check(turn)
        return turn

    def check(self, turn: Turned) -> None:
        """The prompt is the parent's ids, the end of its turn where it has none, and the template's text of what is
        new, encoded as the engine encodes it."""
        plan, call = turn.plan, turn.call
        assert plan.parent is not None
        assert plan.ids is not None
        ended = plan.parent.ended()
        before = [*ended.prompt_ids, *ended.sampled_ids]
        assert plan.ids[: len(before)] == before
        covered = max(at for at, message in enumerate(call.messages) if message["role"] == "assistant") + 1
        options: dict[str, Any] = {
            "tools": call.tools,
            "keep_thinking": self.keep_thinking,
            "template_kwargs": call.options.get("chat_template_kwargs"),
        }
        past = render(call.messages[:covered], add_generation_prompt=False, **options)
        whole = render(call.messages, **options)
        assert whole.startswith(past)
        assert past.endswith("<|im_end|>\n")
        tokenizer = load_tokenizer()
        close = [] if ended.sampled_ids[-1] == tokenizer.turn_end_id else [tokenizer.turn_end_id]
        assert plan.ids[len(before) :] == close + tokenizer.encode("\n" + whole[len(past) :])


@asynccontextmanager
async def looping(
    *turns: Turn,
    known: Bridge | None = None,
    refuse_forged: bool = False,
    max_context: int | None = None,
    drift_seed: int | None = 7,
    keep_thinking: bool = True,
    engine: str = "vllm",
    **settings: Any,
) -> AsyncIterator[Loop]:
    """A loop over a scripted server that samples other ids than its texts encode to."""
    script = scenario(*turns)
    async with ScriptedInference(
        scenario=script, drift_seed=drift_seed, keep_thinking=keep_thinking, engine=engine, **settings
    ) as server:
        spec = InferenceEndpoint.model_validate({"engine": engine, "base_url": server.base_url})
        endpoint = Endpoint(spec, plugin("engines", engine)(), None, "scripted")
        await endpoint.upstream.start()
        try:
            render = EngineRenderer(endpoint)
            limits: dict[str, Any] = {"max_context": lambda: max_context, "refuse_forged": refuse_forged}
            yield Loop(endpoint, render, Suffixes(render, known, **limits), keep_thinking)
        finally:
            await endpoint.upstream.close()


def choice(message: Message, ids: Sequence[int], finish_reason: str | None = "stop", **fields: Any) -> Choice:
    return Choice(0, {"role": "assistant", **message}, list(ids), None, finish_reason, **fields)


def respelt(message: Message, *, thinking: bool = True, content: bool = True) -> Message:
    """The same turn as another harness sends it back: arguments in another spelling, the text as a list of parts."""
    changed: Message = {"cache_control": {"type": "ephemeral"}, "id": None, "role": "assistant"}
    if content:
        text = message.get("content")
        changed["content"] = [{"type": "text", "text": f"{text} \n"}] if text else text or ""
    if thinking and message.get("reasoning_content"):
        changed["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {
                "function": {
                    "arguments": json.dumps(
                        dict(reversed(json.loads(call["function"]["arguments"]).items())), indent=2
                    ).replace("e", "\\u0065", 1),
                    "name": call["function"]["name"],
                },
                "id": call["id"],
                "type": "function",
            }
            for call in message["tool_calls"]
        ]
    return changed
