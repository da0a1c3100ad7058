"""The real program and the image that `.ci/apptainer-up` makes, and a host whose node has them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from polarq.topology.runtimes import RuntimesSection
from polarq_worker.runtimes.base import Host

from ..needs import not_here

CACHE = Path(os.environ.get("POLARQ_CI_CACHE", "/var/tmp/polarq-ci")) / "apptainer"
TREE = CACHE / "base"
IMAGE = CACHE / "base.sif"
PROGRAM = CACHE / "program"


def needs_apptainer() -> None:
    """Ends the test where there is no program to test against."""
    if not PROGRAM.is_file() or not IMAGE.is_file() or os.geteuid() != 0:
        not_here("needs root and what .ci/apptainer-up makes")


def apptainer_host(folder: Path, *, program: Path = PROGRAM, node_id: str = "node0") -> Host:
    settings = RuntimesSection.model_validate({"apptainer": {"program": str(program)}})
    return Host(node_id, "1", folder, settings)


def without(folder: Path) -> None:
    """Removes what a test's sandboxes share."""
    shutil.rmtree(folder, ignore_errors=True)
