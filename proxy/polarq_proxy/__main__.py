"""`python -m polarq_proxy --node node0`: the node's proxy as a program of its own."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from polarq.errors import PolarqError
from polarq.settings import Settings

try:
    import uvloop

    from polarq_proxy.front import told_front
    from polarq_proxy.serve import ServeOptions, serve
except ModuleNotFoundError as missing:
    sys.stderr.write(f"the proxy needs '{missing.name}': pip install 'polarq[proxy]'\n")
    raise SystemExit(2) from None


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m polarq_proxy", description=__doc__)
    parser.add_argument("--node", required=True, help="id of the node in the topology")
    parser.add_argument("--topology", type=Path, help="topology file (default: POLARQ_TOPOLOGY, ./topology.yaml)")
    parser.add_argument("--port", type=int, help="overrides the topology's port; 0: any free one")
    parser.add_argument("--port-file", type=Path, help="written with url and pid once the proxy listens")
    parser.add_argument("--parent-pid", type=int, help="stop when this process ends")
    parser.add_argument("--relay", default="", help="name of an abstract Unix socket for sandboxes without a network")
    internal = parser.add_argument_group("given by the front of several processes")
    internal.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    internal.add_argument("--processes", type=int, default=1, help=argparse.SUPPRESS)
    internal.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    internal.add_argument("--peers", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    options = ServeOptions(
        given.node,
        given.topology,
        given.port,
        given.port_file,
        given.parent_pid,
        given.process,
        given.processes,
        given.channel,
        given.peers,
        given.relay,
    )
    # What is imported by now never goes, and a call leaves few cycles: looking for them at the usual pace takes a tenth
    # of the CPU.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options, Settings.from_env(), os.environ))
    except PolarqError as exc:
        if options.channel is None or not told_front(options.channel, exc):
            sys.stderr.write(f"{exc}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
