"""Finds plug-ins by name: harnesses, runtimes, evaluators, builders, dialects, engines.

A plug-in is one entry-point line of an installed package, in the group `polarq.<kind>`. The core names none. An import
path in a task (Polar's `import_path`) is honoured only for modules that the topology allows, because whoever can submit
a task could otherwise run code of his choice on a node.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from polarq.errors import UnknownPlugin

Kind = Literal["harnesses", "runtimes", "evaluators", "builders", "dialects", "engines"]

_SINGULAR: dict[str, str] = {
    "harnesses": "harness",
    "runtimes": "runtime",
    "evaluators": "evaluator",
    "builders": "builder",
    "dialects": "dialect",
    "engines": "engine",
}


def names(kind: Kind) -> list[str]:
    """Names of the installed plug-ins of a kind, sorted."""
    return sorted(_installed(kind))


def plugin(kind: Kind, name: str) -> type[Any]:
    """The class behind `name`. Raises `UnknownPlugin` when it is missing, given twice, or cannot be loaded."""
    found = _installed(kind).get(name)
    what = f"{_SINGULAR[kind]} '{name}'"
    if not found:
        known = ", ".join(names(kind)) or "none"
        raise UnknownPlugin(f"{what} is not installed here (installed: {known}); install its package on the node")
    if len(found) > 1:
        values = " and ".join(sorted(entry.value for entry in found))
        raise UnknownPlugin(f"{what} is given by {values}; uninstall one of them")
    return _class(what, found[0])


def imported(path: str, allowed_modules: Sequence[str]) -> type[Any]:
    """The class at `module:Class` (or `module.Class`), if the module, or one above it, is in `allowed_modules`.

    Raises `UnknownPlugin` otherwise; nothing of a module that is not allowed is imported.
    """
    module, separator, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not separator or not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise UnknownPlugin(f"import path '{path}' is not of the form 'module:Class'")
    if not any(module == allowed or module.startswith(f"{allowed}.") for allowed in allowed_modules):
        raise UnknownPlugin(
            f"import path '{path}' is not allowed here; add '{module}' to security.allowed_modules of the topology"
        )
    what = f"import path '{path}'"
    try:
        value = getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise UnknownPlugin(f"{what}: module '{module}' has no '{attribute}'") from None
    except (Exception, SystemExit) as exc:
        raise UnknownPlugin(f"{what} cannot be loaded: {_one_line(exc)}") from exc
    return _checked(what, value)


@functools.cache
def _installed(kind: Kind) -> dict[str, list[EntryPoint]]:
    by_name: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=f"polarq.{kind}"):
        # An editable install beside its wheel lists the same line twice: the same value is the same plug-in.
        by_name.setdefault(entry.name, {})[entry.value] = entry
    return {name: list(entries.values()) for name, entries in by_name.items()}


def _class(what: str, entry: EntryPoint) -> type[Any]:
    try:
        value = entry.load()
    except ModuleNotFoundError as exc:
        raise UnknownPlugin(f"{what} needs module '{exc.name}', which is not installed on this node") from exc
    except (Exception, SystemExit) as exc:  # a script that was named by mistake ends its process
        raise UnknownPlugin(f"{what} ({entry.value}) cannot be loaded: {_one_line(exc)}") from exc
    return _checked(what, value)


def _checked(what: str, value: Any) -> type[Any]:
    if not isinstance(value, type):
        raise UnknownPlugin(f"{what} is not a class")
    return value


def _one_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"
