"""A command as a folder of files that inside.sh runs, and what that script answers as a result."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from polarq.contracts.rollout import ExecKind
from polarq_worker.runtimes.base import ExecResult


def write_order(order: Path, command: str | Sequence[str], env: Mapping[str, str], stdin: bytes | None) -> Path:
    """Makes the folder on the host: nothing of a command is an argument anywhere (blocks)."""
    order.mkdir(parents=True)
    pairs = (f"{name}={text}" for name, text in env.items())
    (order / "env").write_bytes(b"".join(os.fsencode(pair) + b"\0" for pair in pairs))
    (order / "stdin").write_bytes(stdin or b"")
    if isinstance(command, str):
        (order / "script").write_bytes(command.encode("utf-8", "surrogateescape"))
    else:
        (order / "argv").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in command))
    return order


def result_of(answer: dict[str, list[str]], duration_s: float, folder: str, command: str) -> ExecResult:
    kind, code = answer["polarq"][0], int(answer["polarq"][1])
    refused = {
        "no-folder": f"there is no folder '{folder}' to run in",
        "no-program": f"there is no program '{command}' (or the interpreter it names is missing)",
        "lost": "the sandbox has no room for a command's output",
    }.get(kind)
    if refused is not None:
        return ExecResult(ExecKind.COULD_NOT_START, message=refused, duration_s=duration_s)
    out, err = (answer.get(stream, ["0", "-", "-"]) for stream in ("out", "err"))
    timed_out = kind == "timed-out"
    return ExecResult(
        {"exited": ExecKind.EXITED, "signalled": ExecKind.SIGNALLED, "timed-out": ExecKind.TIMED_OUT}[kind],
        exit_code=code if kind == "exited" else None,
        signal=code if kind == "signalled" else None,
        duration_s=duration_s,
        stdout=_joined(*out),
        stderr=_joined(*err),
        stdout_bytes=int(out[0]),
        stderr_bytes=int(err[0]),
        truncated=out[2] != "-" or err[2] != "-",
        message="some of its processes have not died yet" if timed_out and code else "",
    )


def _joined(size: str, head: str, tail: str) -> bytes:
    if tail == "-":
        return decoded(head)
    first, last = decoded(head), decoded(tail)
    return first + f"\n[... {int(size) - len(first) - len(last)} bytes left out ...]\n".encode() + last


def decoded(text: str) -> bytes:
    return b"" if text == "-" else base64.b64decode(text)
