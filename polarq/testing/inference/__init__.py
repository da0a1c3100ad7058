"""A scripted inference server: a real HTTP server with vLLM's token-level JSON and no model behind it.

It renders prompts with a real chat template, encodes them with a real BPE tokenizer, and samples what a scenario's
script says: ids with log-probabilities that a test can recompute. So a whole rollout runs without a GPU.

In a test:   `async with ScriptedInference(scenario="calculator") as inference: ...`
As a program: `python -m polarq.testing.inference --scenario calculator --served-model-name demo`

Which script answers which request is told in `polarq.testing.inference.selection`. Needs `polarq[demo]`.
The names below are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarq.testing.inference.app import build_app as build_app
    from polarq.testing.inference.calls import CallLedger as CallLedger
    from polarq.testing.inference.calls import SampledCall as SampledCall
    from polarq.testing.inference.options import ServerOptions as ServerOptions
    from polarq.testing.inference.sampling import expected_logprob as expected_logprob
    from polarq.testing.inference.sampling import expected_logprobs as expected_logprobs
    from polarq.testing.inference.scenario import Scenario as Scenario
    from polarq.testing.inference.scenario import Script as Script
    from polarq.testing.inference.scenario import ToolCall as ToolCall
    from polarq.testing.inference.scenario import Turn as Turn
    from polarq.testing.inference.scenario import load_scenario as load_scenario
    from polarq.testing.inference.server import ScriptedInference as ScriptedInference
    from polarq.testing.inference.tokenizer import load_tokenizer as load_tokenizer

_HOMES = {
    "build_app": "app",
    "CallLedger": "calls",
    "SampledCall": "calls",
    "ServerOptions": "options",
    "expected_logprob": "sampling",
    "expected_logprobs": "sampling",
    "Scenario": "scenario",
    "Script": "scenario",
    "ToolCall": "scenario",
    "Turn": "scenario",
    "load_scenario": "scenario",
    "ScriptedInference": "server",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
