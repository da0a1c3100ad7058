"""Where a node's Docker daemon is, and what it says of itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PROBE_S = 5.0


def usual_sockets() -> list[Path]:
    """Docker's, rootless Docker's, Podman's, rootless Podman's."""
    own = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    return [
        Path("/var/run/docker.sock"),
        own / "docker.sock",
        Path("/run/podman/podman.sock"),
        own / "podman/podman.sock",
    ]


def daemon_address(named: str) -> str:
    """`named` (`runtimes.docker.url` of a node), DOCKER_HOST, or the first of the usual sockets; blank: none."""
    if url := named or os.environ.get("DOCKER_HOST", ""):
        return url
    return next((f"unix://{path}" for path in usual_sockets() if path.is_socket()), "")


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """What can be said of one."""

    name: str
    """Docker or Podman, its version and address."""
    lacks: tuple[str, ...]
    """What tasks may ask for and it cannot give: a key of theirs, and why."""


def daemon_facts(url: str) -> DaemonFacts:
    """Asks it. Raises `OSError`, `httpx.HTTPError` or `ValueError` where it does not answer as a daemon does."""
    scheme, _, place = url.partition("://")
    transport = httpx.HTTPTransport(uds=place) if scheme == "unix" else None
    base = "http://docker" if scheme == "unix" else f"http://{place}"
    with httpx.Client(transport=transport, base_url=base, timeout=PROBE_S, trust_env=False) as client:
        version, info = (_answer(client, path) for path in ("/version", "/info"))
    parts = [part.get("Name", "") for part in version.get("Components") or []]
    kind = "Podman" if any("Podman" in part for part in parts) else "Docker"
    return DaemonFacts(f"{kind} {version.get('Version', '?')} at {url}", _lacks(info))


def _answer(client: httpx.Client, path: str) -> dict[str, Any]:
    answer = client.get(path)
    answer.raise_for_status()
    found: Any = answer.json()
    return found if isinstance(found, dict) else {}


def _lacks(info: dict[str, Any]) -> tuple[str, ...]:
    driver = str(info.get("Driver", "?"))
    backing = dict(pair for pair in info.get("DriverStatus") or [] if len(pair) == 2).get("Backing Filesystem", "")
    quotas = driver in {"btrfs", "zfs", "devicemapper"} or (driver.startswith("overlay") and backing == "xfs")
    missing = [
        (not info.get("MemoryLimit", True), "memory_mb: its kernel limits no memory"),
        (not info.get("CpuCfsQuota", True), "cpus: its kernel limits no processors"),
        (not info.get("PidsLimit", True), "max_processes: its kernel limits no processes"),
        (not quotas, f"storage_mb: its storage driver ({driver} on {backing or '?'}) has no quotas"),
    ]
    return tuple(text for lacking, text in missing if lacking)
