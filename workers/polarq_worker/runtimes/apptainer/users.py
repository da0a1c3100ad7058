"""Names of users as numbers, by the files of a sandbox's own. They are its programs' to write: only numbers come of it,
which mean nothing outside."""

from __future__ import annotations

import os
from dataclasses import dataclass

from polarq.errors import RuntimeFault

READ_BYTES = 1 << 20
NO_FOLLOW = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class User:
    """Who a command runs as."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    home: str = ""

    @property
    def ids(self) -> list[int]:
        return [self.uid, self.gid, *self.groups]


def look_up(root: int, named: str) -> User:
    """The user `name`, `name:group`, `uid` or `uid:gid` below the open folder `root`. Raises `RuntimeFault`."""
    who, _, group = named.partition(":")
    entries = [fields for line in _lines(root, "passwd") if len(fields := line.split(":")) >= 6]
    found = next((fields for fields in entries if who in {fields[0], fields[2]}), None)
    try:
        uid = int(found[2]) if found else int(who)
        gid = int(found[3]) if found else uid
        groups = [fields for line in _lines(root, "group") if len(fields := line.split(":")) >= 4]
        others = tuple(int(fields[2]) for fields in groups if found and found[0] in fields[3].split(","))
        if group:
            gid = next((int(fields[2]) for fields in groups if fields[0] == group), None) or int(group)
    except ValueError:
        raise RuntimeFault(
            f"there is no user '{named}' in the sandbox; give a name of its /etc/passwd, or uid:gid"
        ) from None
    return User(uid, gid, others, found[5] if found else "")


def _lines(root: int, name: str) -> list[str]:
    try:
        folder = os.open("etc", NO_FOLLOW | os.O_DIRECTORY, dir_fd=root)
        try:
            handle = os.open(name, NO_FOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError:
        return []
    with os.fdopen(handle, "rb") as file:
        return file.read(READ_BYTES).decode("utf-8", "replace").splitlines()
