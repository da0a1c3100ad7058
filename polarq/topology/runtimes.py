"""A node's sandboxes: how each backend is reached, and how many wait ready."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from polarq.contracts.base import Contract

Port = Annotated[int, Field(gt=0, lt=65536)]
NonEmpty = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class LocalRuntimeSection(Contract):
    """The backend `local`."""

    isolation: Literal["auto", "bubblewrap", "none"] = Field(
        "auto",
        description="auto: bubblewrap where it is there and works; none: processes of the worker's own user.",
    )
    visible: list[NonEmpty] = Field(
        [], description="Host paths in home folders or below /tmp that isolated sandboxes may read too."
    )
    max_processes: int = Field(
        4096,
        gt=0,
        description="Processes of one isolated sandbox, where its task names no limit and the worker may set one.",
    )


class DockerRuntimeSection(Contract):
    """The backend `docker` (or Podman's socket)."""

    url: str = Field(
        "", description="unix:// or tcp:// address of the daemon; blank: DOCKER_HOST, else the usual sockets."
    )
    pull: Literal["missing", "always", "never"] = Field("missing", description="When images are pulled.")
    pull_timeout_s: float = Field(1800.0, gt=0, description="Longest that a pull may take, in seconds.")
    registry_auth: NonEmpty | None = Field(
        None, description="File of registry logins (Docker's config.json) on the node; blank: the worker's own user's."
    )
    max_processes: int = Field(4096, gt=0, description="Processes of one sandbox, where its task names no limit.")


class ApptainerRuntimeSection(Contract):
    """The backend `apptainer`."""

    program: NonEmpty | None = Field(None, description="Path of the program; blank: apptainer or singularity on PATH.")
    images_mb: int = Field(
        50_000, gt=0, description="Disk that converted images may take; the longest unused go when one is added."
    )


class WarmPoolSection(Contract):
    """Sandboxes that are made before they are needed."""

    max_idle: int = Field(
        4, ge=0, le=4096, description="Prepared sandboxes that may wait for a rollout; 0: none are made ahead."
    )
    max_starting: int = Field(4, ge=1, le=256, description="Sandboxes that are started at once, of all kinds.")
    idle_memory_mb: int | None = Field(
        None, gt=0, description="Memory that waiting sandboxes may hold together, by their limits; blank: not limited."
    )
    idle_s: float = Field(600.0, gt=0, description="Seconds that a sandbox waits for a rollout before it is given up.")
    snapshots_mb: int = Field(
        20_000,
        ge=0,
        description="Disk that snapshots of recipes may take; the longest unused go. 0: none are kept.",
    )


class RuntimesSection(Contract):
    """A node's sandboxes."""

    local: LocalRuntimeSection = Field(LocalRuntimeSection(), description="The backend local.")
    docker: DockerRuntimeSection = Field(DockerRuntimeSection(), description="The backend docker.")
    apptainer: ApptainerRuntimeSection = Field(ApptainerRuntimeSection(), description="The backend apptainer.")
    model_port: Port = Field(
        28080, description="Port on an offline sandbox's own loopback at which its harness finds the model."
    )
    egress_port: Port = Field(
        28081, description="Port there of the HTTP proxy that lets out what the network policy allows."
    )
    pool: WarmPoolSection = Field(WarmPoolSection(), description="Sandboxes made ahead, and snapshots.")

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.model_port == self.egress_port:
            raise ValueError(f"model_port and egress_port are both {self.model_port}; they are two doors")
        return self
