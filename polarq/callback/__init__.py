"""Tells a trainer's address that its task has ended: checked, signed, retried, recorded.

The check of an address is light and runs where a task is submitted; what sends is in `polarq.callback.delivery` and
`polarq.callback.outbox`.
"""

from polarq.callback.address import AllowedHost, Target, check_callback_url, own_ports

__all__ = ["AllowedHost", "Target", "check_callback_url", "own_ports"]
