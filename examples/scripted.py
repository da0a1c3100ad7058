"""A command beside a polarq of its own, whose model is scripted: to try an example without a GPU.

    python -m examples.scripted examples/offline_sft/scenario.yaml -- polarq status

Starts Redis, the scripted inference server and a worker, runs the command with what it takes to find them in its
environment, and stops all of it. What the worker prepared stays in the folder of its state (and in Docker, as snapshots
of that worker), for the next time. Needs `pip install 'polarq[demo]'`. The exit code is the command's; Ctrl-C, SIGTERM
and a terminal that is closed stop all of it too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from polarq.cli.interrupts import Interrupts
from polarq.cli.outcome import Signalled
from polarq.errors import PolarqError
from polarq.testing.conformance.bench import alone_in
from polarq.testing.stack import LocalStack, PartDidNotStart

DRAIN_GRACE_S = 5.0
"""Nobody waits for a rollout once the command has ended."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--workers", type=int, default=2, help="harnesses at once (default %(default)s)")
    parser.add_argument("--state", type=Path, default=Path(".polarq/scripted"), help="kept (default %(default)s)")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    state = asked.state.resolve()
    print("starting Redis, a scripted model and a worker", file=sys.stderr, flush=True)
    interrupts = Interrupts()
    with interrupts.caught(), alone_in(state), TemporaryDirectory(prefix="polarq-scripted-") as home:
        stack = LocalStack(
            Path(home),
            scenario=str(asked.scenario.resolve()),
            nodes={"node0": {"max_run_workers": asked.workers}},
            sections={"gateway": {"drain_grace_s": DRAIN_GRACE_S}},
            env={"POLARQ_STATE_DIR": str(state)},
            isolation="auto",
            bound=True,
            held=interrupts.held,
        )
        with stack:
            with interrupts.held():  # one that tears this apart would leave it running
                process = subprocess.Popen(asked.command, env=stack.env)
            try:
                return process.wait()
            finally:
                process.kill()
                process.wait()


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Signalled as exc:
        raise SystemExit(128 + exc.number) from None
    except PartDidNotStart as exc:  # whose log is gone with its folder
        raise SystemExit(f"{exc.args[0]}\n{exc.last_lines}") from None
    except PolarqError as exc:
        raise SystemExit(str(exc)) from None
