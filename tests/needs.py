"""What a test needs and a machine may lack: on a laptop the test is skipped, in CI its absence is a failure."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


def not_here(reason: str) -> NoReturn:
    """Ends the test: `reason` says what is missing."""
    if in_ci():
        pytest.fail(f"{reason}; CI must have it", pytrace=False)
    pytest.skip(reason)
