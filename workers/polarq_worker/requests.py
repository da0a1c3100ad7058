"""What Celery shows of a job. Arguments of a submission hold the instruction; monitors get none of it."""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request


class QuietRequest(Request):
    """A Celery request whose arguments are not shown, whatever its sender put into the headers."""

    def __init__(self, message: Any, *args: Any, headers: Any = None, **kwargs: Any) -> None:
        given = message.headers if headers is None else headers
        quiet = {**given, "argsrepr": "(<task>)", "kwargsrepr": "{}"}
        super().__init__(message, *args, headers=quiet, **kwargs)
