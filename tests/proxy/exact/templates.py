"""Chat templates of the kinds that models have, over the scripted server's tokenizer, as renderers without a server.

Its three control tokens play every part: <|im_start|> opens, <|im_end|> closes, <|endoftext|> is the other end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polarq.testing.inference import load_tokenizer
from polarq.testing.inference.rendering import _with_parsed_arguments, to_json
from polarq_proxy.call import ModelCall
from polarq_proxy.exact.base import CannotContinue, Missed
from polarq_proxy.exact.context import ExactContext, Plan
from polarq_proxy.exact.suffix import Suffixes

from .loop import Message, choice

_CALLS = "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"

STRIPS_BEFORE_LAST_USER = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}" + _CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Thinking only after the last user's message, an empty block in the very last turn; results of one turn together
(as Qwen3)."""

NEXT_OPENER_ENDS = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}" + _CALLS + "{{ '' }}"
    "{% elif m.role == 'tool' %}<tool_response>\n{{ m.content }}"
    "{% else %}<|im_end|>{{ m.role }}\n{{ m.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""No turn is closed: the next opener ends it, and is what the model samples last (as GLM)."""

CLOSES_TIGHTLY = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>model\n{{ m.content or '' }}" + _CALLS + "<|endoftext|>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
"""Nothing between a close and the next opener (as Llama 3, DeepSeek)."""

CALLS_CLOSE_OTHERWISE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + _CALLS
    + "{{ '<|endoftext|>' if m.tool_calls else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A turn with tool calls ends otherwise than one without (as gpt-oss)."""

SYSTEM_IN_LAST_USER = (
    "{% set ns = namespace(last=-1, text='') %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'system' %}{% set ns.text = m.content %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|im_start|>{{ ns.text + '\n\n' if loop.index0 == ns.last }}{{ m.content }}<|im_end|>"
    "{% elif m.role == 'tool' %}<tool_response>{{ m.content }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}<|endoftext|>{% endif %}"
    "{% endfor %}"
)
"""The system's text moves along with the last user's message (as Mistral)."""

LAST_CLOSE_DIFFERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
"""The last turn of an answer ends otherwise than earlier ones (as gpt-oss)."""

COUNTS_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ loop.index }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What it writes depends on how many turns there were."""

NAMES_THE_TOOL = (
    "{% set ns = namespace(name='?') %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% for before in messages %}{% for call in before.tool_calls or [] %}"
    "{% if call.id == m.tool_call_id %}{% set ns.name = call.function.name %}{% endif %}"
    "{% endfor %}{% endfor %}"
    "<|im_start|>tool {{ ns.name }} {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}"
    " by {{ call.function.name }} as {{ call.id }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Looks up which tool a result is of, and writes call ids (as Kimi, Gemma)."""

TOOLS_BEFORE_LAST_USER = (
    "{% for m in messages %}"
    "{% if loop.last and tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The list of tools stands before the last message."""


class TemplateRenderer:
    """One template; counts nothing and remembers nothing."""

    name = "local"

    def __init__(self, template: str) -> None:
        environment = ImmutableSandboxedEnvironment()
        environment.filters["tojson"] = to_json
        self._template = environment.from_string(template)

    async def ids(self, call: ModelCall, *, generation_prompt: bool = True) -> list[int]:
        if isinstance(call.prompt, str):
            return load_tokenizer().encode(call.prompt)
        values: dict[str, Any] = {
            **(call.options.get("chat_template_kwargs") or {}),
            "messages": [_with_parsed_arguments(message) for message in call.messages],
            "tools": call.tools,
            "add_generation_prompt": generation_prompt,
        }
        try:
            return load_tokenizer().encode(self._template.render(values))
        except TemplateError as exc:
            raise CannotContinue(Missed.NOT_RENDERED, str(exc)) from exc


class Session:
    """Turns without a server: the test says what is sampled."""

    def __init__(self, template: str, **settings: Any) -> None:
        self.render = TemplateRenderer(template)
        self.suffixes = Suffixes(self.render, **settings)
        self.context = ExactContext()
        self.ids: list[int] = []
        """Prompt and sample of the last turn."""

    async def plan(self, messages: Sequence[Message], tools: list[Message] | None = None, **options: Any) -> Plan:
        return await self.context.prompt(ModelCall(list(messages), tools, options, ""), self.suffixes)

    async def sample(
        self,
        messages: Sequence[Message],
        answer: Message,
        text: str,
        tools: list[Message] | None = None,
        finish_reason: str = "stop",
        **options: Any,
    ) -> Plan:
        """A turn that samples `text`, control tokens included, which parses to `answer`."""
        plan = await self.plan(messages, tools, **options)
        assert plan.call is not None
        prompt = plan.ids or await self.render.ids(plan.call)
        sampled = load_tokenizer().encode_drifted(text, 3)
        self.context.sampled(plan, prompt, choice(answer, sampled, finish_reason))
        self.ids = [*prompt, *sampled]
        return plan

    def added(self, plan: Plan) -> str:
        """What a plan puts after the last turn, as text."""
        assert plan.ids is not None, plan.detail
        assert plan.ids[: len(self.ids)] == self.ids
        return load_tokenizer().decode(plan.ids[len(self.ids) :])
