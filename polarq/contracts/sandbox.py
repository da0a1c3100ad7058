"""A sandbox that may outlive its worker, as the ledger remembers it until it has been stopped."""

from __future__ import annotations

from enum import StrEnum

from polarq.contracts.base import Contract


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
    rollout_id: str
    attempt: int
    token: int
    """Fencing token of the attempt: when the ledger holds another one, the sandbox is of no use any more."""
