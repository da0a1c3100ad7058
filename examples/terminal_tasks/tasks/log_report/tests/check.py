"""Prints a map of marks, 0 or 1 each, for the report that is named."""

import json
import sys
from pathlib import Path

RIGHT = {"requests": 8, "errors": 2, "slowest": "/traces/7"}


def main(report: Path) -> None:
    try:
        told = json.loads(report.read_text("utf-8"))
    except (OSError, ValueError):
        told = None
    print(json.dumps({key: int(isinstance(told, dict) and told.get(key) == value) for key, value in RIGHT.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
