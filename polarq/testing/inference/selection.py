"""Which script and which turn of it answers a request.

The turn is the number of assistant messages in the request: no memory of earlier requests is involved, so a retry
gets the same answer again. The script is chosen by the first rule that matches:

1. the model name's suffix, `MODEL:SCRIPT`;
2. a marker `[script: NAME]` in the text of a message that is not the assistant's;
3. the conversation's place. A conversation is known by its session id (header `X-Session-ID` or
   `X-Polarq-Rollout`, or `session_id` in the body), else by a digest of its first two messages.
   A session id that ends in `.N` (rollout ids are `<task_id>.<index>`) takes script N modulo the number of scripts,
   whichever arrives first and however often the server is restarted; any other conversation takes the next
   script at first sight and keeps it.

Choice i of a request with n > 1 takes the script i places further on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polarq.errors import PolarqError
from polarq.testing.inference.faults import Fault
from polarq.testing.inference.scenario import Scenario, Script, Turn

SESSION_HEADERS = ("X-Session-ID", "X-Polarq-Rollout")
_MARKER = re.compile(r"\[script:\s*([A-Za-z0-9_-]+)\s*\]")
_INDEX = re.compile(r"\.(\d{1,9})$")


class NoSuchScript(PolarqError):
    """The request asks for a script that the scenario does not have."""


@dataclass(frozen=True)
class Selected:
    """One turn to be said, and whose it is."""

    conversation: str
    script: Script
    turn_index: int
    forced: str | None = None
    """What a grammar makes the model say in place of the turn's text."""

    @property
    def turn(self) -> Turn:
        return self.script.turn(self.turn_index)

    def text(self, *, thinking: bool) -> str:
        return self.turn.text(thinking=thinking) if self.forced is None else self.forced

    def saying(self, forced: str) -> Selected:
        return replace(self, forced=forced)


@dataclass
class Selector:
    """Chooses scripts for one scenario; remembers only which conversations it has seen, and used-up faults."""

    scenario: Scenario
    _seen: dict[str, int] = field(default_factory=dict)
    _faults: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def select(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        suffix: str | None = None,
        session_id: str | None = None,
        choice: int = 0,
    ) -> Selected:
        """The turn for a chat request. `suffix` is the part of the model's name after the colon.

        Raises `NoSuchScript`.
        """
        turn_index = sum(1 for message in messages if message.get("role") == "assistant")
        conversation = session_id or _digest(messages[:2])
        named = suffix or _marker(messages)
        place = self._place_of_name(named) if named else self._place(conversation, session_id)
        scripts = self.scenario.scripts
        return Selected(conversation, scripts[(place + choice) % len(scripts)], turn_index)

    def select_for_prompt(self, prompt: str, turn_index: int, **how: Any) -> Selected:
        """The turn for a completion request, whose prompt is text or ids and holds `turn_index` earlier answers."""
        selected = self.select([{"role": "user", "content": prompt}], **how)
        return Selected(selected.conversation, selected.script, turn_index)

    def _place_of_name(self, name: str) -> int:
        names = self.scenario.script_names
        if name not in names:
            raise NoSuchScript(f"scenario '{self.scenario.name}' has no script '{name}'; it has {', '.join(names)}")
        return names.index(name)

    def _place(self, conversation: str, session_id: str | None) -> int:
        index = _INDEX.search(session_id or "")
        if index:
            return int(index[1])
        return self._seen.setdefault(conversation, len(self._seen))

    def fault(self, selected: Selected) -> Fault | None:
        """The fault that this request meets, counting it when the fault happens only so many times."""
        fault = selected.turn.fault or selected.script.fault or self.scenario.fault
        if fault is None or fault.times is None:
            return fault
        key = (selected.conversation, selected.script.name, selected.turn_index)
        used = self._faults.get(key, 0)
        if used >= fault.times:
            return None
        self._faults[key] = used + 1
        return fault


def session_of(headers: Mapping[str, str], body_session_id: str | None) -> str | None:
    """The request's session id, or None."""
    for name in SESSION_HEADERS:
        if value := headers.get(name):
            return value
    return body_session_id or None


def _marker(messages: Sequence[Mapping[str, Any]]) -> str | None:
    for message in messages:
        if message.get("role") != "assistant" and (found := _MARKER.search(_text(message.get("content")))):
            return found[1]
    return None


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return ""


def _digest(messages: Sequence[Mapping[str, Any]]) -> str:
    text = json.dumps([[message.get("role"), message.get("content")] for message in messages], sort_keys=True)
    return "messages-" + hashlib.sha256(text.encode()).hexdigest()[:24]
