"""Names under which the files of one rollout are stored: no two share one, and none lies below another."""

from __future__ import annotations

import itertools
from collections.abc import Collection


class Names:
    """Those that are taken."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def take(self, name: str) -> str:
        """`name`, or where that is taken (a folder `out` is stored as `out.tar`, and there may be such a file) one like
        it: `out~2.tar`."""
        *folders, last = name.split("/")
        above = ""
        for folder in folders:
            above = _free(above, folder, self._files)
            self._folders.add(above)
        name = _free(above, last, self._files | self._folders)
        self._files.add(name)
        return name


def _free(above: str, part: str, taken: Collection[str]) -> str:
    stem, dot, ending = part.rpartition(".")
    stem, dot, ending = (stem, dot, ending) if stem else (part, "", "")
    others = (f"{stem}~{number}{dot}{ending}" for number in itertools.count(2))
    paths = (f"{above}/{one}" if above else one for one in itertools.chain([part], others))
    return next(path for path in paths if path not in taken)
