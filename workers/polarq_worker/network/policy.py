"""What a task's network policy comes to on this node, and what of the deployment stays closed to its sandboxes."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from polarq.contracts.specs import NetworkPolicy, RuntimeSpec
from polarq.errors import InvalidTask, RuntimeFault
from polarq.settings import Settings
from polarq.topology import Node, Topology, redis_url
from polarq.topology.redis_address import Sentinels
from polarq_worker.network.model_door import ProxyAddress
from polarq_worker.runtimes.base import Host, Runtime

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Where something that listens at every address is reached."""
_REDIS_PORT = 6379


def enforced(spec: RuntimeSpec, backend: type[Runtime], host: Host, default: NetworkPolicy) -> NetworkPolicy:
    """The policy that a sandbox really runs under.

    Where the backend cannot cut sandboxes off, a policy that the task itself asks for is refused (`InvalidTask`), and
    the topology's default comes to `full`.
    """
    policy = spec.policy(default)
    if policy is NetworkPolicy.FULL or backend.keeps_offline(host):
        return policy
    if spec.network_policy is None and spec.allow_internet and spec.network != "none":
        return NetworkPolicy.FULL
    if spec.network_policy is not None:
        key = "network_policy"
    else:
        key = "network" if spec.allow_internet else "allow_internet"
    raise InvalidTask(
        "runtime",
        [
            f"{key}: runtime '{spec.import_path or spec.backend}' cannot cut sandboxes off the network on this node"
            f" (asked for: {policy}); see 'polarq doctor' there, choose another backend, or network_policy 'full'"
        ],
    )


def proxy_address(node: Node) -> ProxyAddress:
    """Where this machine reaches a proxy that its worker did not start. Raises `RuntimeFault`."""
    if node.proxy.unix_socket:
        return ProxyAddress(path=str(Path(node.proxy.unix_socket).expanduser()))
    if node.proxy.mode == "embedded" or node.host not in _EVERYWHERE or not node.public_url.strip():
        return ProxyAddress(_EVERYWHERE.get(node.host, node.host), node.port)
    parts = urlsplit(node.proxy_url)
    if parts.scheme != "http" or parts.hostname is None:
        raise RuntimeFault(
            f"the proxy at {node.proxy_url} cannot be reached from offline sandboxes: name the address that it listens"
            " on in the node's host and port, or in proxy.unix_socket"
        )
    return ProxyAddress(parts.hostname, parts.port or 80)


def own_services(topology: Topology, settings: Settings) -> frozenset[tuple[str, int]]:
    """(host, port) of what this deployment listens on or talks to, as far as the topology says."""
    redis = [redis_url(topology, settings), topology.redis.broker_url, topology.redis.payload_url]
    found = {address for url in redis if url for address in _redis_addresses(url)}
    for node in topology.gateway.nodes:
        found |= {address for addresses in node.listens_on.values() for address in addresses}
        found |= {address for endpoint in node.endpoints for address in _web_address(endpoint.base_url)}
        found |= {address for model in node.model_pool for address in _web_address(model.base_url)}
    return frozenset((host.lower().strip("[]").removesuffix("."), port) for host, port in found)


def _redis_addresses(url: str) -> list[tuple[str, int]]:
    try:
        sentinels = Sentinels.parse(url)
        parts = urlsplit(url)
        if sentinels is not None:
            return list(sentinels.hosts)
        return [(parts.hostname, parts.port or _REDIS_PORT)] if parts.hostname else []
    except ValueError:
        return []


def _web_address(url: str) -> list[tuple[str, int]]:
    try:
        parts = urlsplit(url)
        return [(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))] if parts.hostname else []
    except ValueError:
        return []
