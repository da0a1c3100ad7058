"""Files that come back from a sandbox: what a task declares, and what its result says of each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from polarq.contracts.base import Contract

Path = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class ArtifactSpec(Contract):
    """A file, a folder, or a pattern of them in the sandbox that the harness ran in. They are collected once, at the
    rollout's end: after the harness and the evaluator, and likewise after a timeout, a failure or a cancellation."""

    path: Path
    """Relative ones are below `runtime.workdir`, or the session directory. `*`, `?` and `[...]` are patterns, `**` is
    any number of folders."""
    max_bytes: int | None = Field(None, gt=0)
    """Of all that it names; None: what the topology's `artifacts` section allows."""
    max_files: int | None = Field(None, gt=0)
    required: bool = False
    """Say so in the result when there is none."""

    @field_validator("path")
    @classmethod
    def _a_path(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("has a NUL byte")
        if ".." in value.split("/"):
            raise ValueError(f"'{value}' has '..' in it; give the path without")
        return value

    @property
    def is_pattern(self) -> bool:
        return any(letter in self.path for letter in "*?[\\")


class RefusedEntry(Contract):
    """Something in a collected folder that was left out."""

    path: str
    reason: str


class Artifact(Contract):
    """One collected file, or one folder as a tar archive; with a `problem` and no `where`, one that was not."""

    name: str
    """Its path in the sandbox, without the first slash; `logs/...` for the logs of commands."""
    kind: Literal["file", "folder", "log"] = "file"
    size: int = 0
    """Bytes, as it is stored."""
    sha256: str = ""
    where: str = ""
    """A path on the node's host, or an fsspec address."""
    files: int = 0
    """In a folder."""
    refused: list[RefusedEntry] = []
    refused_more: int = 0
    """Beyond those listed."""
    problem: str = ""
    """Why it is not here, or not whole."""
