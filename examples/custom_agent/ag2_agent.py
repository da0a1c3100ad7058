"""An agent in AG2: a model and a shell, in turn. The harness `ag2` calls `solve` with the task's model."""

import asyncio

from ag2 import Agent, tool
from ag2.config import ModelConfig


@tool
async def bash(command: str) -> str:
    """Run a command with bash. Returns what it printed."""
    running = await asyncio.create_subprocess_exec(
        "bash", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed, _ = await running.communicate()
    return printed.decode(errors="replace")[-10_000:] + f"\nexit code {running.returncode}"


async def solve(instruction: str, model: ModelConfig) -> str | None:
    agent = Agent("coder", "You work in a shell until the task is done.", config=model, tools=[bash])
    reply = await agent.ask(instruction)
    return reply.body
