"""Sandboxes in records: one that may outlive its worker, as the ledger remembers it until it has been stopped, and what
a rollout's result says of its own."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from polarq.contracts.base import Contract
from polarq.contracts.specs import NetworkPolicy


class Reach(StrEnum):
    """From where a sandbox can be stopped when its worker is dead."""

    WORKER = "worker"
    """From nowhere, and need not: it ends with its worker."""
    NODE = "node"
    """From the machine it runs on (a container, an instance)."""
    ANYWHERE = "anywhere"
    """From every worker (a remote machine, a cluster's pod)."""


class SandboxRecord(Contract):
    """All that is needed to stop a sandbox without the object that started it."""

    runtime: str
    """The plug-in: its name, or its import path."""
    runtime_id: str
    handle: str
    """What the plug-in finds it by: a container's name, a pod's."""
    reach: Reach
    node_id: str
    incarnation: str
    """The worker that started it."""
    hostname: str
    rollout_id: str = ""
    """Empty while it waits in a node's warm pool: it belongs to the worker."""
    attempt: int = 0
    token: int = 0
    """Fencing token of the attempt: when the ledger holds another one, the sandbox is of no use any more."""


class ExecCategory(StrEnum):
    """What a command in a sandbox was for, as whoever ran it declares."""

    PREPARE = "prepare"
    SETUP = "setup"
    """A harness's own set-up and its reading of results."""
    AGENT = "agent"
    REPOSITORY = "repository"
    """What the agent changed: polarq's own git."""
    VERIFIER = "verifier"
    ARTIFACTS = "artifacts"
    OTHER = "other"


class ExecTimesReport(Contract):
    """The commands of a sandbox, counted."""

    total_s: float = 0.0
    count: int = 0
    failed: int = 0
    """Those that did not exit with 0, whatever the way."""
    timed_out: int = 0
    cancelled: int = 0
    seconds: dict[ExecCategory, float] = {}
    counts: dict[ExecCategory, int] = {}


class Denied(Contract):
    """A connection that the network policy refused."""

    target: str
    """host:port, as it was asked for."""
    count: int = 1


class ScrubbedHistory(Contract):
    """A repository whose history was cut at its checked-out commit before the agent saw it."""

    repository: str
    head: str
    refs_removed: int = 0
    commits_removed: int = 0
    problem: str = ""
    """Why it was left as it is; empty: it was scrubbed."""


class SandboxReport(Contract):
    """The sandbox that a rollout's harness ran in."""

    backend: str
    isolation: str = "none"
    image_id: str = ""
    recipe: str = ""
    """Hash of what it was made of: equal hashes are equal sandboxes."""
    origin: Literal["cold", "snapshot", "warm", "reused"] = "cold"
    """Prepared for this rollout; started from its recipe's snapshot; taken ready from the pool; used before."""
    network: NetworkPolicy = NetworkPolicy.FULL
    """What was really enforced."""
    denied: list[Denied] = []
    denied_more: int = 0
    """Refusals of targets beyond those listed."""
    history: list[ScrubbedHistory] = []
    exec_times: ExecTimesReport = ExecTimesReport()
