"""Whether an answer is mathematically an expected one, by the package math-verify.

Request: {answer, expected: [...], float_rounding, strict}; reply: {fits, read, unreadable: [expected...]}. It has no
time limit of its own: the sandbox has one.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from typing import Any

SURROUNDINGS = ("$", "\\boxed", "\\(", "\\[", "\\begin")
"""Where the package finds LaTeX; a line of bare LaTeX is read as if it stood in them."""


def check(request: dict[str, Any]) -> dict[str, Any]:
    package = importlib.import_module("math_verify")
    targets = [package.LatexExtractionConfig(), package.ExprExtractionConfig()]

    def read(text: str) -> list[Any]:
        bare = "\\" in text and "\n" not in text and not any(mark in text for mark in SURROUNDINGS)
        for spelt in ([f"${text}$"] if bare else []) + [text]:
            if found := package.parse(spelt, targets, parsing_timeout=None, raise_on_error=False):
                return list(found)
        return []

    expected = {text: read(text.strip()) for text in request["expected"]}
    unreadable = [text for text, found in expected.items() if not found]
    answer = read(request["answer"].strip())
    fits = any(
        package.verify(
            gold,
            answer,
            float_rounding=request["float_rounding"],
            strict=request["strict"],
            timeout_seconds=None,
            raise_on_error=False,
        )
        for gold in expected.values()
        if gold and answer
    )
    return {"fits": bool(fits), "read": [str(found)[:200] for found in answer], "unreadable": unreadable}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    try:
        json.dump(check(json.load(sys.stdin)), sys.stdout)
    except MemoryError:
        sys.exit(87)
