"""An agent in LangGraph: a model and a shell, in turn. The harness `langchain` calls `solve` with the task's model."""

import subprocess
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def bash(command: str) -> str:
    """Run a command with bash. Returns what it printed."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    return f"{done.stdout}{done.stderr}"[-10_000:] + f"\nexit code {done.returncode}"


def solve(instruction: str, model: BaseChatModel) -> str:
    thinker = model.bind_tools([bash])

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [thinker.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([bash]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    done = graph.compile().invoke({"messages": [("user", instruction)]}, {"recursion_limit": 200})
    return str(done["messages"][-1].text)
