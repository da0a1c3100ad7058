"""One task with the OpenHands SDK: a program of its own, carried into the sandbox and run by that SDK's Python.

    python openhands_sdk_run.py settings.json

The file says what `harnesses.openhands_sdk` writes into it; the key is OPENAI_API_KEY. Exit code 0: the agent ended by
itself (finished, stuck, or at its limit of steps); 1: the model or the SDK failed; 2: the settings are not the SDK's.
Whatever happens, `result` (a path in the settings) says how it ended, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, Agent, AgentContext, Conversation, __version__
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.skills import load_skills_from_dir
from openhands.tools.preset.default import get_default_tools

ENDED = {"finished", "stuck"}
LIMIT = "MaxIterationsReached"


def main(path: str) -> int:
    wanted: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
    # The SDK itself passes over what it does not know.
    unknown = sorted(set(wanted["llm"]) - set(LLM.model_fields))
    if unknown:
        sys.stderr.write(f"settings.llm: this OpenHands SDK ({__version__}) has no {', '.join(unknown)}\n")
        return 2
    conversation = _conversation(wanted)
    try:
        conversation.send_message(Path(wanted["instruction"]).read_bytes().decode())
        conversation.run()
    except Exception as exc:
        cause = getattr(exc, "original_exception", exc)
        sys.stderr.write(f"{type(cause).__name__}: {' '.join(str(cause).split())}\n")
        return _ended(conversation, wanted["result"], failed=True)
    finally:
        conversation.close()
    return _ended(conversation, wanted["result"], failed=False)


def _conversation(wanted: dict[str, Any]) -> Any:
    llm = LLM(api_key=os.environ["OPENAI_API_KEY"], usage_id="agent", **wanted["llm"])
    condenser = None
    if wanted["condense_after"] is not None:
        own = llm.model_copy(update={"usage_id": "condenser"})
        condenser = LLMSummarizingCondenser(llm=own, max_size=wanted["condense_after"], keep_first=2)
    skills = (
        [skill for kind in load_skills_from_dir(wanted["skills"]) for skill in kind.values()]
        if wanted["skills"]
        else []
    )
    agent = Agent(
        llm=llm,
        tools=get_default_tools(enable_browser=False),
        mcp_config=wanted["mcp_servers"],
        condenser=condenser,
        agent_context=AgentContext(skills=skills, load_project_skills=wanted["project_skills"]),
        system_prompt_kwargs={"cli_mode": True},
    )
    # A model call is streamed only if somebody listens.
    listening = {"token_callbacks": [lambda chunk: None]} if llm.stream else {}
    return Conversation(
        agent=agent,
        workspace=str(Path.cwd()),
        persistence_dir=wanted["conversations"],
        max_iteration_per_run=wanted["max_iterations"],
        visualizer=None,
        delete_on_close=False,
        **listening,
    )


def _ended(conversation: Any, result: str, *, failed: bool) -> int:
    state = conversation.state
    errors = [event for event in state.events if isinstance(event, ConversationErrorEvent)]
    status, error = state.execution_status.value, errors[-1].code if errors else None
    text = json.dumps({"sdk_version": __version__, "exit_status": LIMIT if error == LIMIT else status, "error": error})
    Path(result).write_text(text, "utf-8")
    return int(failed or not (status in ENDED or error == LIMIT))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
