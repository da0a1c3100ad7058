"""Local sandboxes for tests, with and without walls."""

from __future__ import annotations

from polarq import bubblewrap
from polarq.topology.runtimes import RuntimesSection

from ..needs import not_here


def settings(isolation: str, *visible: str) -> RuntimesSection:
    return RuntimesSection.parse({"local": {"isolation": isolation, "visible": list(visible)}})


def needs_bubblewrap() -> None:
    if why := bubblewrap.why_not():
        not_here(why)
