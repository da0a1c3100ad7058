"""Runs a user's agent; see `polarq_worker.harnesses.libraries.base`. Needs nothing but Python."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    asked = json.loads((FOLDER / "polarq_run.json").read_text("utf-8"))
    report: dict[str, Any] = {
        "entrypoint": asked["entrypoint"],
        "python": platform.python_version(),
        "version": importlib.metadata.version(asked["package"]),
    }
    _write(asked["report"], report)
    maker = _loaded("polarq_model", FOLDER / "polarq_model.py")
    given = {**asked["model"], "api_key": os.environ["OPENAI_API_KEY"]}
    if hasattr(maker, "default"):
        maker.default(**given)
    module, colon, function = asked["entrypoint"].partition(":")
    if not colon:
        _script(module, asked["args"])
        return
    # Made before the agent's modules are found where it works: a repository's `agents` or `openai` is not the library.
    model = maker.model(**given)
    sys.path[0] = os.getcwd()
    instruction = Path(asked["instruction"]).read_bytes().decode()
    report["result"] = _called(_function(module, function), instruction, model)
    _write(asked["report"], report)
    sys.stdout.write(f"{report['result']}\n")


def _script(path: str, arguments: list[str]) -> None:
    if not Path(path).is_file():
        sys.exit(f"entrypoint: there is no file {path} in {os.getcwd()}")
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


def _function(module: str, name: str) -> Any:
    if module.endswith(".py"):
        if not Path(module).is_file():
            sys.exit(f"entrypoint: there is no file {module} in {os.getcwd()}")
        sys.path[0] = str(Path(module).resolve().parent)
        loaded = _loaded(Path(module).stem, Path(module))
    else:
        loaded = importlib.import_module(module)
    function = getattr(loaded, name, None)
    if not callable(function):
        sys.exit(f"entrypoint: {module} has no function '{name}'")
    return function


def _loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        sys.exit(f"entrypoint: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _called(function: Any, instruction: str, model: Any) -> Any:
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    arguments: dict[str, Any] = {}
    if takes_all or "instruction" in parameters:
        arguments["instruction"] = instruction
    if takes_all or "model" in parameters:
        arguments["model"] = model
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as exc:
        sys.exit(f"entrypoint: the function may take 'instruction' and 'model' by name, and nothing else: {exc}")
    answer = function(**arguments)
    return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer


async def _awaited(answer: Any) -> Any:
    return await answer


def _write(path: str, report: dict[str, Any]) -> None:
    new = Path(f"{path}.new")
    new.write_text(json.dumps(report, default=str), "utf-8")
    new.replace(path)


if __name__ == "__main__":
    main()
