"""One target under atheris: `python -m tests.fuzz.guided NAME FOLDER [libFuzzer's options]`."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    atheris = importlib.import_module("atheris")
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["polarq_proxy"]):
        from tests.fuzz.targets import TARGETS, routes

        routes()
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
