"""From a task's runtime spec to a container's configuration."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from polarq.contracts.specs import RuntimeSpec
from polarq_worker.network.way_out import PROXY_VARIABLES
from polarq_worker.runtimes import shm
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker.shell import MAIN

NODE = "polarq.node"
INCARNATION = "polarq.incarnation"
PLACE = "polarq.place"
"""Which node of that name: two deployments on one machine may both have a `node0`."""
RUNTIME = "polarq.runtime"
ROLLOUT = "polarq.rollout"
SNAPSHOT = "polarq.snapshot"
IMAGE = "polarq.image"
"""The digest of the image that a recipe began with."""

CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID"]
"""What package managers, `su` and servers on low ports need as root. Not Docker's other ones: raw sockets, device
files, file capabilities, chroot, audit."""
SOCKETS = "/run/polarq"
KWARGS = {"volumes", shm.KEY}
ATTEMPT = re.compile(r"^(?P<rollout>.+)-\d+-[a-z]+$")


def problems(spec: RuntimeSpec) -> list[str]:
    """What the task asks for and no container can give, one line each."""
    lines = []
    if not spec.image.strip():
        lines.append("image: the docker runtime needs one")
    if spec.direct_exec_init_command is not None:
        lines.append("direct_exec_init_command: is for the apptainer runtime only")
    if spec.workdir is not None and (not spec.workdir.startswith("/") or ".." in PurePosixPath(spec.workdir).parts):
        lines.append(f"workdir: '{spec.workdir}' is no absolute path without '..'")
    if spec.network is not None and spec.network.startswith("container:"):
        lines.append("network: the docker runtime joins no other container's network")
    lines += [f"kwargs.{key}: the docker runtime cannot use it" for key in sorted(set(spec.kwargs) - KWARGS)]
    volumes = spec.kwargs.get("volumes", [])
    if not isinstance(volumes, list) or not all(isinstance(volume, str) for volume in volumes):
        lines.append("kwargs.volumes: a list of texts like /host/path:/path/in/it:ro is needed")
        volumes = []
    for key, texts in (("kwargs.volumes", volumes), ("internet_volumes", spec.internet_volumes)):
        lines += [f"{key}: '{text}' is not like /host/path:/path/in/it:ro" for text in texts if not _is_volume(text)]
    return lines + shm.problems(spec)


def _is_volume(text: str) -> bool:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    return source.startswith("/") and target.startswith("/") and mode in {"", "ro", "rw"}


def place(host: Host) -> str:
    return hashlib.sha256(str(host.folder or "").encode()).hexdigest()[:12]


def name(runtime_id: str, host: Host) -> str:
    """A container's: readable, allowed, and of nobody else on the machine."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", runtime_id)[:60]
    whole = "\0".join((host.node_id, place(host), runtime_id))
    return f"polarq-{plain}-{hashlib.sha256(whole.encode()).hexdigest()[:10]}"


def own(host: Host) -> dict[str, str]:
    """The labels of all that is this node's."""
    return {NODE: host.node_id, PLACE: place(host)}


def is_own(labels: Mapping[str, str] | None, host: Host) -> bool:
    """Looked at once more: Podman's filters let pass what has any of the labels."""
    return labels is not None and own(host).items() <= labels.items()


def labels(runtime_id: str, host: Host, image_id: str) -> dict[str, str]:
    found = ATTEMPT.match(runtime_id)
    rollout = {ROLLOUT: found["rollout"]} if found else {ROLLOUT: ""}
    # An image of ours has labels too, which its containers would inherit.
    named = {INCARNATION: host.incarnation, RUNTIME: runtime_id, SNAPSHOT: "", IMAGE: image_id}
    return {**own(host), **named, **rollout}


def container(
    spec: RuntimeSpec,
    host: Host,
    *,
    runtime_id: str,
    image: str,
    image_id: str,
    online: bool,
    sockets: Path | None = None,
) -> dict[str, Any]:
    """The body of the daemon's `create`. `image` is what it starts from, `image_id` what its recipe began with;
    `sockets` is a folder that it sees as `SOCKETS`."""
    settings = host.settings.docker
    network = (spec.network or "bridge") if online else "none"
    config: dict[str, Any] = {
        "Image": image,
        "Labels": labels(runtime_id, host, image_id),
        "Entrypoint": ["/bin/sh", "-c", MAIN],
        "Cmd": [],
        # The container's own process is nobody's to kill but root's; commands name their user.
        "User": "0:0",
        "WorkingDir": "/",
        "OpenStdin": True,
        "HostConfig": {
            "Init": True,
            "NetworkMode": network,
            "SecurityOpt": ["no-new-privileges"],
            "CapDrop": ["ALL"],
            "CapAdd": CAPABILITIES,
            "PidsLimit": spec.max_processes or settings.max_processes,
            "LogConfig": {"Type": "none", "Config": {}},
            "Binds": [*spec.kwargs.get("volumes", []), *(spec.internet_volumes if online else [])],
            "ShmSize": shm.size(spec),
        },
    }
    if not online:
        # A name without a value takes away what the image says: nothing offline reaches a proxy of its.
        config["Env"] = list(PROXY_VARIABLES)
    limits = config["HostConfig"]
    if sockets is not None:
        limits["Mounts"] = [{"Type": "bind", "Source": str(sockets), "Target": SOCKETS, "ReadOnly": True}]
    if spec.cpus is not None:
        limits["NanoCpus"] = max(int(spec.cpus * 1e9), 10_000_000)
    if spec.memory_mb is not None:
        limits["Memory"] = limits["MemorySwap"] = spec.memory_mb << 20
    if spec.storage_mb is not None:
        limits["StorageOpt"] = {"size": f"{spec.storage_mb}M"}
    if spec.gpus:
        limits["DeviceRequests"] = [{"Driver": "", "Count": spec.gpus, "Capabilities": [["gpu"]]}]
    return config


def environment(image_env: list[str]) -> dict[str, str]:
    """What a command starts with: the image's own, and what every sandbox of ours has."""
    found = dict(entry.split("=", 1) for entry in image_env if "=" in entry)
    return {
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        **found,
    }
