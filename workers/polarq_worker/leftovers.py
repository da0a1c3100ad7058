"""What a killed worker leaves on its node, cleared away at the next start.

Processes of its sandboxes end with it (each keeper kills its tree when the worker's socket closes), grants expire, and
the ledger gives its rollouts to somebody else. Folders stay, and so does a process whose keeper was killed as well.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from polarq_worker.kept_logs import keep_logs
from polarq_worker.runtimes import strays
from polarq_worker.runtimes.folder import remove_tree

log = logging.getLogger("polarq.worker.leftovers")


def clear_sandboxes(rollouts_dir: Path, logs_dir: Path) -> list[str]:
    """Kills what still runs of earlier sandboxes and removes their folders (blocks). Returns the folders' names.

    Their logs go to where a teardown would have put them: they may say why the worker died.

    To be called only by the one worker of the node, before its first sandbox. Never raises for what cannot be removed.
    """
    root = Path(os.path.realpath(rollouts_dir))
    # Every command of a sandbox has both in its environment, and nothing else has.
    if not strays.kill((b"POLARQ_RUNTIME_ID=", os.fsencode(root) + b"/")):
        log.error("processes of an earlier worker's sandboxes do not die; ps e shows their POLARQ_RUNTIME_ID")
    cleared = []
    for folder in sorted(root.iterdir()):
        whole = folder.is_dir() and not folder.is_symlink()
        if whole:
            # <rollout_id>-<token>-<role>
            _keep_logs(folder, logs_dir / "rollouts" / folder.name.rpartition("-")[0] / folder.name)
        try:
            if whole:
                remove_tree(folder)
            else:
                folder.unlink(missing_ok=True)
        except OSError as exc:
            log.error("the sandbox folder %s of an earlier worker cannot be removed (%s)", folder, exc.strerror or exc)
        else:
            cleared.append(folder.name)
    return cleared


def _keep_logs(folder: Path, target: Path) -> None:
    try:
        keep_logs(folder / "logs", target)
    except OSError as exc:
        log.warning("the logs of %s are not kept (%s)", folder.name, exc.strerror or "some cannot be copied")
