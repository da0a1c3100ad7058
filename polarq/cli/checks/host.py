"""This machine: room on disk, what sandboxes need, and proxy variables that would swallow loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator

import httpx

from polarq import bubblewrap
from polarq.cli.checks.base import Deployment, Finding, fail, ok, warn
from polarq.docker_daemon import daemon_address, daemon_facts

GIB = 1024**3
PROGRAM_S = 10.0


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
    """Which runtimes can work here, as far as one can see without starting a sandbox."""
    yield from _local(deployment)
    wanted = {
        node.default_runtime.backend for node in deployment.topology.gateway.nodes if node.default_runtime is not None
    }
    yield from _docker(deployment, asked="docker" in wanted)
    for backend, found, advice in (
        ("apptainer", _apptainer(deployment), "install apptainer, or name it in the node's runtimes.apptainer.program"),
    ):
        if not found:
            yield ok(f"runtime {backend}", "works")
        elif backend in wanted:
            yield fail(f"runtime {backend}", f"{found}, and a node's default_runtime asks for it", advice)
        else:
            yield ok(f"runtime {backend}", f"not here ({found}); no node needs it")


def _local(deployment: Deployment) -> Iterator[Finding]:
    part = "runtime local"
    missing = [name for name in ("bash", "git") if shutil.which(name) is None]
    if missing:
        yield fail(part, f"{' and '.join(missing)} is missing", f"install {' '.join(missing)}")
        return
    asked = {node.runtimes.local.isolation for node in deployment.topology.gateway.nodes} or {"auto"}
    why_not = bubblewrap.why_not()
    open_to_all = "sandboxes share this machine's files, users and network"
    if asked == {"none"}:
        yield ok(part, f"works; isolation is none: {open_to_all}")
    elif not why_not and not bubblewrap.limits_tmpfs():
        fact = "works; sandboxes are isolated by bubblewrap, but this one cannot limit their /dev/shm"
        yield warn(part, fact, f"to limit it: {bubblewrap.INSTALL}")
    elif not why_not and not bubblewrap.own_users():
        fact = "works; sandboxes are isolated by bubblewrap; their processes are limited by control groups only"
        yield warn(part, fact, "let the worker make control groups of pids, or user namespaces")
    elif not why_not:
        yield ok(part, "works; sandboxes are isolated by bubblewrap")
    elif "bubblewrap" in asked:
        yield fail(part, f"a node's runtimes.local.isolation asks for bubblewrap; {why_not}", bubblewrap.INSTALL)
    else:
        yield warn(part, f"works; {open_to_all}: {why_not}", f"to isolate them: {bubblewrap.INSTALL}")


def _docker(deployment: Deployment, *, asked: bool) -> Iterator[Finding]:
    part = "runtime docker"
    for named in sorted({node.runtimes.docker.url for node in deployment.topology.gateway.nodes} or {""}):
        url = daemon_address(named)
        why_not = "there is no socket of a daemon" if not url else ""
        try:
            facts = daemon_facts(url) if url else None
        except (OSError, ValueError, httpx.HTTPError) as exc:
            facts, why_not = None, f"{url} does not answer: {exc or type(exc).__name__}"
        if facts is not None:
            lacks = f"; it cannot give {'; '.join(facts.lacks)}" if facts.lacks else ""
            yield ok(part, f"works; {facts.name}{lacks}")
        elif asked or named:
            advice = "start the Docker daemon, or set runtimes.docker.url of the node"
            yield fail(part, f"{why_not}, and a node asks for it", advice)
        else:
            yield ok(part, f"not here ({why_not}); no node needs it")


def _apptainer(deployment: Deployment) -> str:
    """Blank when the program that nodes name, or one on PATH, runs here; else why not."""
    named = {node.runtimes.apptainer.program for node in deployment.topology.gateway.nodes} or {None}
    for program in sorted(named, key=str):
        names = [program] if program is not None else ["apptainer", "singularity"]
        path = next((found for name in names if (found := shutil.which(name))), None)
        if path is None:
            return f"there is no program '{program}'" if program is not None else "no apptainer program"
        try:
            # A command line of ours, without a shell: the deployment's own program.
            done = subprocess.run([path, "--version"], capture_output=True, timeout=PROGRAM_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as exc:
            return f"{path} does not run: {exc}"
        if done.returncode != 0:
            return f"{path} does not run: {done.stderr.decode('utf-8', 'replace').strip()[-200:] or done.returncode}"
    return ""


def check_proxy_variables(_: Deployment) -> Iterator[Finding]:
    """An HTTP proxy in the environment without an exception for loopback would swallow model calls."""
    proxies = urllib.request.getproxies_environment()
    names = [f"{scheme.upper()}_PROXY" for scheme in ("http", "all") if scheme in proxies]
    # Programs differ in which of the two spellings they read: each that is set has to say it.
    lists = [value for name in ("NO_PROXY", "no_proxy") if (value := os.environ.get(name))]
    if not names:
        yield ok("environment", "no HTTP proxy is set")
    elif lists and all(_excepted("127.0.0.1", value) for value in lists):
        yield ok("environment", f"{names[0]} is set, and loopback is excepted from it")
    else:
        fact = f"{names[0]} is set, and loopback is not excepted from it"
        hosts = "127.0.0.1,localhost,::1"
        yield warn("environment", fact, f"export NO_PROXY={hosts} no_proxy={hosts}")


def _excepted(host: str, no_proxy: str) -> bool:
    """As the libraries of harnesses read NO_PROXY: names, or all."""
    entries = [entry.strip().lstrip(".") for entry in no_proxy.split(",")]
    return "*" in entries or host in entries
