"""The same local sandboxes under a worker that is not root, whose walls bubblewrap makes by user namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..needs import not_here
from .local_here import needs_bubblewrap

NOBODY = 54_321
CHOSEN = (
    "snapshot or starts_from or offline or swept or left_the_session or user or links or door or wri or privilege"
    " or harms or files_are_not_there or processes or lies_in_memory or brought_in"
    " or home or limits or successor or workdir"
)
"""By the names of tests: what differs for such a worker."""
HERE = Path(__file__).parent
IN_REACH = """
set -e
# A private view of the machine in which somebody else may pass through these folders.
for closed in $CLOSED; do
    mkdir -p "$STAGE$closed"
    mount --rbind "$closed" "$STAGE$closed"
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    for wanted in $WANTED; do
        case "$wanted" in "$closed"/*) mkdir -p "$wanted"; mount --rbind "$STAGE$wanted" "$wanted";; esac
    done
done
exec setpriv --reuid "$WHO" --regid "$WHO" --clear-groups "$@"
"""


def closed_on_the_way(path: Path) -> Iterator[Path]:
    """The outermost folder above it that others may not pass through."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            yield folder
            return


@pytest.mark.timeout(600)
def test_a_worker_that_is_not_root_has_the_same_walls(tmp_path_factory: pytest.TempPathFactory) -> None:
    needs_bubblewrap()
    if os.geteuid() != 0:
        # Then the other tests have run as somebody else.
        return
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        not_here("unshare and setpriv (util-linux) are missing")
    wanted = {Path(sys.base_prefix), Path(sys.prefix), HERE.parents[1]}
    closed = {folder for path in wanted for folder in closed_on_the_way(path)}
    # Not where pytest puts a test's files: others may not look there.
    place = Path("/var/tmp") / f"polarq-unprivileged-{os.getpid()}"
    place.mkdir()
    try:
        (place / "stage").mkdir()
        (place / "home").mkdir()
        os.chown(place / "home", NOBODY, NOBODY)
        env = {
            **os.environ,
            "CLOSED": " ".join(map(str, sorted(closed))),
            "WANTED": " ".join(map(str, sorted(wanted))),
            "STAGE": str(place / "stage"),
            "WHO": str(NOBODY),
            "HOME": str(place / "home"),
            "TMPDIR": str(place / "home"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        tests = [str(HERE / f"test_local_{name}.py") for name in ("contract", "isolated", "limits")]
        chosen = ["-q", "-p", "no:cacheprovider", "-k", f"not TestOpen and ({CHOSEN})", "-rs"]
        command = [sys.executable, "-m", "pytest", *chosen, f"--basetemp={place}/home/pytest", *tests]
        done = subprocess.run(
            ["unshare", "--mount", "bash", "-c", IN_REACH, "bash", *command],
            cwd=HERE.parents[1], env={**env, "CI": ""}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert "bubblewrap" not in done.stdout  # nothing was skipped for want of it
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", str(place)], check=False)
