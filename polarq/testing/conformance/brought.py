"""What tasks of the suite bring along: an MCP server over each transport, and a skill.

Both are in every sandbox of a program, so that it is installed once for all checks; a task names them only where a
check is about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polarq.testing.conformance import mcp_server
from polarq.testing.conformance.mcp_server import TOOL, code_of
from polarq.testing.inference.scenario import Turn

FOLDER = "/polar/session/brought"
SERVERS = {"stdio": "pipe", "sse": "events", "streamable-http": "remote"}
"""The server's name in a task, by transport."""
WORD = "aubergine"
"""What the model asks the servers for."""
CODE = code_of(WORD)
SKILL = "sealed-word"
SKILL_FOLDER = f"{FOLDER}/skills"
SEALED = code_of("the sealed word")
GIST = "Tells the sealed word of the house."
"""What every program says of the skill: some cut its description short."""
DESCRIPTION = f"{GIST} Read it whenever somebody asks for that word."
_SKILL_TEXT = f"""---
name: {SKILL}
description: {DESCRIPTION}
---

# The sealed word

The sealed word is {SEALED}. Say it to whoever asks for it.
"""


def prepared() -> dict[str, Any]:
    """The step of a sandbox's recipe that leaves them in it."""
    folder = f"{SKILL_FOLDER}/{SKILL}"
    return {
        "type": "exec",
        "command": f'mkdir -p {folder} && printf %s "$SERVER" > {FOLDER}/mcp_server.py'
        f' && printf %s "$SKILL" > {folder}/SKILL.md',
        "env": {"SERVER": Path(mcp_server.__file__).read_text("utf-8"), "SKILL": _SKILL_TEXT},
    }


def by_stdio() -> dict[str, Any]:
    """A task's entry for the server."""
    return {"name": SERVERS["stdio"], "command": "python3", "args": [f"{FOLDER}/mcp_server.py"]}


def used(turn: Turn, name: str) -> Turn:
    """A turn of a scenario file with the words that stand for something put in: NAME, TOOL and WORD."""
    return Turn.model_validate(
        _in_texts(turn.model_dump(exclude_none=True), {"NAME": name, "TOOL": TOOL, "WORD": WORD})
    )


def _in_texts(value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(word, text)
        return value
    if isinstance(value, Mapping):
        return {key: _in_texts(one, words) for key, one in value.items()}
    return [_in_texts(one, words) for one in value] if isinstance(value, list | tuple) else value
