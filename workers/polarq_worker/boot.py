"""The Celery bootstep that makes a worker a polarq node. The app names it; nobody imports it."""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import threading
from types import FrameType
from typing import Any

from celery import bootsteps
from celery import signals as celery_signals
from celery.apps.worker import _reload_current_worker  # type: ignore[attr-defined]  # stubs leave it out
from celery.exceptions import WorkerShutdown
from celery.worker import state

from polarq.errors import InvalidTopology, PolarqError
from polarq.settings import Settings
from polarq.topology import Node, Topology, load_topology
from polarq.topology.models import RESERVED_QUEUES
from polarq_worker import panel as _panel  # noqa: F401 - its commands are registered by being defined
from polarq_worker.node import NodeService
from polarq_worker.pool import EnginePool
from polarq_worker.submissions import Submissions

log = logging.getLogger("polarq.worker")

CONSUMER = "polarq_worker.consumer:Consumer"

SWITCH_S = 0.0005
"""How long a thread may keep the others from running Python, where the interpreter's default is 5 ms. The engine's loop
has to ask for its turn after each call that leaves the interpreter, hundreds of times a second; next to four threads
that compress or encode results it would get it 20 ms late each time."""

EX_CONFIG = 78
"""sysexits.h: something the operator has to change."""


class NodeStep(bootsteps.StartStopStep):
    """Starts the node before the worker takes its first message, and drains it before the pool stops."""

    name = "polarq.Node"
    requires = ("celery.worker.components:Hub", "celery.worker.components:Pool")

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self.service: NodeService | None = None
        self._told = 0

    def _count_signal(self, **_: Any) -> None:
        self._told += 1

    def create(self, worker: Any) -> None:
        """Chooses the node by its queue. Every worker also takes the queue that foreign clients submit to."""
        settings = Settings.from_env()
        try:
            topology = load_topology(settings=settings)
            node = choose_node(list(worker.app.amqp.queues.consume_from), topology, settings)
        except PolarqError as exc:
            _give_up(exc)
        worker.app.amqp.queues.select([node.id])
        worker.app.steps["consumer"].add(Submissions)
        user, at, host = worker.hostname.partition("@")
        if user == "celery":
            worker.hostname = f"{node.id}{at}{host}"
        self._made = (node, topology, settings)
        # Between a first signal and the drain, which is when the consumer has stopped, a second one is Celery's.
        celery_signals.worker_shutting_down.connect(self._count_signal, weak=False)
        worker.consumer_cls = CONSUMER
        # Mingle asks the other workers what was revoked, and waits a second for answers; the ledger knows that.
        worker.options["without_mingle"] = True

    def start(self, worker: Any) -> None:
        node, topology, settings = self._made
        if logging.getLogger("polarq").level == logging.NOTSET:
            # A line per rollout and per change of the node, whatever Celery's own log level is.
            logging.getLogger("polarq").setLevel(logging.INFO)
        pool = worker.pool
        if not isinstance(pool, EnginePool):
            _give_up(PolarqError("polarq needs its own pool; start the worker without -P"))
        sys.setswitchinterval(SWITCH_S)
        service = NodeService(worker.app, pool, node, topology, settings)
        try:
            pool.call(service.start())
        except PolarqError as exc:
            _give_up(exc)
        self.service = service
        pool.capacity = lambda: service.capacity
        if getattr(worker, "hub", None) is not None:
            pool.wake_with(lambda: worker.hub.call_soon(lambda: None))
        pool.awaited = service.awaited
        worker.app.rollout_runner = service.run_job
        worker.app.task_finisher = service.telling.tell
        worker.app.look_again = service.looks.again
        worker.app.server_clock = service.presence.clock
        pool.on_give_back = service.leaving
        pool.on_freed = service.looks.freed
        service.presence.on_superseded = lambda: _leave(pool)

    def stop(self, worker: Any) -> None:
        """Warm stop: drains. A second signal gives everything back at once."""
        if self.service is None:
            return
        service, pool = self.service, worker.pool
        grace_s = service.topology.gateway.drain_grace_s
        with _second_signal() as impatient:
            if self._told > 1:
                impatient.set()
            waiter = threading.Thread(target=pool.call, args=(service.drain(grace_s),), daemon=True)
            waiter.start()
            while waiter.is_alive():
                waiter.join(0.1)
                if impatient.is_set():
                    pool.call(service.release_all())
                    break
            waiter.join()
        if self._told or impatient.is_set():
            # SIGHUP asks for a new start when this one has ended; whoever said stop as well is not left with it.
            atexit.unregister(_reload_current_worker)
        pool.call(service.stop())

    def terminate(self, worker: Any) -> None:
        """Cold stop: gives everything back, then leaves."""
        atexit.unregister(_reload_current_worker)
        if self.service is not None:
            worker.pool.call(self.service.release_all())
            worker.pool.call(self.service.stop())


class _second_signal:  # noqa: N801 - used as a context
    """Sets its event when SIGTERM or SIGINT arrives meanwhile."""

    def __enter__(self) -> threading.Event:
        event = threading.Event()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():

            def note(_signal: int, _frame: FrameType | None) -> None:
                event.set()

            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, note)
        return event

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def choose_node(queues: list[str], topology: Topology, settings: Settings) -> Node:
    """The node this worker is: the queue given with -Q, else POLARQ_NODE_ID, else the topology's only node.

    Raises `InvalidTopology`.
    """
    named = [queue for queue in queues if queue not in RESERVED_QUEUES]
    if len(named) > 1:
        raise InvalidTopology("worker", [f"-Q names {len(named)} nodes ({', '.join(named)}); a worker is one node"])
    nodes = topology.gateway.nodes
    if not named and settings.node_id is None and len(nodes) > 1:
        listed = ", ".join(node.id for node in nodes)
        raise InvalidTopology("worker", [f"which node is this? start it with -Q NODE (one of {listed})"])
    node_id = named[0] if named else settings.node_id or nodes[0].id
    return topology.resolve(node_id)


def _leave(pool: EnginePool) -> None:
    """Stops the worker as a signal would."""
    state.should_stop = EX_CONFIG  # type: ignore[assignment]  # Celery's own signal handlers set numbers too
    pool.wake()


def _give_up(exc: PolarqError) -> Any:
    """One line for the operator, and an exit code that a supervisor can read."""
    # Celery has turned sys.stderr into a logger by now; this is for a person.
    stream = sys.__stderr__ or sys.stderr
    stream.write(f"polarq worker: {exc}\n")
    stream.flush()
    raise WorkerShutdown(EX_CONFIG)
