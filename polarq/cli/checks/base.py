"""What a check answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from polarq.settings import Settings
from polarq.topology import Topology


class Verdict(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"
    """It works, and will hurt some day."""
    FAIL = "fail"
    """Rollouts will fail or be lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `advice` says what to do; blank where nothing is to be done."""

    part: str
    verdict: Verdict
    fact: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is examined."""

    topology: Topology
    settings: Settings


Check = Callable[[Deployment], Iterator[Finding]]
"""Finds what is to be said about one part of a deployment. Never raises for what it finds."""


def ok(part: str, fact: str) -> Finding:
    return Finding(part, Verdict.OK, fact)


def warn(part: str, fact: str, advice: str) -> Finding:
    return Finding(part, Verdict.WARN, fact, advice)


def fail(part: str, fact: str, advice: str) -> Finding:
    return Finding(part, Verdict.FAIL, fact, advice)
