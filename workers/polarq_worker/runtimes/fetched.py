"""What came out of a sandbox with a folder, and what did not: an entry that cannot be taken never costs the others."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from polarq.errors import RuntimeFault

LISTED = 100
"""Refused entries that are named; the others are counted."""
MAX_DEPTH = 64


class TooLarge(RuntimeFault):
    """More bytes than may be fetched."""


class TooMany(RuntimeFault):
    """More entries than may be fetched."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An entry that was left where it is. `path` is relative to the folder, made printable."""

    path: str
    reason: str


@dataclass(slots=True)
class Fetched:
    """A folder's copy, on the host."""

    files: int = 0
    bytes: int = 0
    refused: list[Refused] = field(default_factory=list)
    refused_more: int = 0
    """Beyond those listed."""

    def refuse(self, path: str, reason: str) -> None:
        if len(self.refused) < LISTED:
            self.refused.append(Refused(printable(path), reason))
        else:
            self.refused_more += 1


def printable(path: str) -> str:
    """A file name as one line of text, whatever bytes it has."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def stays_inside(link: str, depth: int) -> bool:
    """Whether a symbolic link in a folder `depth` levels below the top leads nowhere above the top, whatever other
    links of this kind it goes through: upwards first, then by names only."""
    path = PurePosixPath(link)
    parts = path.parts
    up = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return bool(parts) and not path.is_absolute() and up <= depth and ".." not in parts[up:]


def kind_of(mode: int) -> str:
    """A special file, in words."""
    kinds = (
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((words for is_one, words in kinds if is_one(mode)), "no regular file")
