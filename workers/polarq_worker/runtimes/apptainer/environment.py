"""The environment that programs of an instance start with: standard names, then what the image sets."""

from __future__ import annotations

from pathlib import Path

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.apptainer.program import Program
from polarq_worker.runtimes.apptainer.users import User
from polarq_worker.runtimes.base import SESSION_DIR

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NOT_OF_IMAGE = ("APPTAINER_", "SINGULARITY_", "PROMPT_COMMAND", "PS1", "HOME", "PWD", "SHLVL", "TERM", "_", "BASH_FUNC")


def standard(who: User) -> dict[str, str]:
    home = who.home or ("/root" if who.uid == 0 else SESSION_DIR)
    return {"LANG": "C.UTF-8", "TERM": "dumb", "PATH": PATH, "HOME": home, "SHELL": "/bin/bash"}


async def of_image(program: Program, instance: str, image: str, run_dir: Path) -> dict[str, str]:
    """What the image sets for its programs, as the program (which reads its scripts) has it. Raises `RuntimeFault`."""
    said = await program.call(
        "exec", "--cleanenv", "--pwd", "/", f"instance://{instance}", "env", "-0", run_dir=run_dir
    )
    if said.code != 0:
        raise RuntimeFault(f"image '{image}' runs no commands: {said.why}")
    pairs = (entry.decode("utf-8", "surrogateescape").partition("=") for entry in said.out.split(b"\0") if entry)
    environment = {name: text for name, _, text in pairs if not name.startswith(NOT_OF_IMAGE)}
    if environment.get("LANG") == "C":
        # The program's own, where the image has none.
        del environment["LANG"]
    return environment
