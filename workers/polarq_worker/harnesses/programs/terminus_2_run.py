"""Runs Harbor's Terminus-2 in the sandbox it stands in: `python terminus_2_run.py CONFIG.json`.

It is carried into the sandbox and run by Harbor's own Python. The configuration names the file of the instruction, the
folder of the logs and the arguments of the agent. Harbor's agent asks an environment to run commands somewhere; here
that is this machine. Leaves `result.json` beside the logs; exits with 1 when the agent raised.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Here:
    """What Terminus-2 asks of Harbor's environment: to run commands as whoever runs this."""

    default_user = None

    def __init__(self, logs: Path) -> None:
        self.trial_paths = SimpleNamespace(agent_dir=logs)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        from harbor.environments.base import ExecResult

        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            process.kill()
            raise
        return ExecResult(
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            return_code=-1 if process.returncode is None else process.returncode,
        )

    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return Path(path).is_dir()


async def run(config: dict[str, Any]) -> None:
    from harbor.agents.terminus_2.terminus_2 import Terminus2
    from harbor.models.agent.context import AgentContext
    from harbor.models.task.config import MCPServerConfig

    logs = Path(config["logs"])
    logs.mkdir(parents=True, exist_ok=True)
    # One tmux server for this run, at a path that is short enough for a socket. It is not stopped: what the agent has
    # left running in it may be graded.
    os.environ["TMUX_TMPDIR"] = tempfile.mkdtemp(prefix="tmux-")
    given = config["agent"]
    given["mcp_servers"] = [MCPServerConfig(**server) for server in given.get("mcp_servers", [])]
    agent = Terminus2(logs_dir=logs, **given)
    context = AgentContext()
    here: Any = Here(logs)
    error = None
    try:
        await agent.setup(here)
        await agent.run(Path(config["instruction"]).read_bytes().decode(), here, context)
    except Exception as exc:
        error = " ".join(f"{type(exc).__name__}: {exc}".split())
        raise
    finally:
        result = {
            "input_tokens": context.n_input_tokens,
            "output_tokens": context.n_output_tokens,
            "turns": (context.metadata or {}).get("n_episodes"),
            "summaries": (context.metadata or {}).get("summarization_count"),
            # Its loop ends where the model has said twice that it is done, or at the limit of turns.
            "complete": getattr(agent, "_pending_completion", None),
            "error": error,
        }
        (logs / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(run(json.loads(Path(sys.argv[1]).read_text("utf-8"))))
