"""Who a user of a container is, in numbers: files that are brought in need an owner."""

from __future__ import annotations

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.archives.pack import Owner
from polarq_worker.runtimes.docker.archive import Archive

HOME = "/polar/home"
"""Of a user to whom the image gives none."""
LARGEST = 1 << 20


async def owner_of(archive: Archive, user: str) -> Owner:
    """`user` is a name or number, with `:group` or without; blank: root. Raises `RuntimeFault` for an unknown name."""
    name, _, group = user.partition(":")
    if not group and name in {"", "0", "root"}:
        return Owner()
    uid, gid = _number(name), 0
    if uid is None or not group:
        entry = _entry(await archive.get_bytes("/etc/passwd", LARGEST), name)
        if entry is not None and entry[3].isdecimal():
            uid, gid = int(entry[2]), int(entry[3])
    if uid is None:
        raise RuntimeFault(f"user '{name}' is not in the image's /etc/passwd; name one that is, or give a number")
    if group and (number := _number(group)) is not None:
        gid = number
    elif group:
        entry = _entry(await archive.get_bytes("/etc/group", LARGEST), group)
        if entry is None:
            raise RuntimeFault(f"group '{group}' is not in the image's /etc/group; name one that is, or give a number")
        gid = int(entry[2])
    return Owner(uid, gid)


async def with_home(archive: Archive, owner: Owner) -> bytes | None:
    """The image's /etc/passwd, in which this user gets `HOME`: a line more for one who has none, another home for one
    whose own is no folder there (as `nobody`'s). Without it many programs end as soon as they ask who they are, or
    write a file of theirs. None: nothing is missing; or there is no such file, or it is a link."""
    known = await archive.get_bytes("/etc/passwd", LARGEST)
    fields = _entry(known, str(owner.uid))
    if not known or (fields is not None and (len(fields) < 7 or await archive.has(fields[5]))):
        return None
    if fields is None:
        line = f"polarq{owner.uid}:x:{owner.uid}:{owner.gid}::{HOME}:/bin/sh"
        return known.removesuffix(b"\n") + f"\n{line}\n".encode()
    old, new = (":".join([*fields[:5], home, *fields[6:]]).encode() for home in (fields[5], HOME))
    return known.replace(old, new)


def _entry(file: bytes, wanted: str) -> list[str] | None:
    """The line of a name or number; the number is its third field, and in passwd the group's its fourth."""
    for line in file.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and wanted in {fields[0], fields[2]} and fields[2].isdecimal():
            return fields
    return None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
