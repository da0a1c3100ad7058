"""A command beside a polarq of its own, whose model is scripted: to try an example without a GPU.

    python -m examples.scripted examples/offline_sft/scenario.yaml -- polarq status

Starts Redis, the scripted inference server and a worker in a new folder, runs the command with what it takes to find
them in its environment, and stops all of it. Needs `pip install 'polarq[demo]'`. The exit code is the command's.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from polarq.errors import PolarqError
from polarq.testing.stack import LocalStack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--workers", type=int, default=2, help="harnesses at once (default %(default)s)")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="polarq-scripted-") as home:
        nodes = {"node0": {"max_run_workers": asked.workers}}
        with LocalStack(
            Path(home), scenario=str(asked.scenario.resolve()), nodes=nodes, isolation="auto", bound=True
        ) as stack:
            return subprocess.run(asked.command, env=stack.env, check=False).returncode


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except PolarqError as exc:
        raise SystemExit(str(exc)) from None
