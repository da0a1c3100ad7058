"""What the environment says, read once and typed. Nothing else in polarq reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment of a polarq process.

    | variable | meaning |
    | --- | --- |
    | `POLARQ_TOPOLOGY` | path of the topology file (else `./topology.yaml` when present, else built-in defaults) |
    | `POLARQ_REDIS_URL` | the ledger's, store's and broker's Redis; wins over the topology's `redis.url` |
    | `POLARQ_PROXY_REDIS_URL` | how the proxy that a worker starts reaches the same Redis: a user of its own |
    | `POLARQ_NODE_ID` | this worker's node, when `-Q` does not say it |
    | `POLARQ_TOKEN` | bearer token of the HTTP shim, of a proxy's operator's side and of all that its /health says |
    | `POLARQ_URL` | address of the HTTP shim, for the command line |
    | `POLARQ_CALLBACK_SECRET` | key that signs callbacks |
    | `POLARQ_STATE_DIR` | where a node keeps sandboxes, logs and spooled results (default `~/.polarq`) |
    """

    topology_path: Path | None
    redis_url: str | None
    node_id: str | None
    token: str | None
    shim_url: str | None
    callback_secret: str | None
    state_dir: Path
    proxy_redis_url: str | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        values = os.environ if env is None else env

        def text(name: str) -> str | None:
            return values.get(name, "").strip() or None

        topology = text("POLARQ_TOPOLOGY")
        state = text("POLARQ_STATE_DIR")
        return cls(
            topology_path=Path(topology) if topology else None,
            redis_url=text("POLARQ_REDIS_URL"),
            node_id=text("POLARQ_NODE_ID"),
            token=text("POLARQ_TOKEN"),
            shim_url=text("POLARQ_URL"),
            callback_secret=text("POLARQ_CALLBACK_SECRET"),
            state_dir=Path(state).expanduser() if state else Path.home() / ".polarq",
            proxy_redis_url=text("POLARQ_PROXY_REDIS_URL"),
        )
