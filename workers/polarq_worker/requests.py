"""What Celery shows of a job. Arguments of a submission hold the instruction; monitors get none of it."""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request


class QuietRequest(Request):
    """A Celery request whose arguments are not shown, whatever its sender put into the headers."""

    def __init__(self, message: Any, **kwargs: Any) -> None:
        given = kwargs.pop("headers", None) or message.headers
        super().__init__(message, headers={**given, "argsrepr": "(<task>)", "kwargsrepr": "{}"}, **kwargs)
