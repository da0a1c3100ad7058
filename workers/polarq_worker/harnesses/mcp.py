"""The MCP servers of a task, as agent programs have them in their configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polarq.contracts.specs import McpServerSpec

_NOT_OF_A_TOOL = re.compile(r"[^A-Za-z0-9_]")


def mcp_entry(server: McpServerSpec) -> dict[str, Any]:
    """An MCP server as most programs' JSON has it: command and args, or type (`sse`, `http`) and url."""
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args)}
    return {"type": "sse" if server.transport == "sse" else "http", "url": server.url}


def literal(server: McpServerSpec, escaped: Callable[[str], str]) -> McpServerSpec:
    """The server with each of its texts as it has to be written for the program to read what the task says."""
    texts = {
        key: None if text is None else escaped(text) for key, text in (("command", server.command), ("url", server.url))
    }
    return server.model_copy(update={**texts, "args": [escaped(word) for word in server.args]})


def without_braced_variables(text: str) -> str:
    """A text in which a program that knows `${NAME:-default}` puts no variable in: of one that it does not find it
    takes the default, here a dollar sign."""
    return text.replace("${", "${POLARQ_DOLLAR:-$}{")


def misnamed(servers: Sequence[McpServerSpec], taken: str, title: str) -> Iterator[str]:
    """What is wrong with the names of servers for a program that takes those of the pattern `taken`, a line each."""
    known: dict[str, str] = {}
    for server in servers:
        if not re.fullmatch(taken, server.name):
            text = f"mcp_servers: {title} takes no server called '{server.name}'"
            yield f"{text}; name it with letters, digits, '_' and '-'"
        # Of the name of a tool, whose server's is in front, programs leave these characters.
        alike = _NOT_OF_A_TOOL.sub("_", server.name)
        if alike in known:
            yield f"mcp_servers: the tools of '{known[alike]}' and '{server.name}' would be called alike ({alike})"
        known.setdefault(alike, server.name)
