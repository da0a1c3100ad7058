"""A program that a preset needs in its sandbox, as one step of the sandbox's recipe.

The step (`install.sh`) takes a program that the image has in a supported version as it is, and installs the wanted
version elsewhere. It leaves `<session>/.polarq/programs/<harness>/` with bin/<name>, which runs it, and `installed`,
three lines: where it came from (`image`, `npm`, `python`), its version, its path.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import PrepareAction
from polarq.errors import HarnessFault
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.runtimes.base import SCRATCH_DIR, Runtime, SandboxLayout

_LOOK_S = 60.0


@dataclass(frozen=True, slots=True)
class Installed:
    """What there is of a program in a sandbox."""

    origin: str
    """`image`: it was there; `npm`, `python`: installed by its recipe."""
    version: str
    path: str


@dataclass(frozen=True, slots=True)
class Program:
    """See the module; `NpmProgram` and `PythonProgram` say where it comes from."""

    package: str
    """Its name in its registry."""
    bin: str
    """The command's name."""
    versions: Versions
    needs: tuple[str, ...] = ()
    """Commands that it calls, each named as the system's package of it."""
    kind: ClassVar[str]

    def install(self, harness: str, version: str, *, exact: bool) -> PrepareAction:
        """`exact`: the image's own will do in this version only, else in any of the range."""
        at_least, below = (version, "") if exact else (self.versions.at_least, self.versions.below)
        env = {
            "POLARQ_HARNESS": harness,
            "POLARQ_KIND": self.kind,
            "POLARQ_PACKAGE": self.package,
            "POLARQ_BIN": self.bin,
            "POLARQ_VERSION": version,
            "POLARQ_AT_LEAST": at_least,
            "POLARQ_BELOW": below,
            "POLARQ_NEEDS": " ".join(self.needs),
            **self._wants(),
        }
        return PrepareAction(type="exec", command=_script(), env=env)

    def _wants(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True, slots=True)
class NpmProgram(Program):
    """One of the npm registry. Where the image has no `node` of at least that version, a private one is brought."""

    node: str = "18"
    """Oldest Node that runs it; of what is no JavaScript, that installs it."""
    link: str = ""
    """What the package calls the command, where that is not `bin`."""
    finish: str = ""
    """A script of the package's own that has to run once it is there. Scripts that npm would run do not."""
    with_: tuple[str, ...] = ()
    """More packages, as npm takes them."""
    kind: ClassVar[str] = "npm"

    def _wants(self) -> dict[str, str]:
        named = {"POLARQ_NODE": self.node, "POLARQ_LINK": self.link, "POLARQ_FINISH": self.finish}
        return {**named, **({"POLARQ_WITH": "\n".join(self.with_)} if self.with_ else {})}


@dataclass(frozen=True, slots=True)
class PythonProgram(Program):
    """One of the Python index, in an environment of its own. With `bin="python"` it is a library: that environment's
    Python."""

    python: str = "3.11"
    """Oldest Python that runs it."""
    python_below: str = ""
    """First Python that is too new for it; empty: none is."""
    with_: tuple[str, ...] = ()
    """More requirements, as pip takes them."""
    kind: ClassVar[str] = "python"

    def _wants(self) -> dict[str, str]:
        return {
            "POLARQ_PYTHON": self.python,
            "POLARQ_PYTHON_BELOW": self.python_below,
            "POLARQ_WITH": "\n".join(self.with_),
        }


@dataclass(frozen=True, slots=True)
class PythonSource(Program):
    """One in Python that no registry ships: the image has it, installed from its source."""

    kind: ClassVar[str] = "python-source"


def home_of(harness: str, layout: SandboxLayout) -> str:
    """The folder that installing leaves."""
    return f"{layout.session_dir}/{SCRATCH_DIR}/programs/{harness}"


async def installed(runtime: Runtime, harness: str) -> Installed:
    """What the recipe left. Raises `HarnessFault`."""
    file = f"{home_of(harness, runtime.layout)}/installed"
    said = await runtime.exec(["cat", file], timeout_s=_LOOK_S, category=ExecCategory.SETUP)
    lines = said.stdout_text.splitlines()
    if not said.ok or len(lines) != 3:
        raise HarnessFault(
            f"the program of harness '{harness}' is not in the sandbox: what installs it has not been carried out"
            f" ({said.why})"
        )
    return Installed(*lines)


def found_on(path: str, action: PrepareAction) -> list[str]:
    """What an install step could take as it is where sandboxes have the machine's own programs, in words that differ
    once that program has moved or is another one; empty: nothing."""
    env = action.env or {}
    command = shutil.which(env.get("POLARQ_BIN", ""), path=path)
    if command is None:
        return []
    program = Path(command)
    sites = [str(site) for site in program.parents[1].glob("lib/python*/site-packages")]
    versions = [one.version for one in distributions(name=env["POLARQ_PACKAGE"], path=sites)]
    if program.name == "python":  # a library is taken as it is, or not at all
        return [command, *versions] if versions else []
    return [command, *_looks(program), *versions]


def _looks(path: Path) -> list[str]:
    seen = path.stat()
    return [str(path.resolve()), str(seen.st_mtime_ns), str(seen.st_size)]


@cache
def _script() -> str:
    return files("polarq_worker.harnesses.programs").joinpath("install.sh").read_text("utf-8")
