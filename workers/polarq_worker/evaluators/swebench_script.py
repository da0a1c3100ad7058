"""The evaluation script of a SWE-bench instance, and its log.

The log is text in which the code under test has a voice, too. So the lines that mark the tests' output carry a number
of this run's own in place of the package's, and what looks like the package's in the log is somebody else's.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field

from polarq.contracts.swebench import SwebenchConfig

MARK = ">>>>> "
START, END = f"{MARK}Start Test Output", f"{MARK}End Test Output"
EXIT_CODE = f"{MARK}Test Exit Code"
_PATHS = re.compile(r"^diff --git a/(.+?) b/(.+)$", re.MULTILINE)
_NEW = re.compile(r"^diff --git a/(.+?) b/.+\nnew file mode", re.MULTILINE)
_HERE = "POLARQ_TEST_PATCH_ENDS_HERE"


def files_of_patch(test_patch: str) -> list[str]:
    """The files that a test patch touches."""
    return sorted({path for pair in _PATHS.findall(test_patch) for path in pair})


@dataclass(frozen=True)
class EvalScript:
    """One run's."""

    config: SwebenchConfig
    setting: Collection[str] = ()
    """Variables that the script has until the tests begin: a project's tests may be about what they change."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def text(self) -> str:
        whole = self.config.instance.eval_script or _made(self.config)
        lines: list[str] = []
        for line in whole.splitlines():
            if START in line and self.setting:
                lines += [f"unset {' '.join(self.setting)}", line]
            elif END in line:
                # As swebench.harness.utils.record_test_exit_code: the script itself ends by resetting the tests.
                lines += ["SWEBENCH_TEST_EXIT_CODE=$?", line, f'echo "{EXIT_CODE}: $SWEBENCH_TEST_EXIT_CODE"']
            else:
                lines.append(line)
        return "\n".join(lines).replace(MARK, f">>>>>{self.nonce} ") + "\n"

    def log(self, printed: str) -> str:
        """What the package is to read."""
        return printed.replace(MARK, ">>>>- ").replace(f">>>>>{self.nonce} ", MARK)

    def ran(self, printed: str) -> str:
        """The tests' own output; blank where they did not run to their end."""
        _, began, rest = printed.partition(f">>>>>{self.nonce} Start Test Output")
        inside, ended, _ = rest.partition(f">>>>>{self.nonce} End Test Output")
        return inside if began and ended else ""


def _made(config: SwebenchConfig) -> str:
    """In the shape of the package's own scripts, for rows that have none. It is run in `repo_dir`."""
    instance = config.instance
    base = instance.base_commit or "HEAD"
    new = set(_NEW.findall(instance.test_patch))
    old = " ".join(shlex.quote(path) for path in files_of_patch(instance.test_patch) if path not in new)
    reset = f"git -c safe.directory='*' checkout {shlex.quote(base)} -- {old}" if old else "true"
    apply = f"git -c safe.directory='*' apply -v - <<'{_HERE}'\n{instance.test_patch.rstrip()}\n{_HERE}"
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            reset,
            *([apply] if instance.test_patch.strip() else []),
            f": '{START}'",
            config.test_command or "",
            f": '{END}'",
            reset,
        ]
    )
