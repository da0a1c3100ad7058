"""This machine: room on disk, what sandboxes need, and proxy variables that would swallow loopback."""

from __future__ import annotations

import os
import shutil
import socket
import urllib.request
from collections.abc import Iterator

from polarq.cli.checks.base import Deployment, Finding, fail, ok, warn

GIB = 1024**3
DOCKER_SOCKET = "/var/run/docker.sock"


def check_disk(deployment: Deployment) -> Iterator[Finding]:
    """Room where a node keeps sandboxes, logs and spooled results."""
    folder = deployment.settings.state_dir
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        yield fail("disk", f"{folder} cannot be written", "set POLARQ_STATE_DIR to a folder of yours")
        return
    usage = shutil.disk_usage(there)
    fact = f"{usage.free / GIB:.1f} GiB free for {folder}"
    advice = "free some, or set POLARQ_STATE_DIR to another disk: a sandbox that runs out of it fails its rollout"
    if usage.free < GIB:
        yield fail("disk", fact, advice)
    elif usage.free < 5 * GIB:
        yield warn("disk", fact, advice)
    else:
        yield ok("disk", fact)


def check_runtimes(deployment: Deployment) -> Iterator[Finding]:
    """Which runtimes can work here, as far as one can see without starting one."""
    missing = [name for name in ("bash", "git") if shutil.which(name) is None]
    if missing:
        yield fail("runtime local", f"{' and '.join(missing)} is missing", f"install {' '.join(missing)}")
    else:
        walls = "bwrap is there" if shutil.which("bwrap") else "bwrap is missing: sandboxes share this machine's files"
        yield ok("runtime local", f"works (bash, git); {walls}")
    wanted = {
        node.default_runtime.backend for node in deployment.topology.gateway.nodes if node.default_runtime is not None
    }
    for backend, found, advice in (
        ("docker", _docker(), "start the Docker daemon"),
        ("apptainer", _apptainer(), "install apptainer"),
    ):
        if not found:
            yield ok(f"runtime {backend}", "works")
        elif backend in wanted:
            yield fail(f"runtime {backend}", f"{found}, and a node's default_runtime asks for it", advice)
        else:
            yield ok(f"runtime {backend}", f"not here ({found}); no node needs it")


def _docker() -> str:
    """Blank when the daemon's socket accepts us, else why not."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(DOCKER_SOCKET)
        except OSError as exc:
            return f"{DOCKER_SOCKET}: {exc.strerror or type(exc).__name__}"
    return ""


def _apptainer() -> str:
    return "" if shutil.which("apptainer") or shutil.which("singularity") else "no apptainer program"


def check_proxy_variables(_: Deployment) -> Iterator[Finding]:
    """An HTTP proxy in the environment without an exception for loopback would swallow model calls."""
    proxies = urllib.request.getproxies_environment()
    names = [f"{scheme.upper()}_PROXY" for scheme in ("http", "all") if scheme in proxies]
    if not names:
        yield ok("environment", "no HTTP proxy is set")
    elif _excepted("127.0.0.1", proxies.get("no", "")):
        yield ok("environment", f"{names[0]} is set, and loopback is excepted from it")
    else:
        fact = f"{names[0]} is set, and loopback is not excepted from it"
        yield warn("environment", fact, "export NO_PROXY=127.0.0.1,localhost,::1")


def _excepted(host: str, no_proxy: str) -> bool:
    """As the libraries of harnesses read NO_PROXY: names, or all."""
    entries = [entry.strip().lstrip(".") for entry in no_proxy.split(",")]
    return "*" in entries or host in entries
