"""What the presets of agent libraries share: the user's code runs in the library's own environment, and is given the
model as that library takes it.

    agent: {harness: langchain, settings: {entrypoint: "agent.py:solve"}}

`entrypoint` is looked for where the agent works:

- `module:function` or `file.py:function`: called with `instruction` (a text) and `model` (the library's own object), as
  far as it takes them by name; it may be async. What it returns is kept;
- `file.py`: run as a script, with the instruction on standard input and in POLARQ_INSTRUCTION_FILE, and the usual
  variables (OPENAI_BASE_URL, OPENAI_API_KEY and their like; POLARQ_MODEL is the model's name).

To add a library: a class below `LibraryPreset`, an entry point, and beside it a file for the sandbox with the function
`model(name, base_url, api_key, dialect)` (see `inside`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from pydantic import field_validator

from polarq.contracts.rollout import StepReport
from polarq.contracts.specs import PrepareAction
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.runtimes.base import Runtime, SandboxLayout

INSIDE = Path(str(files("polarq_worker.harnesses.libraries.inside")))
REPORT = "run.json"
MAX_REPORT_BYTES = 8 * 1024 * 1024


class LibrarySettings(PresetSettings):
    """`agent.settings` of a library's preset."""

    entrypoint: str
    """`module:function`, `file.py:function`, or `file.py`."""
    args: list[str] = []
    """Of a script."""
    requirements: list[str] = []
    """What the code needs beside the library, as pip takes it. A library that the image has is used if it has them."""

    @field_validator("entrypoint")
    @classmethod
    def _names_something(cls, value: str) -> str:
        module, colon, function = value.partition(":")
        if not module.strip() or (colon and not function.isidentifier()) or not (colon or value.endswith(".py")):
            raise ValueError(f"'{value}' is neither module:function, file.py:function nor file.py")
        return value


class LibraryPreset(Preset):
    """See the module."""

    program: ClassVar[PythonProgram]
    settings_class: ClassVar[type[PresetSettings]] = LibrarySettings
    kept: ClassVar[tuple[str, ...]] = (REPORT,)
    maker: ClassVar[Path | None] = None
    """The file that makes the library's model, where that does not ship with polarq."""
    settings: LibrarySettings

    def recipe(self) -> Sequence[PrepareAction]:
        program = replace(self.program, with_=(*self.program.with_, *self.settings.requirements))
        return (program.install(self.name, self.version, exact=self.settings.version is not None),)

    def command(self, context: HarnessContext) -> Sequence[str]:
        return [f"{self.folder(context.layout)}/polarq_run.py"]

    def stdin(self, context: HarnessContext) -> bytes:
        return context.task.instruction.encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {"POLARQ_MODEL": self.model, "PYTHONUNBUFFERED": "1"}

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        asked = {
            "entrypoint": self.settings.entrypoint,
            "args": self.settings.args,
            "package": self.program.package,
            "instruction": context.instruction_path,
            "report": self._report(context.layout),
            "model": {"name": self.model, "base_url": context.base_url, "dialect": self.dialect},
        }
        maker = self.maker or INSIDE / f"{self.name}.py"
        return {
            f"{self.folder(context.layout)}/polarq_run.json": as_json(asked),
            f"{self.folder(context.layout)}/polarq_run.py": (INSIDE / "polarq_run.py").read_bytes(),
            f"{self.folder(context.layout)}/polarq_model.py": maker.read_bytes(),
        }

    async def results(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> Mapping[str, Any]:
        """What the function returned, and the versions that it ran with."""
        kept = runtime.host_log_dir / "agent" / REPORT
        kept.parent.mkdir(parents=True, exist_ok=True)
        await runtime.get_file(self._report(context.layout), kept, MAX_REPORT_BYTES)
        said = json.loads(kept.read_bytes())
        return {key: said[key] for key in ("python", "result") if key in said}

    def _report(self, layout: SandboxLayout) -> str:
        return f"{self.folder(layout)}/{REPORT}"
