"""What a sandbox reaches: the doors that its network policy gives it, and what it was refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from polarq.contracts.sandbox import Denied
from polarq.contracts.specs import NetworkPolicy, RuntimeSpec
from polarq.settings import Settings
from polarq.topology import Node, Topology
from polarq_worker.network.denials import Denials
from polarq_worker.network.model_door import ProxyAddress
from polarq_worker.network.policy import own_services, proxy_address
from polarq_worker.network.relay import Door, EgressRules, Relay
from polarq_worker.network.way_out import WayOut
from polarq_worker.runtimes.base import Runtime

log = logging.getLogger("polarq.worker.network")


class SandboxNetwork:
    """One sandbox's, from `Networks.connect` until `close`. Online it has no doors, and is refused nothing."""

    def __init__(self, policy: NetworkPolicy, relay: Relay, model_url: str, egress_port: int) -> None:
        self.policy = policy
        """What is really enforced."""
        self._relay = relay
        self._model_url = model_url
        self._egress_port = egress_port
        self._model: Door | None = None
        self._egress: Door | None = None
        self._denials = Denials()

    @property
    def way_out(self) -> WayOut:
        """What the environment of its programs has to say of it."""
        if self.policy is NetworkPolicy.FULL:
            return WayOut()
        return WayOut(True, "" if self._egress is None else f"http://127.0.0.1:{self._egress_port}")

    def base_url(self, secret: str) -> str:
        """The model's address in the sandbox, as one rollout's harness is told it."""
        return f"{self._model_url}/s/{secret}"

    async def open(self, runtime: Runtime, model_port: int | None, rules: EgressRules | None) -> None:
        """The doors. Raises `RuntimeFault`; `close` is due in any case."""
        if model_port is not None:
            self._model = await self._opened(runtime, model_port, None)
        if rules is not None:
            self._egress = await self._opened(runtime, self._egress_port, rules)

    async def _opened(self, runtime: Runtime, port: int, rules: EgressRules | None) -> Door:
        return await self._relay.open(await runtime.open_door(port), rules)

    async def close(self) -> None:
        """No way out any more. What was refused is known from now on."""
        doors = [door for door in (self._model, self._egress) if door is not None]
        self._model = self._egress = None
        for denials in await asyncio.gather(*map(self._relay.close, doors)):
            self._denials.add(denials)

    @property
    def denied(self) -> list[Denied]:
        """Who asked for most first; of an open door, what is known of it by now."""
        known = self._known.counts.items()
        return [Denied(target=target, count=count) for target, count in sorted(known, key=lambda one: -one[1])]

    @property
    def denied_more(self) -> int:
        return self._known.more

    @property
    def _known(self) -> Denials:
        if self._egress is None:
            return self._denials
        return self._egress.denials


class Networks:
    """One node's: its relay, and what its sandboxes reach by it. `proxy` says where the relay reaches the node's proxy,
    and raises `RuntimeFault` where it cannot."""

    def __init__(
        self,
        node: Node,
        topology: Topology,
        settings: Settings,
        log_path: Path,
        proxy: Callable[[], ProxyAddress] | None = None,
    ) -> None:
        self._node = node
        self._proxy = proxy or partial(proxy_address, node)
        self.relay = Relay(log_path, self._proxy)
        self._closed_services = sorted(own_services(topology, settings))

    async def connect(
        self, runtime: Runtime, policy: NetworkPolicy, spec: RuntimeSpec, *, model: bool
    ) -> SandboxNetwork:
        """Gives a sandbox that was started what `policy` (as it is enforced) lets it reach; with `model`, the model
        too. Raises `RuntimeFault`."""
        settings = self._node.runtimes
        if policy is NetworkPolicy.FULL:
            return SandboxNetwork(policy, self.relay, self._node.proxy_url, settings.egress_port)
        self._proxy()
        network = SandboxNetwork(policy, self.relay, f"http://127.0.0.1:{settings.model_port}", settings.egress_port)
        port = settings.model_port if model else None
        rules = None
        if policy is not NetworkPolicy.NONE:
            rules = EgressRules(policy.value, spec.allowed_hosts, self._closed_services, port)
        try:
            await network.open(runtime, port, rules)
        except BaseException:
            with contextlib.suppress(asyncio.CancelledError):
                await network.close()
            raise
        return network

    async def aclose(self) -> None:
        await self.relay.aclose()
