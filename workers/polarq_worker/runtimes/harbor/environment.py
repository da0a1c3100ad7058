"""Harbor's own side: finding an environment's class, making one, and its errors as ours."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault

PYTHON = (3, 12)
FROM_NAME = ("docker", "podman")
"""Those that find what they started by its session's name; others know it by an object that dies with its worker."""


class Ran(Protocol):
    @property
    def stdout(self) -> str | None: ...
    @property
    def return_code(self) -> int: ...


class Environment(Protocol):
    """What we use of one (Harbor's BaseEnvironment)."""

    async def start(self, force_build: bool) -> None: ...
    async def stop(self, delete: bool) -> None: ...
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Ran: ...
    async def upload_file(self, source_path: Path, target_path: str) -> None: ...
    async def upload_dir(self, source_dir: Path, target_dir: str) -> None: ...
    async def download_file(self, source_path: str, target_path: Path) -> None: ...


def missing() -> str:
    """Why there is no Harbor here; blank: there is."""
    if sys.version_info < PYTHON:
        return "the harbor package needs Python 3.12, and this worker runs " + ".".join(map(str, sys.version_info[:2]))
    if importlib.util.find_spec("harbor") is None:
        return (
            "the harbor package is not installed beside the worker (pip install harbor, with the environment's extra)"
        )
    return ""


def names() -> list[str]:
    return list(_module("harbor.environments.factory").EnvironmentFactory.registered_names())


def forbidden_keys() -> set[str]:
    """What a task must not hand to an environment: what we set ourselves, and what mounts the host."""
    base = _module("harbor.environments.base").BaseEnvironment
    return set(inspect.signature(base.__init__).parameters) | {"mounts_json", "volumes"}


def make(spec: RuntimeSpec, session_id: str, folder: Path) -> Environment:
    """Loads the provider's library; blocks. Raises `RuntimeFault`."""
    factory = _module("harbor.environments.factory").EnvironmentFactory
    kinds = _module("harbor.models.environment_type").EnvironmentType
    config = _module("harbor.models.task.config")
    paths = _module("harbor.models.trial.paths").TrialPaths
    options = {key: value for key, value in spec.kwargs.items() if key != "environment"}
    for name in ("environment", "trial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    cpus = int(spec.cpus) if spec.cpus is not None and spec.cpus.is_integer() else spec.cpus
    try:
        made: Environment = factory.create_environment(
            type=kinds(spec.kwargs["environment"]),
            environment_dir=folder / "environment",
            environment_name="polarq",
            session_id=session_id,
            trial_paths=paths(folder / "trial"),
            task_env_config=config.EnvironmentConfig(
                docker_image=spec.image,
                cpus=cpus,
                memory_mb=spec.memory_mb,
                storage_mb=spec.storage_mb,
                gpus=spec.gpus or None,
            ),
            **options,
        )
    except SystemExit as exc:
        # Its way of saying that credentials are missing.
        raise RuntimeFault(f"harbor's {spec.kwargs['environment']} cannot be used: {one_line(exc)}") from None
    except Exception as exc:
        raise RuntimeFault(f"harbor's {spec.kwargs['environment']} cannot be made: {one_line(exc)}") from exc
    return made


@asynccontextmanager
async def asking(what: str) -> AsyncIterator[None]:
    """Each provider has errors of its own; to us they are all the sandbox's."""
    try:
        yield
    except (RuntimeFault, TimeoutError):
        raise
    except Exception as exc:
        raise RuntimeFault(f"{what}: {one_line(exc)}") from exc
    except SystemExit as exc:
        raise RuntimeFault(f"{what}: {one_line(exc)}") from None


def one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:500] or type(exc).__name__


def handle_of(spec: RuntimeSpec, session_id: str) -> str:
    return json.dumps({"environment": spec.kwargs.get("environment", ""), "image": spec.image, "session": session_id})


def read_handle(handle: str) -> tuple[RuntimeSpec, str]:
    known = json.loads(handle)
    kwargs = {"environment": known["environment"]}
    return RuntimeSpec(backend="harbor", image=known["image"], kwargs=kwargs), str(known["session"])


def _module(name: str) -> Any:
    return importlib.import_module(name)
