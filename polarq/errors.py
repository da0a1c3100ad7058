"""One error family, named by the boundary that failed.

Every message is one line that says what is wrong and what to do. A failed rollout is not an error of this
kind: it is data (`polarq.contracts.Outcome`). These are raised where the caller can act: bad input, a Redis that
does not answer, a task that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class PolarqError(Exception):
    """Base of everything polarq raises on purpose."""


class InvalidInput(PolarqError):
    """A task, topology or option that cannot be used.

    `problems` holds one line per mistake, each with the path of the key.
    """

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.what = what
        self.problems = tuple(problems)
        super().__init__(f"{what}: " + "; ".join(self.problems))

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[str, tuple[str, ...]]]:
        return type(self), (self.what, self.problems)


class InvalidTask(InvalidInput):
    """The task was refused before anything was recorded or enqueued."""


class InvalidTopology(InvalidInput):
    """The topology file was refused."""


class TaskConflict(PolarqError):
    """The task_id is taken by a different request, or was cancelled before it arrived."""


class TaskNotFound(PolarqError):
    """No task of that id is in the ledger (never submitted, or expired)."""


class NodeNotFound(PolarqError):
    """No node of that id is in the ledger."""


class QueueFull(PolarqError):
    """Back-pressure: try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)

    def __reduce__(self) -> tuple[type[QueueFull], tuple[str, float]]:
        return type(self), (self.args[0], self.retry_after_s)


class StepRefused(PolarqError):
    """A rollout cannot go from the state that the ledger has of it, `before`, to another one."""

    def __init__(self, rollout_id: str, before: str, to: str) -> None:
        super().__init__(f"rollout '{rollout_id}': there is no step from {before} to {to}")
        self.before = before


class LedgerUnavailable(PolarqError):
    """Redis does not answer, refuses the password, or is not usable as a ledger."""


class NotReplicated(LedgerUnavailable):
    """Redis has done it, and fewer replicas have it than `redis.wait_replicas` wants."""

    def __init__(self, have: int, wanted: int) -> None:
        super().__init__(
            f"{have} of the {wanted} replicas of Redis have it that redis.wait_replicas wants; it does not count yet"
        )


class NotQueued(LedgerUnavailable):
    """Redis went away in the middle of a submission: the task may be recorded, and not every doorbell is rung.
    Submitting it again is safe, and does the rest."""


class NotPaused(PolarqError):
    """Model calls were still in flight when the time was up. The pause holds until it is resumed or its lease ends."""


class PayloadMissing(PolarqError):
    """A committed payload is not in the store (expired or evicted)."""


class PayloadCorrupt(PolarqError):
    """A payload does not match its checksum or cannot be decoded."""


class NotEnded(PolarqError):
    """A rollout has not ended: there is no result that could be acknowledged."""


class ArchiveFailed(PolarqError):
    """The archive cannot be written (`retention.archive`). Nothing was deleted."""


class ArtifactsUnavailable(PolarqError):
    """Files of a sandbox cannot be stored, read or removed (`artifacts.place`)."""


class ResultTimeout(PolarqError):
    """The task did not finish within the time the caller was ready to wait. It goes on running."""


class UnknownPlugin(PolarqError):
    """A task names a harness, runtime, evaluator or builder that is not installed."""


class GrantRefused(PolarqError):
    """A session secret is unknown, closed or expired."""


class RuntimeFault(PolarqError):
    """The sandbox could not be started or was lost (boundary `runtime`). `reason` becomes `Outcome.reason`."""

    reason: ClassVar[str] = "runtime_failed"


class SandboxLost(RuntimeFault):
    """It was there, and is not any more."""

    reason = "sandbox_lost"


class OutOfMemory(RuntimeFault):
    """The kernel killed a process of the sandbox for want of memory."""

    reason = "out_of_memory"


class DiskFull(RuntimeFault):
    """A disk of the node, or of the sandbox, has no room left."""

    reason = "disk_full"


class CannotBeKept(RuntimeFault):
    """What is in a sandbox's files holds for that one alone: it makes no snapshot, and each is prepared anew."""

    reason = "cannot_be_kept"


class ImageMissing(RuntimeFault):
    """There is no such image, here or where it would come from."""

    reason = "image_missing"


class ImageDenied(RuntimeFault):
    """The image's registry wants another login."""

    reason = "image_denied"


class BackendAway(RuntimeFault):
    """What runs the sandboxes (a daemon, a program, a cluster) is not there or does not answer."""

    reason = "backend_away"


class HarnessFault(PolarqError):
    """The harness cannot be started as it stands (boundary `harness`)."""


class EvaluatorFault(PolarqError):
    """The evaluator could not reach a verdict (boundary `evaluator`): no reward, never a zero."""
