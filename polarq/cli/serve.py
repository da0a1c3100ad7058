"""`polarq serve`: the HTTP shim."""

from __future__ import annotations
