"""Tools of a Messages request, as chat-completions functions."""

from __future__ import annotations

from typing import Any

from polarq_proxy.dialects.messages_arguments import as_json

_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}


def _object(required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


# Tools whose schema the API knows by their type, and which the harness itself runs: (type's beginning, what they do,
# their input). Types beyond these run on the vendor's side and have no meaning for another model.
_CLIENT_TOOLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "bash_",
        "Runs a command in a shell that stays open between calls; restart gives a new one.",
        _object((), command=_TEXT, restart={"type": "boolean"}),
    ),
    (
        "text_editor_",
        "Views and changes text files.",
        _object(
            ("command", "path"),
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
            path=_TEXT,
            file_text=_TEXT,
            old_str=_TEXT,
            new_str=_TEXT,
            insert_line=_WHOLE,
            insert_text=_TEXT,
            view_range={"type": "array", "items": _WHOLE},
        ),
    ),
    (
        "memory_",
        "Keeps notes in files that outlive this conversation.",
        _object(
            ("command",),
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            path=_TEXT,
            file_text=_TEXT,
            old_str=_TEXT,
            new_str=_TEXT,
            insert_line=_WHOLE,
            insert_text=_TEXT,
            old_path=_TEXT,
            new_path=_TEXT,
            view_range={"type": "array", "items": _WHOLE},
        ),
    ),
    (
        "computer_",
        "Acts on a screen with mouse and keyboard, and takes screenshots.",
        _object(
            ("action",),
            action=_TEXT,
            coordinate={"type": "array", "items": _WHOLE},
            start_coordinate={"type": "array", "items": _WHOLE},
            text=_TEXT,
            duration={"type": "number"},
            scroll_direction={"type": "string", "enum": ["up", "down", "left", "right"]},
            scroll_amount=_WHOLE,
        ),
    ),
)


def functions(tools: Any) -> list[dict[str, Any]] | None:
    """The tools that the model is offered; None: none. What it cannot have is left out, never refused.

    Deferred tools are offered at once: harnesses send the definition of one when it was looked up, and a list of
    tools that changes later would change the beginning of every prompt.
    """
    found = [function for function in map(_function, tools if isinstance(tools, list) else ()) if function is not None]
    return found or None


def choice(value: Any, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """`tool_choice` as options for the engine. A tool that was left out cannot be asked for."""
    if not isinstance(value, dict) or tools is None:
        return {}
    options: dict[str, Any] = {"parallel_tool_calls": False} if value.get("disable_parallel_tool_use") is True else {}
    kind, name = value.get("type"), value.get("name")
    if kind == "tool":
        if any(tool["function"]["name"] == name for tool in tools):
            options["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        options["tool_choice"] = _CHOICES[kind]
    return options


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _function(tool: Any) -> dict[str, Any] | None:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
        return None
    kind, schema, about = tool.get("type"), tool.get("input_schema"), tool.get("description")
    if not isinstance(schema, dict):
        if kind is None or kind == "custom":
            schema = {"type": "object", "properties": {}}
        else:
            known = next((entry for entry in _CLIENT_TOOLS if str(kind).startswith(entry[0])), None)
            if known is None:
                return None
            about, schema = about or _with_screen(known[1], tool), known[2]
    function: dict[str, Any] = {"name": tool["name"], "parameters": schema}
    if isinstance(about, str) and about:
        function["description"] = about
    return {"type": "function", "function": function}


def _with_screen(about: str, tool: dict[str, Any]) -> str:
    width, height = tool.get("display_width_px"), tool.get("display_height_px")
    return about if width is None else f"{about} The screen has {as_json(width)} x {as_json(height)} pixels."
