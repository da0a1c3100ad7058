"""Finds and reads the topology file; every mistake is named with its line."""

from __future__ import annotations

from pathlib import Path

from polarq.settings import DEFAULT_REDIS_URL, Settings
from polarq.topology.lines import read_topology
from polarq.topology.models import Topology
from polarq.topology.redis_address import with_tls

DEFAULT_FILE = Path("topology.yaml")


def topology_file(path: Path | None = None, settings: Settings | None = None) -> Path | None:
    """The file that describes the deployment: `path`, else POLARQ_TOPOLOGY, else ./topology.yaml; None: no file."""
    chosen = path or (settings or Settings.from_env()).topology_path
    if chosen is None and DEFAULT_FILE.is_file():
        return DEFAULT_FILE
    return chosen


def load_topology(path: Path | None = None, settings: Settings | None = None) -> Topology:
    """The deployment as the file says, else the defaults (one node, node0).

    Raises `InvalidTopology` with one line per mistake.
    """
    chosen = topology_file(path, settings)
    return Topology() if chosen is None else read_topology(chosen)


def redis_url(topology: Topology, settings: Settings) -> str:
    """The ledger's Redis: POLARQ_REDIS_URL, else the topology's, else loopback."""
    return with_tls(settings.redis_url or topology.redis.url or DEFAULT_REDIS_URL, topology.redis.tls_ca)


def broker_url(topology: Topology, settings: Settings) -> str:
    """The Redis of the Celery queues: the topology's `redis.broker_url`, else the ledger's."""
    if topology.redis.broker_url is None:
        return redis_url(topology, settings)
    return with_tls(topology.redis.broker_url, topology.redis.tls_ca)
