"""The scripted inference server as a program:

    python -m polarq.testing.inference --scenario calculator --served-model-name demo --port 8000

Prints one line with its URL when it listens; stops on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from polarq.errors import PolarqError

try:
    from polarq.testing.inference.options import NEWEST, ServerOptions
    from polarq.testing.inference.scenario import built_in_scenarios, load_scenario
    from polarq.testing.inference.server import ScriptedInference
except ModuleNotFoundError as missing:
    sys.stderr.write(f"the scripted inference server needs '{missing.name}': pip install 'polarq[demo]'\n")
    raise SystemExit(2) from None


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m polarq.testing.inference", description=__doc__.split("\n")[0])
    parser.add_argument("--scenario", default="calculator", help=f"{', '.join(built_in_scenarios())}, or a YAML file")
    parser.add_argument("--served-model-name", default="scripted")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port (the default)")
    parser.add_argument("--port-file", type=Path, help="written with the port once the server listens")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--tokens-per-s", type=float, help="pace of answers; default: at once")
    parser.add_argument("--drift-seed", type=int, help="sample other ids for a text than it encodes to")
    parser.add_argument("--api-key", help="the key that /v1 asks for")
    parser.add_argument("--engine", choices=sorted(NEWEST), default="vllm", help="whose routes and JSON")
    parser.add_argument("--engine-version", metavar="X.Y.Z", help="the release it claims to be; default: the newest")
    parser.add_argument("--scale-out", action="store_true", help="open vLLM's /inference/v1/generate")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = _arguments(arguments)
    settings: dict[str, Any] = {
        "served_model_name": given.served_model_name,
        "max_model_len": given.max_model_len,
        "tokens_per_s": given.tokens_per_s,
        "drift_seed": given.drift_seed,
        "api_key": given.api_key,
        "engine": given.engine,
        "scale_out": given.scale_out,
    }
    if given.engine_version is not None:
        settings["version"] = given.engine_version
    try:
        settings["scenario"] = load_scenario(given.scenario)
        options = ServerOptions.parse(settings, what="scripted inference server")
        _run(_serve(ScriptedInference(options, host=given.host, port=given.port), given.port_file))
    except (PolarqError, OSError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    return 0


def _run(main: Any) -> None:
    try:
        import uvloop
    except ModuleNotFoundError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(server: ScriptedInference, port_file: Path | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with server:
        if port_file is not None:
            _write_whole(port_file, f"{server.port}\n")
        options = server.options
        sys.stdout.write(
            f"scripted inference on {server.base_url}/v1, model {options.served_model_name}, "
            f"scenario {options.scenario.name}\n"
        )
        sys.stdout.flush()
        await stop.wait()


def _write_whole(path: Path, text: str) -> None:
    """Whoever waits for the file never reads half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
