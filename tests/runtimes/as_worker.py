"""What a worker does with its harnesses, as a program of its own: whoever starts it chooses its standard input.

    python -m tests.runtimes.as_worker BACKEND FOLDER

Runs the harness `shell` and every preset with a stub in place of its program, in one sandbox; prints what each said as
one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from polarq.contracts.specs import AgentSpec, RuntimeSpec
from polarq.contracts.task import Task
from polarq.registry import names, plugin
from polarq.testing.conformance.scenario import load
from polarq_worker.harnesses.base import Harness, HarnessContext, harness_env, run_harness
from polarq_worker.harnesses.preset import Preset
from polarq_worker.harnesses.programs.program import home_of
from polarq_worker.runtimes.base import Host, Runtime
from polarq_worker.runtimes.local import LocalRuntime

from .local_here import settings

LONG_S = 120.0
INSTRUCTION = "It is long. " * 250_000
"""Three megabytes."""
STUB = b"""#!/bin/sh
# How much comes before the end of its standard input, and which descriptors it was left.
wc -c
ls /proc/$$/fd
"""
GIT = b"""#!/bin/sh
pwd
"""
SHELL = {
    "waits for the end": ("cat >/dev/null; echo work; exit 0", False),
    "is fed": ("wc -c", True),
    "closes it unread": ("exec <&-; echo work", True),
    "has descriptors": ("ls /proc/$$/fd; readlink /proc/$$/fd/0", False),
}
"""Command of the harness `shell`, and whether it is fed."""


def sandbox(backend: str, folder: Path) -> Runtime:
    root, kept = folder / "root", folder / "kept"
    spec: dict[str, Any] = {"backend": backend, "workdir": "/polar/session/repo"}
    if backend == "docker":
        from polarq_worker.runtimes.docker.runtime import DockerRuntime

        from .docker_rig import IMAGE, host_of

        whole = RuntimeSpec.parse({**spec, "image": IMAGE})
        return DockerRuntime(whole, runtime_id="stdin", root=root, host=host_of(folder))
    if backend == "apptainer":
        from polarq_worker.runtimes.apptainer.runtime import ApptainerRuntime

        from .apptainer_here import IMAGE as SIF
        from .apptainer_here import apptainer_host

        whole = RuntimeSpec.parse({**spec, "image": str(SIF)})
        return ApptainerRuntime(whole, runtime_id="stdin", root=root, host=apptainer_host(kept))
    host = Host("node0", "1", kept, settings("bubblewrap" if backend == "isolated" else "none"))
    return LocalRuntime(RuntimeSpec.parse({**spec, "backend": "local"}), runtime_id="stdin", root=root, host=host)


def presets() -> dict[str, type[Preset]]:
    found = {name: plugin("harnesses", name) for name in names("harnesses")}
    return {name: made for name, made in found.items() if issubclass(made, Preset)}


async def main(backend: str, folder: Path) -> dict[str, Any]:
    runtime = sandbox(backend, folder)
    said: dict[str, Any] = {}
    try:
        await runtime.start()
        stubs = f"{runtime.layout.session_dir}/stubs"
        await runtime.put_bytes(GIT, f"{stubs}/git", 0o755)
        path = (await runtime.exec(f'printf %s "{stubs}:$PATH"', timeout_s=LONG_S)).stdout_text
        for name, (command, fed) in SHELL.items():
            spec = {"harness": "shell", "custom_shell": {"command": command}, "settings": {"instruction_on_stdin": fed}}
            said[name] = await ran(plugin("harnesses", "shell"), spec, runtime, path)
        for name, preset in presets().items():
            home = home_of(name, runtime.layout)
            await runtime.put_bytes(STUB, f"{home}/bin/{preset.program.bin}", 0o755)
            await runtime.put_bytes(b"image\n1.0\n/x\n", f"{home}/installed")
            said[name] = await ran(preset, {"harness": name, **load(name, preset.conformance).agent}, runtime, path)
    finally:
        await runtime.stop()
    return said


async def ran(harness: type[Harness], spec: dict[str, Any], runtime: Runtime, path: str) -> dict[str, Any]:
    task = Task.parse({"task_id": "t1", "instruction": INSTRUCTION, "agent": {**spec, "env": {"PATH": path}}})
    base = "http://127.0.0.1:9/s/secret"
    env = harness_env(task, rollout_id="t1.0", fencing_token=1, base_url=base, api_key="key", layout=runtime.layout)
    instruction = f"{runtime.layout.session_dir}/instruction.txt"
    context = HarnessContext(task, "t1.0", instruction, base, "key", runtime.layout, env)
    made = harness(AgentSpec.parse(spec))
    report = await run_harness(made, runtime, context, timeout_s=LONG_S)
    step = report.steps[-1]
    fed = made.steps(context)[-1].stdin
    return {
        "ok": report.ok,
        "why": f"{step.kind} {step.exit_code} {step.message} {step.stderr_tail}",
        "words": step.stdout_tail.split(),
        "fed": len(fed or b""),
    }


if __name__ == "__main__":
    told = json.dumps(asyncio.run(main(sys.argv[1], Path(sys.argv[2]))))
    sys.stdout.write(f"{told}\n")
