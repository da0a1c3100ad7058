"""The program `polarq`: runs one command and ends with its exit code."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code. Bad usage is one line on stderr."""
    if sys.stdout is None:  # started with its output closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - as long as the program
    try:
        return _parsed(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _parsed(arguments: list[str] | None) -> int:
    # Here, so that Ctrl-C while it loads is as quiet as later.
    import typer

    from polarq.cli.app import USAGE_ERROR, app
    from polarq.cli.outcome import ExitCode, complain, quiet_stdout

    try:
        code = app(arguments, prog_name="polarq", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        quiet_stdout()
        return ExitCode.CLOSED_PIPE
    except SystemExit as exc:
        if exc.code == 1:
            # Outside standalone mode the parser leaves like this only when the pipe of its help was closed.
            quiet_stdout()
            return ExitCode.CLOSED_PIPE
        raise
    except USAGE_ERROR as exc:
        path = getattr(getattr(exc, "ctx", None), "command_path", "polarq")
        complain(f"{exc.format_message().rstrip('.')} (see {path} --help)")  # type: ignore[attr-defined]
        return ExitCode.USAGE


def run() -> NoReturn:
    """The entry point."""
    sys.exit(main())
