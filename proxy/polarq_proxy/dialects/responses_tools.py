"""Tools of the Responses API: offered to the model as plain functions, called back in the form they were given in.

Chat templates know functions only. So a `namespace` is offered as its members, a `custom` (freeform) tool as a function
with one string argument `input`, and the local shell as a function that takes a command. What runs on the vendor's
servers (web search, file search, code interpreter, ...) and what needs them (tool search) is not offered: there is
nobody to run it. `strict` is not passed on: a grammar would change what the policy samples, and harnesses set it as
a matter of course; the answer still echoes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import NotJson, decode

CUSTOM_ARGUMENT = "input"

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}


class ToolKind(StrEnum):
    """In which form a call goes back."""

    FUNCTION = "function"
    CUSTOM = "custom"
    LOCAL_SHELL = "local_shell"


@dataclass(frozen=True, slots=True)
class NativeTool:
    """A tool as the harness knows it."""

    kind: ToolKind
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class Toolbox:
    """The tools of one request. Names in prompts differ from native ones only where two tools share one."""

    offered: list[dict[str, Any]] = field(default_factory=list)
    """In chat form."""
    _native: dict[str, NativeTool] = field(default_factory=dict)
    _prompt: dict[NativeTool, str] = field(default_factory=dict)

    def add(self, native: NativeTool, prompt_name: str, function: dict[str, Any]) -> None:
        self.offered.append({"type": "function", "function": {"name": prompt_name, **function}})
        self._native[prompt_name] = native
        self._prompt[native] = prompt_name

    def native(self, prompt_name: str) -> NativeTool:
        """The tool that the model means; a name that nobody offered is a function the harness will refuse."""
        return self._native.get(prompt_name) or NativeTool(ToolKind.FUNCTION, prompt_name)

    def prompt_name(self, kind: ToolKind, name: str, namespace: str | None) -> str:
        """What the model called it. Histories outlive their tools: without one the native name stands."""
        return self._prompt.get(NativeTool(kind, name, namespace), name)

    def named(self, choice: dict[str, Any]) -> str | None:
        """The prompt name of the tool that a choice names; None when it is not offered."""
        nested = choice.get("function")
        name = nested.get("name") if isinstance(nested, dict) else choice.get("name")
        if choice.get("type") == ToolKind.LOCAL_SHELL:
            name = str(ToolKind.LOCAL_SHELL)
        wanted = (name, choice.get("namespace"))
        exact = (prompt for native, prompt in self._prompt.items() if (native.name, native.namespace) == wanted)
        members = (prompt for native, prompt in self._prompt.items() if native.name == name)
        return next(exact, None) or next(members, None)

    def restrict(self, names: set[str]) -> None:
        self.offered = [tool for tool in self.offered if tool["function"]["name"] in names]


def toolbox_of(tools: Any) -> Toolbox:
    """Reads `tools`. Raises `CallFault` for what is no list of tools."""
    if tools is None:
        return Toolbox()
    if not isinstance(tools, list):
        raise CallFault(FaultKind.BAD_REQUEST, "'tools' must be a list of objects", param="tools")
    found = list(_tools(tools, "tools", None))
    counts = Counter(native.name for native, _ in found)
    toolbox, taken = Toolbox(), set[str]()
    for native, function in found:
        name = native.name
        if native.namespace is not None and counts[name] > 1:
            name = f"{native.namespace.removesuffix('__')}__{name}"
        while name in taken:
            name += "_"
        taken.add(name)
        toolbox.add(native, name, function)
    return toolbox


def tool_choice_of(choice: Any, toolbox: Toolbox) -> Any:
    """`tool_choice` in chat form, None when the engine's default will do. May restrict what is offered."""
    if isinstance(choice, str):
        if choice not in {"auto", "none", "required"}:
            raise _bad_choice(f"'tool_choice' must be auto, none, required or an object, not '{choice[:100]}'")
        return choice
    if not isinstance(choice, dict):
        if choice is not None:
            raise _bad_choice("'tool_choice' must be a word or an object")
        return None
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        wanted = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        toolbox.restrict({name for item in wanted if (name := toolbox.named(item)) is not None})
        return "required" if choice.get("mode") == "required" else "auto"
    if choice.get("type") in tuple(ToolKind):
        name = toolbox.named(choice)
        if name is None:
            raise _bad_choice("'tool_choice' names a tool that is not in 'tools'")
        return {"type": "function", "function": {"name": name}}
    return "auto"  # a tool of the vendor's servers, which nobody can be made to call here


def custom_input(arguments: str) -> str | None:
    """The text that the model gave to a custom tool; None when its arguments do not hold one."""
    tree = _object(arguments)
    text = tree.get(CUSTOM_ARGUMENT) if tree is not None else None
    return text if isinstance(text, str) else None


def shell_action(arguments: str) -> dict[str, Any] | None:
    """The action of a local shell call; None when the arguments hold no command."""
    tree = _object(arguments)
    command = tree.get("command") if tree is not None else None
    if tree is None or not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return None
    return {"type": "exec", "env": {}, **tree}


def _object(text: str) -> dict[str, Any] | None:
    try:
        tree = decode(text.encode())
    except NotJson:
        return None
    return tree if isinstance(tree, dict) else None


def _tools(tools: list[Any], where: str, namespace: str | None) -> Iterator[tuple[NativeTool, dict[str, Any]]]:
    for place, tool in enumerate(tools):
        here = f"{where}[{place}]"
        if not isinstance(tool, dict):
            raise CallFault(FaultKind.BAD_REQUEST, f"{here} must be an object", param=here)
        kind, nested = tool.get("type", "function"), tool.get("function")
        if kind == "namespace":
            if namespace is None and isinstance(tool.get("tools"), list):
                yield from _tools(tool["tools"], f"{here}.tools", _named(tool, here))
        elif kind == "function":
            given = nested if isinstance(nested, dict) else tool
            parameters = given.get("parameters")
            parameters = parameters if isinstance(parameters, dict) and parameters else _NO_PARAMETERS
            yield NativeTool(ToolKind.FUNCTION, _named(given, here), namespace), _function(given, parameters)
        elif kind == "custom":
            yield NativeTool(ToolKind.CUSTOM, _named(tool, here), namespace), _function(tool, _freeform(tool))
        elif kind == "local_shell":
            told = {"description": "Runs a command in the local shell and returns its output."}
            yield NativeTool(ToolKind.LOCAL_SHELL, "local_shell"), _function(told, _SHELL_PARAMETERS)


def _named(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise CallFault(FaultKind.BAD_REQUEST, f"{where} needs a name", param=f"{where}.name")
    return name


def _function(tool: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    description = tool.get("description")
    told = {"description": description} if isinstance(description, str) and description else {}
    return {**told, "parameters": parameters}


def _freeform(tool: dict[str, Any]) -> dict[str, Any]:
    text = "The tool's whole input, as plain text."
    form = tool.get("format")
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        text += f" It follows this {form.get('syntax') or 'context-free'} grammar:\n{form['definition']}"
    return {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: {"type": "string", "description": text}},
        "required": [CUSTOM_ARGUMENT],
    }


def _bad_choice(text: str) -> CallFault:
    return CallFault(FaultKind.BAD_REQUEST, text, param="tool_choice")
