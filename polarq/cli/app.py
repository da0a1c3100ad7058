"""The parser: every command is registered here; each is a file of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import polarq
from polarq.cli.acknowledge import acknowledge
from polarq.cli.artifacts import artifacts
from polarq.cli.cancel import cancel
from polarq.cli.capacity import capacity
from polarq.cli.config import config
from polarq.cli.demo import demo
from polarq.cli.doctor import doctor
from polarq.cli.drain import drain
from polarq.cli.export import export
from polarq.cli.harness import harness
from polarq.cli.imports import import_files
from polarq.cli.inference import launch
from polarq.cli.limits import limits
from polarq.cli.model_calls import pause as pause_calls
from polarq.cli.model_calls import resume as resume_calls
from polarq.cli.model_calls import status as calls_status
from polarq.cli.nodes import nodes
from polarq.cli.pause import pause, resume
from polarq.cli.policy import policy
from polarq.cli.proxy import proxy
from polarq.cli.rebuild import rebuild
from polarq.cli.runs import runs
from polarq.cli.serve import serve
from polarq.cli.show import show
from polarq.cli.status import status
from polarq.cli.submit import submit
from polarq.cli.tail import tail
from polarq.cli.worker import worker

FIRST, TASKS, RESULTS, FLEET, PROCESSES = "First steps", "Tasks", "Results", "Fleet", "Processes"

EXIT_CODES = (
    "Exit codes: 0 all rollouts completed; 1 some failed or timed out; 2 bad input; 3 Redis or the shim does not "
    "answer; 4 cancelled; 5 not ended yet; 75 the queue is full; 124 the wait was over; 130 Ctrl-C; 141 closed pipe."
)

app = typer.Typer(
    name="polarq",
    help="Turns any agent program into a reinforcement-learning environment, as a job system.",
    epilog=EXIT_CODES,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What exec hands on is for Celery, the proxy and the inference server to understand.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

inference = typer.Typer(help="Start an inference server for polarq; hold model calls back.", no_args_is_help=False)
inference.command("vllm", context_settings=_PASSED_ON)(launch)
inference.command("sglang", context_settings=_PASSED_ON)(launch)
inference.command("pause")(pause_calls)
inference.command("resume")(resume_calls)
inference.command("status")(calls_status)

app.command("demo", rich_help_panel=FIRST)(demo)
app.command("doctor", rich_help_panel=FIRST)(doctor)
app.add_typer(config, name="config", rich_help_panel=FIRST)
app.add_typer(harness, name="harness", rich_help_panel=FIRST)
app.command("submit", rich_help_panel=TASKS)(submit)
app.command("show", rich_help_panel=TASKS)(show)
app.command("tail", rich_help_panel=TASKS)(tail)
app.command("artifacts", rich_help_panel=TASKS)(artifacts)
app.command("cancel", rich_help_panel=TASKS)(cancel)
app.command("acknowledge", rich_help_panel=TASKS)(acknowledge)
app.command("export", rich_help_panel=RESULTS)(export)
app.command("import", rich_help_panel=RESULTS)(import_files)
app.command("rebuild", rich_help_panel=RESULTS)(rebuild)
app.command("status", rich_help_panel=FLEET)(status)
app.command("nodes", rich_help_panel=FLEET)(nodes)
app.command("runs", rich_help_panel=FLEET)(runs)
app.command("drain", rich_help_panel=FLEET)(drain)
app.command("pause", rich_help_panel=FLEET)(pause)
app.command("resume", rich_help_panel=FLEET)(resume)
app.command("capacity", rich_help_panel=FLEET)(capacity)
app.add_typer(limits, name="limits", rich_help_panel=FLEET)
app.command("policy", rich_help_panel=FLEET)(policy)
app.command("worker", rich_help_panel=PROCESSES, context_settings=_PASSED_ON)(worker)
app.command("proxy", rich_help_panel=PROCESSES, context_settings=_PASSED_ON)(proxy)
app.command("serve", rich_help_panel=PROCESSES)(serve)
app.add_typer(inference, name="inference", rich_help_panel=FLEET)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"polarq {polarq.__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The parser's own family of errors. Its public name differs between releases of typer."""
