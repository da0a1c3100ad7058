"""A recipe: all that a prepared sandbox is made of, and its hash. Equal hashes are equal sandboxes.

In the hash: the backend; the image (its digest where the backend can say it; where there is none, the machine's own
program that the harness may take as it is); harness set-up and prepare actions with the content of what they upload;
what polarq does to the prepared tree; the variables, the user, the limits, and whether it has a network. Not in it:
anything of a rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarq.contracts.specs import NetworkPolicy, PrepareAction, RuntimeSpec
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.topology import Node, Topology
from polarq_worker.harnesses.base import Harness
from polarq_worker.harnesses.programs.program import found_on
from polarq_worker.network.policy import enforced
from polarq_worker.network.way_out import WayOut
from polarq_worker.runtimes.base import Host, Runtime
from polarq_worker.runtimes.create import usable_class
from polarq_worker.warm.finish import FinishStep, finish_steps
from polarq_worker.warm.uploads import Uploads

_VERSION = 1
"""Of what a recipe means: a snapshot of another one is made anew."""
_NOT_MADE_OF = {"prepare", "eval_prepare", "network_policy", "allowed_hosts", "scrub_history"}
"""Fields of a spec that are in the hash in another form, or change nothing of what is prepared."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """See the module. `key` is the hash."""

    key: str
    runtime: type[Runtime]
    spec: RuntimeSpec
    setup: tuple[PrepareAction, ...] = ()
    """The harness's own: they may upload from anywhere."""
    actions: tuple[PrepareAction, ...] = ()
    finish: tuple[FinishStep, ...] = ()
    policy: NetworkPolicy = NetworkPolicy.FULL
    """What can really be enforced."""

    @property
    def has_work(self) -> bool:
        """Whether anything is done after the start."""
        return bool(self.setup or self.actions or self.finish)

    @property
    def online(self) -> bool:
        """Whether its rollouts run with the machine's network."""
        return self.policy is NetworkPolicy.FULL

    @property
    def prepared_online(self) -> bool:
        """Preparing may fetch things, except where the task says that nothing of it ever may."""
        return self.online or self.spec.allow_internet

    @property
    def made_with(self) -> RuntimeSpec:
        """The spec of its sandboxes: one that is cut off has no variables of proxies that it cannot reach. What
        prepares it online has them."""
        env = WayOut(cut_off=not self.online).stripped(self.spec.env)
        return self.spec if env == self.spec.env else self.spec.model_copy(update={"env": env})

    @property
    def memory_mb(self) -> int:
        return self.spec.memory_mb or 0


class Recipes:
    """One node's. Tasks need to have a runtime here (`with_runtime`)."""

    def __init__(self, topology: Topology, host: Host) -> None:
        self.uploads = Uploads()
        self._topology = topology
        self._host = host

    async def of_agent(self, task: Task, harness: Harness) -> Recipe:
        """Of the sandbox that the harness runs in. Raises `UnknownPlugin`, `InvalidTask`, `RuntimeFault`."""
        spec = _spec(task)
        return await self.of(spec, spec.prepare, setup=harness.recipe(), finish=finish_steps(task, spec))

    async def of_evaluator(self, task: Task) -> Recipe:
        """Of a fresh one that the evaluator asks for. Raises as `of_agent`."""
        # Never one that a rollout has used: what an agent left in it would grade another's work.
        spec = _spec(task).model_copy(update={"reuse": False})
        actions = spec.prepare if spec.eval_prepare is None else spec.eval_prepare
        return await self.of(spec, actions, finish=finish_steps(task, spec))

    async def of(
        self,
        spec: RuntimeSpec,
        actions: Sequence[PrepareAction],
        *,
        setup: Sequence[PrepareAction] = (),
        finish: Sequence[FinishStep] = (),
    ) -> Recipe:
        # First, so that nothing is read that the task may not name.
        runtime = usable_class(spec, self._topology.security, self._host)
        policy = enforced(spec, runtime, self._host, self._topology.security.default_network_policy)
        image = await runtime.resolve_image(spec, self._host)
        uploaded = [Path(action.source) for action in [*setup, *actions] if action.source is not None]
        digests = await asyncio.to_thread(self._digests, uploaded) if uploaded else {}
        path = runtime.machine_path(spec)
        programs = await asyncio.to_thread(lambda: [found_on(path, action) for action in setup]) if path else []
        made_of = {
            "version": _VERSION,
            "class": f"{runtime.__module__}:{runtime.__qualname__}",
            "spec": spec.model_dump(mode="json", exclude=_NOT_MADE_OF),
            "image": image,
            **({"programs": programs} if any(programs) else {}),
            "network": [policy is NetworkPolicy.FULL, spec.allow_internet],
            "setup": [_action(action, digests) for action in setup],
            "actions": [_action(action, digests) for action in actions],
            "finish": [step.identity for step in finish],
        }
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
        return Recipe(key, runtime, spec, tuple(setup), tuple(actions), tuple(finish), policy)

    async def again(self, recipe: Recipe) -> Recipe:
        """The same things, as they are now: files on disk may be others. Raises as `of_agent`."""
        return await self.of(recipe.spec, recipe.actions, setup=recipe.setup, finish=recipe.finish)

    def _digests(self, sources: Sequence[Path]) -> dict[str, str]:
        return {str(source): self.uploads.digest(source) for source in sources}


def with_runtime(task: Task, node: Node) -> Task:
    """The task with the runtime that it has on this node: its own, or the node's; either one's environment counts."""
    return task if task.runtime is not None else task.model_copy(update={"runtime": node.default_runtime})


def _spec(task: Task) -> RuntimeSpec:
    if task.runtime is None:
        raise InvalidTask("runtime", ["the task names none, and the node has no default_runtime"])
    return task.runtime


def _action(action: PrepareAction, digests: dict[str, str]) -> dict[str, Any]:
    if action.source is not None:
        # Where the content lies is no part of what it makes.
        return {"type": action.type, "target": action.target, "content": digests[str(Path(action.source))]}
    return action.model_dump(mode="json")
