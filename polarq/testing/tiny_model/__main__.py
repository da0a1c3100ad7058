"""`python -m polarq.testing.tiny_model FOLDER` writes the tiny model's checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from polarq.testing.tiny_model.checkpoint import make_tiny_model

USAGE = "usage: python -m polarq.testing.tiny_model FOLDER"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write(f"{USAGE}\n")
        return 2
    folder = make_tiny_model(Path(arguments[0]))
    size = sum(path.stat().st_size for path in folder.iterdir())
    sys.stdout.write(f"{folder}: {size / 1e6:.1f} MB\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
