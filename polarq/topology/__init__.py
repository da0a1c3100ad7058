"""One file describes a deployment; every command reads the same one."""

from polarq.topology.load import broker_url, load_topology, redis_url
from polarq.topology.models import InferenceEndpoint, Node, Topology

__all__ = ["InferenceEndpoint", "Node", "Topology", "broker_url", "load_topology", "redis_url"]
