"""Where files that come back from sandboxes lie, how large they may be, and how long they are kept."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from polarq.contracts.base import Contract

NonEmpty = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class ArtifactsSection(Contract):
    """Files that come back with a rollout's result."""

    place: NonEmpty | None = Field(
        None,
        description="Folder, or fsspec address (s3://..., needs polarq[archive]), where they are put; blank: the "
        "folder artifacts in each node's state folder, on its own machine.",
    )
    max_bytes: int = Field(1 << 30, gt=0, description="Bytes of one rollout's files, all together.")
    max_bytes_each: int = Field(256 << 20, gt=0, description="Bytes of one file, or of one folder with all in it.")
    max_files: int = Field(10_000, gt=0, description="Files and folders of one rollout, those inside folders too.")
    logs: bool = Field(True, description="Whether the logs of a rollout's commands are among them.")
    keep_s: float = Field(
        7 * 24 * 3600.0,
        gt=0,
        description="Seconds that they are kept in a folder, where workers delete them; what lies at an fsspec address "
        "is deleted by that storage's own rules.",
    )
