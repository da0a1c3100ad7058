"""Whether a file of chat-format data is one that a trainer can take, and what is in it.

    python -m examples.offline_sft.check chat.jsonl

Each line is a conversation: roles that there are, calls of tools with JSON arguments, each answered by one message, and
something that the policy said itself. Ends with 1, and one line for each that is not.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Json, ValidationError, model_validator


class Function(BaseModel):
    name: str
    arguments: Json[dict[str, Any]]


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: Function


class Message(BaseModel):
    """As chat APIs take it, with the `weight` of fine-tuning files."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    weight: Literal[0, 1] = 1

    @property
    def learned(self) -> bool:
        return self.role == "assistant" and self.weight == 1


class Conversation(BaseModel):
    messages: list[Message]
    group: str
    rollout_id: str
    reward: float | None

    @model_validator(mode="after")
    def _can_be_learned_from(self) -> Self:
        open_calls: set[str] = set()
        for number, message in enumerate(self.messages):
            if message.role == "tool":
                if message.tool_call_id not in open_calls:
                    raise ValueError(f"message {number} answers no call")
                open_calls.remove(message.tool_call_id)
            elif open_calls:
                raise ValueError(f"message {number} comes before an answer to {', '.join(sorted(open_calls))}")
            open_calls |= {call.id for call in message.tool_calls}
        if not any(message.learned for message in self.messages):
            raise ValueError("has nothing that the policy said itself")
        return self


def main(path: Path) -> int:
    conversations, broken = [], 0
    try:
        lines = path.read_text("utf-8").split("\n")  # texts of JSON hold what splitlines takes for an end of line
    except OSError as exc:
        raise SystemExit(f"{path} cannot be read: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise SystemExit(f"{path} cannot be read as text in UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            conversations.append(Conversation.model_validate(json.loads(line)))
        except ValidationError as exc:
            first = exc.errors()[0]
            where = ".".join(map(str, first["loc"]))
            print(f"line {number}: {f'{where}: ' if where else ''}{first['msg']}", file=sys.stderr)
            broken += 1
        except ValueError:
            print(f"line {number}: is not JSON", file=sys.stderr)
            broken += 1
    groups = Counter(one.group for one in conversations)
    learned = sum(message.learned for one in conversations for message in one.messages)
    print(
        f"{len(conversations)} conversations of {len(groups)} tasks, {learned} answers to learn from, {broken} broken"
    )
    for group, count in sorted(groups.items()):
        print(f"  {count} of {group}")
    return int(broken > 0 or not conversations)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name the file: python -m examples.offline_sft.check chat.jsonl")
    raise SystemExit(main(Path(sys.argv[1])))
