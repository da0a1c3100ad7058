"""The real program and the image that `.ci/apptainer-up` makes, and a host whose node has them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
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


def counted(folder: Path) -> Path:
    """The program, noting the first word of each call in `calls`."""
    script = folder / "program"
    script.write_text(f'#!/bin/sh\necho "$1" >> {folder}/calls\nexec {PROGRAM} "$@"\n')
    script.chmod(0o755)
    return script


def builds(folder: Path) -> int:
    calls = folder / "calls"
    return calls.read_text().split().count("build") if calls.exists() else 0


def small_archive(folder: Path) -> Path:
    """A docker-archive with little more than a shell and env in it, whose image sets a variable."""
    linked = [TREE / "lib64/ld-linux-x86-64.so.2", *(TREE / "lib").glob("*-linux-gnu/ld-linux*")]
    libraries = [path for stem in ("libc", "libtinfo", "libdl") for path in (TREE / "lib").glob(f"*/{stem}.so.*")]
    programs = [TREE / name for name in ("bin/bash", "bin/sh", "usr/bin/env", "bin/true", "bin/cat", "usr/bin/id")]
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path in [*programs, *linked, *libraries]:
            tar.add(path, str(path.relative_to(TREE)), recursive=False)
        for path in libraries:
            if path.is_symlink():
                tar.add(path.parent / path.readlink(), str((path.parent / path.readlink()).relative_to(TREE)))
        add(tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/bash\n")
        # So that there is something to convert.
        add(tar, "ballast", os.urandom(12_000_000))
    config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["OF_THE_IMAGE=yes", "PATH=/usr/bin:/bin"]}}
    config["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{sha256(layer.getvalue())}"]}
    path = folder / "image.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "layer.tar", layer.getvalue())
        add(tar, "config.json", json.dumps(config).encode())
        manifest = [{"Config": "config.json", "RepoTags": ["small:latest"], "Layers": ["layer.tar"]}]
        add(tar, "manifest.json", json.dumps(manifest).encode())
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))
