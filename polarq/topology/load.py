"""Finds and reads the topology file; every mistake is named with its line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from polarq.errors import InvalidTopology
from polarq.settings import DEFAULT_REDIS_URL, Settings
from polarq.topology.models import Topology

DEFAULT_FILE = Path("topology.yaml")


def load_topology(path: Path | None = None, settings: Settings | None = None) -> Topology:
    """The deployment: `path`, else POLARQ_TOPOLOGY, else ./topology.yaml, else the defaults (one node, node0).

    Raises `InvalidTopology` with one line per mistake.
    """
    chosen = path or (settings or Settings.from_env()).topology_path
    if chosen is None:
        if not DEFAULT_FILE.is_file():
            return Topology()
        chosen = DEFAULT_FILE
    return Topology.parse(read_yaml(chosen), what=str(chosen), error=InvalidTopology)


def read_yaml(path: Path) -> Mapping[str, Any]:
    what = f"topology file {path}"
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InvalidTopology(what, ["there is no such file"]) from None
    except OSError as exc:
        raise InvalidTopology(what, [f"cannot be read: {exc.strerror}"]) from None
    except UnicodeDecodeError as exc:
        raise InvalidTopology(what, [f"is not UTF-8 text (byte {exc.start})"]) from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise InvalidTopology(what, [f"is not YAML: {' '.join(str(exc).split())}"]) from None
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InvalidTopology(what, ["must hold a mapping at its top level"])
    return data


def redis_url(topology: Topology, settings: Settings) -> str:
    """The ledger's Redis: POLARQ_REDIS_URL, else the topology's, else loopback."""
    return settings.redis_url or topology.redis.url or DEFAULT_REDIS_URL


def broker_url(topology: Topology, settings: Settings) -> str:
    """The Redis of the Celery queues: the topology's `redis.broker_url`, else the ledger's."""
    return topology.redis.broker_url or redis_url(topology, settings)
