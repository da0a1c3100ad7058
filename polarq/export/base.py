"""What an export is made of: groups of ended rollouts on one side, a format on the other."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from pydantic import ValidationError

from polarq.contracts.base import problems_of
from polarq.contracts.rollout import Outcome, RolloutResult
from polarq.contracts.task import maybe_rollout_id
from polarq.contracts.trajectory import Trajectory
from polarq.errors import InvalidInput, PolarqError

Record = dict[str, Any]
"""What a file has of one trace, rollout or call."""

NO_TRAJECTORY = "no trajectory in the store"
NOT_TRAINABLE = "not trainable"
NOTHING_SAMPLED = "nothing sampled"


class MissingPackage(PolarqError):
    """A format needs a package that is not installed."""

    def __init__(self, wanted: str) -> None:
        super().__init__(f"this format needs {wanted}, which is not installed: pip install 'polarq[export]'")


class Skip(Exception):
    """A rollout is left out of the export. The reason is one of few, so that it can be counted."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a rollout ended, without its trajectory."""

    outcome: Outcome
    reward: float | None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One ended rollout, not read yet. Both functions raise `PayloadMissing` and `PayloadCorrupt`."""

    rollout_id: str
    verdict: Callable[[], Verdict]
    load: Callable[[], RolloutResult]


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task, or those of them that are asked for: what they are compared with is one another."""

    task_id: str
    rollouts: Sequence[Rollout]
    waiting: int = 0
    """Those that have not ended."""


def by_task(targets: Iterable[str], is_task: Callable[[str], bool]) -> dict[str, set[int] | None]:
    """task id -> the indices of its rollouts that are named, or None: all of them. Tasks are in the order in which they
    are named first.

    However its rollouts were named, a task is one group. A task's own id may look like a rollout's: `is_task` tells.
    """
    found: dict[str, set[int] | None] = {}
    for target in targets:
        rollout = maybe_rollout_id(target)
        if rollout is None or is_task(target):
            found[target] = None
        elif (some := found.setdefault(rollout[0], set())) is not None:
            some.add(rollout[1])
    return found


class Format(ABC):
    """Turns results into records, and records into files."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    """What its files end in."""
    one_each: ClassVar[bool] = False
    """A folder with a file for each rollout, not one file."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What makes its files what they are: an export goes on only where these are the same."""
        return {}

    def passed_over(self, group: Group) -> Mapping[str, str]:
        """rollout id -> reason, of those that are left out for how the others of their group did."""
        return {}

    def traces_left_out(self) -> Mapping[str, int]:
        """How many traces of rollouts that are in the file are not, by reason."""
        return {}

    def memory(self) -> Any:
        """JSON: what it must know of the results since the last part to go on after a restart."""
        return None

    def remember(self, memory: Any) -> None:  # noqa: B027 - most formats have nothing to remember
        """Takes up what `memory` said at a part's end."""

    @abstractmethod
    def records(self, result: RolloutResult) -> list[Record]:
        """Raises `Skip`. An export knows each result once, in order."""

    def images(self, result: RolloutResult, records: Sequence[Record]) -> Mapping[str, bytes]:
        """name -> content, of pictures that the records name and that lie in a folder beside the file."""
        return {}

    @abstractmethod
    def write(self, file: IO[bytes], records: Sequence[Record]) -> None:
        """Writes a part of the whole."""

    @abstractmethod
    def join(self, parts: Sequence[Path], file: IO[bytes]) -> None:
        """Writes the whole, out of its parts in order; none: the whole has no record."""


def needed(result: RolloutResult) -> Trajectory:
    """The result's trajectory. Raises `Skip` where there is none: a rollout that never asked a model, or one whose
    payload is not in the store any more."""
    if result.trajectory is None:
        raise Skip(NO_TRAJECTORY if result.outcome.trainable else why_not(result.outcome))
    return result.trajectory


def why_not(outcome: Outcome) -> str:
    """Why a trainer may not use a rollout, as a reason that can be counted."""
    return f"{NOT_TRAINABLE}: {outcome.boundary.value}/{outcome.reason}"


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[IO[bytes]]:
    """A file that is there whole or not at all. Raises `InvalidInput` where it cannot be written."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    except OSError as exc:
        raise cannot_write(target, exc) from None
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(target)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise cannot_write(target, exc) from None
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def cannot_write(target: Path, exc: OSError) -> InvalidInput:
    return InvalidInput(str(target), [f"cannot be written: {exc.strerror or exc}"])


def cannot_read(path: Path, exc: OSError) -> InvalidInput:
    return InvalidInput(str(path), [f"cannot be read: {exc.strerror or exc}"])


def problem_of(exc: Exception) -> str:
    """One line about what somebody's JSON has that it should not have, or lacks."""
    if isinstance(exc, ValidationError):
        line = problems_of(exc)[0]
    elif isinstance(exc, KeyError):
        line = f"{exc} is missing"
    else:
        line = str(exc) if type(exc) is ValueError else f"{type(exc).__name__} {exc}"
    return " ".join(line.split())


def appended(parts: Sequence[Path], file: IO[bytes]) -> None:
    """The parts one after another."""
    for part in parts:
        with part.open("rb") as one:
            shutil.copyfileobj(one, file)
