"""Tools and settings of OpenAI requests, as engines take them.

Settings are let through by a list of what engines understand, not kept back by a list of what they do not. Harnesses
send fields for a vendor's own service (store, metadata, prompt_cache_key, service_tier, verbosity), new ones every
month, and an engine's own side doors (kv_transfer_params, echo) would make the answer something else than a sample of
the prompt. What is not listed is accepted and ends here, so that no field is ever refused, and the record of what was
sent to the engine holds nothing that it ignored.
"""

from __future__ import annotations

from typing import Any

from polarq_proxy.dialects.openai_shapes import MAX_TOP_LOGPROBS

SAMPLING = frozenset(
    {
        "temperature", "top_p", "max_tokens", "n", "seed", "stop", "presence_penalty", "frequency_penalty",
        "logit_bias",
        # vLLM's own, and SGLang's
        "top_k", "min_p", "min_tokens", "repetition_penalty", "length_penalty", "stop_token_ids", "bad_words",
        "ignore_eos", "include_stop_str_in_output", "no_stop_trim", "stop_regex", "allowed_token_ids",
        "use_beam_search", "best_of", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
        "thinking_token_budget", "priority", "cache_salt", "vllm_xargs", "lora_path", "custom_logit_processor",
        "return_tokens_as_token_ids",
        # forms of the answer
        "response_format", "structured_outputs", "structural_tag", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "guided_decoding_backend", "regex", "ebnf",
    }
)  # fmt: skip
"""What chat and legacy completions share."""
CHAT = SAMPLING | {
    "top_logprobs", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "documents", "mm_processor_kwargs",
    "separate_reasoning", "stream_reasoning",
}  # fmt: skip

_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
_ENGINE_EFFORTS = frozenset({"none", "low", "medium", "high"})
_CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
CUSTOM_INPUT = "input"
"""The one parameter of the function that stands for a tool with free text."""


def chat_options(body: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings, and the tools that may be called."""
    options = {key: value for key, value in body.items() if key in CHAT and value is not None}
    limit = body.get("max_completion_tokens")
    if limit is not None:
        options["max_tokens"] = limit  # the newer name of the same thing wins, as with the API
    top = options.pop("top_logprobs", None)
    if body.get("logprobs") is True and isinstance(top, int) and not isinstance(top, bool):
        options["top_logprobs"] = min(top, MAX_TOP_LOGPROBS)
    effort = options.pop("reasoning_effort", None)
    if isinstance(effort, str):
        effort = _EFFORTS.get(effort.lower(), effort.lower())
        if effort in _ENGINE_EFFORTS:
            options["reasoning_effort"] = effort
    wanted = options.pop("tool_choice", None)
    choice, tools = _choice(body.get("function_call") if wanted is None else wanted, tools)
    if choice is not None and tools:
        options["tool_choice"] = choice
    if not tools:
        options.pop("parallel_tool_calls", None)
    return options, tools


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Functions that the model can call: those given, in the form of 2023 too, and free-text tools as functions of one
    text. Tools that only a vendor's servers can run (web_search and others) are left out."""
    tools = body.get("tools")
    found = [_tool(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if not found and isinstance(body.get("functions"), list):
        found = [_function(function) for function in body["functions"] if isinstance(function, dict)]
    return [tool for tool in found if tool is not None]


def custom_names(body: dict[str, Any]) -> frozenset[str]:
    """The tools that take free text, whose calls are shown as such."""
    tools = body.get("tools")
    items = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    custom = (tool for tool in items if tool.get("type") == "custom" and not isinstance(tool.get("function"), dict))
    return frozenset(name for name in map(_named, custom) if name)


def _tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    function, custom = tool.get("function"), tool.get("custom")
    if isinstance(function, dict):
        return _function(function)
    kind = tool.get("type")
    if kind == "custom" or isinstance(custom, dict):
        return _custom(custom if isinstance(custom, dict) else tool)
    return _function(tool) if kind == "function" else None


def _function(function: dict[str, Any]) -> dict[str, Any] | None:
    """Without cache marks; what else is said of it stays, for templates show it to the model."""
    if not isinstance(function.get("name"), str) or not function["name"]:
        return None
    kept = {key: value for key, value in function.items() if key not in {"cache_control", "type"} and value is not None}
    return {"type": "function", "function": kept}


def _custom(custom: dict[str, Any]) -> dict[str, Any] | None:
    text = {"type": "string", "description": "The tool's whole input, as plain text."}
    parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
    description = custom.get("description")
    shown = {"name": custom.get("name"), "description": description if isinstance(description, str) else None}
    return _function({**shown, "parameters": parameters})


def _choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """A tool choice in the one form that engines take, and the tools it leaves; None: the model's own choice."""
    if isinstance(choice, str):
        return _CHOICES.get(choice), tools
    if not isinstance(choice, dict):
        return None, tools
    kind = choice.get("type")
    if kind == "allowed_tools":
        inner = choice["allowed_tools"] if isinstance(choice.get("allowed_tools"), dict) else choice
        allowed = inner.get("tools")
        names = {_named(item) for item in allowed if isinstance(item, dict)} if isinstance(allowed, list) else set()
        left = [tool for tool in tools if tool["function"]["name"] in names]
        return ("required" if inner.get("mode") == "required" else "auto"), left or tools
    name = _named(choice)
    if name is None:
        return (_CHOICES.get(kind) if isinstance(kind, str) else None), tools
    if any(tool["function"]["name"] == name for tool in tools):
        return {"type": "function", "function": {"name": name}}, tools
    return None, tools


def _named(tool: dict[str, Any]) -> str | None:
    """The name in any form of naming a tool."""
    inner = next((tool[key] for key in ("function", "custom") if isinstance(tool.get(key), dict)), tool)
    name = inner.get("name")
    return name if isinstance(name, str) else None
