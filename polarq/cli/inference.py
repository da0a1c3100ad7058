"""`polarq inference vllm` and `sglang`: the command that starts an inference server as polarq needs it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from polarq.cli.model_families import EngineName, Parsers, family_of
from polarq.cli.options import Json
from polarq.cli.outcome import ExitCode, Unusable, command
from polarq.cli.terminal import print_json
from polarq.errors import InvalidInput


class EngineKind(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, its values, and the release that brought it."""

    name: str
    values: tuple[str, ...] = ()
    since: tuple[int, ...] = ()


# vLLM's log-probabilities are those before temperature and filters, its defaults are not the model's own, ids can be
# sent in and out, and a cache hit is counted. Without the last, tool calls stay text.
_VLLM = (
    Flag("--logprobs-mode", ("raw_logprobs",)),
    Flag("--generation-config", ("vllm",)),
    Flag("--enable-prompt-tokens-details"),
    Flag("--enable-scale-out", since=(0, 30)),
    Flag("--enable-auto-tool-choice"),
)
# The same for SGLang; streams carry what is new instead of all so far, and every answer its ids.
_SGLANG = (
    Flag("--sampling-defaults", ("openai",)),
    Flag("--enable-cache-report"),
    Flag("--incremental-streaming-output"),
    Flag("--return-input-ids", since=(0, 5, 20)),
    Flag("--return-output-ids", since=(0, 5, 20)),
)
# Pause, resume and the policy version are only served in this mode, which is why the default host is loopback.
_VLLM_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
_INSTALL = {"vllm": "pip install vllm", "sglang": "pip install sglang"}
_NONE = "none"

ToolParser = Annotated[
    str | None,
    typer.Option("--tool-parser", metavar="NAME", help="The engine's tool parser, or none.", show_default=False),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        "--reasoning-parser", metavar="NAME", help="The engine's reasoning parser, or none.", show_default=False
    ),
]
Release = Annotated[
    str | None,
    typer.Option(
        "--engine-version", metavar="X.Y.Z", help="Leave out the flags of later releases.", show_default=False
    ),
]
WeightVersion = Annotated[
    str | None,
    typer.Option("--weight-version", metavar="V", help="The first policy version (SGLang).", show_default=False),
]
Execute = Annotated[
    bool, typer.Option("--exec", help="Become the server instead of printing its command.", show_default=False)
]


@command
def launch(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", metavar="M", help="Model name or folder.")],
    host: Annotated[str, typer.Option("--host", help="Where it listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Where it listens.")] = 8000,
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="GPUs for each replica.")] = 1,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    engine_version: Release = None,
    weight_version: WeightVersion = None,
    execute: Execute = False,
    as_json: Json = False,
) -> ExitCode:
    """Print (or become) the command that starts an inference server for polarq; further arguments go to it."""
    engine = EngineKind(context.info_name or "")
    parsers = _parsers(engine.value, model, tool_parser, reasoning_parser)
    arguments = _program(engine.value, model, host, port, tp)
    given = {argument.partition("=")[0] for argument in context.args if argument.startswith("--")}
    ours = [*_parser_flags(parsers), *_flags(engine.value, _release(engine_version), weight_version)]
    for flag in ours:
        calls_tools = parsers.tool is not None or "--tool-call-parser" in given
        if flag.name not in given and (calls_tools or flag.name != "--enable-auto-tool-choice"):
            arguments += [flag.name, *flag.values]
    arguments += context.args
    env = _VLLM_ENV if engine is EngineKind.VLLM else {}
    if as_json:
        print_json({"exec": arguments, "env": env})
    elif not execute:
        assigned = [f"{name}={value}" for name, value in env.items()]
        sys.stdout.write(" ".join([*assigned, shlex.join(arguments)]) + "\n")
    else:
        _become(engine.value, arguments, env)
    return ExitCode.OK


def _program(engine: EngineName, model: str, host: str, port: int, tp: int) -> list[str]:
    if engine == "vllm":
        arguments, size = ["vllm", "serve", model], "--tensor-parallel-size"
    else:
        arguments, size = ["python", "-m", "sglang.launch_server", "--model-path", model], "--tp-size"
    arguments += ["--host", host, "--port", str(port)]
    return [*arguments, size, str(tp)] if tp > 1 else arguments


def _parsers(engine: EngineName, model: str, tool: str | None, reasoning: str | None) -> Parsers:
    """The family's parsers, each replaced by what was asked for. Raises `InvalidInput` where neither is known."""
    family = family_of(model)
    known = family.parsers(engine) if family is not None else None
    missing = [flag for flag, name in (("--tool-parser", tool), ("--reasoning-parser", reasoning)) if name is None]
    if known is None and missing:
        wanted = " and ".join(f"{flag} NAME" for flag in missing)
        raise InvalidInput("--model", [f"'{model}' is of no family that polarq knows: give {wanted} (or none)"])
    chosen = known or Parsers(None, None)
    return Parsers(
        chosen.tool if tool is None else _named(tool), chosen.reasoning if reasoning is None else _named(reasoning)
    )


def _named(parser: str) -> str | None:
    return None if parser == _NONE else parser


def _parser_flags(parsers: Parsers) -> list[Flag]:
    named = {"--tool-call-parser": parsers.tool, "--reasoning-parser": parsers.reasoning}
    return [Flag(name, (parser,)) for name, parser in named.items() if parser is not None]


def _flags(engine: EngineName, release: tuple[int, ...] | None, weight_version: str | None) -> list[Flag]:
    """What else this release takes."""
    if engine == "vllm" and weight_version is not None:
        problem = 'vLLM has no such flag: POST {"new_version": ...} to its /update_weight_version once it runs'
        raise InvalidInput("--weight-version", [problem])
    flags = [flag for flag in (_VLLM if engine == "vllm" else _SGLANG) if release is None or flag.since <= release]
    return flags if weight_version is None else [*flags, Flag("--weight-version", (weight_version,))]


def _release(version: str | None) -> tuple[int, ...] | None:
    if version is None:
        return None
    if not re.match(r"\d+\.\d+\.\d+", version):
        raise InvalidInput("--engine-version", [f"'{version}' is no release such as 0.5.23"])
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _become(engine: EngineName, arguments: list[str], env: dict[str, str]) -> None:
    sys.stdout.flush()
    os.environ.update(env)
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606 - no shell is wanted
    except OSError as exc:
        raise Unusable(f"cannot start {arguments[0]}: {exc.strerror} ({_INSTALL[engine]})") from None
