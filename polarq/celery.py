"""The Celery app. `celery -A polarq` finds `app` here.

Settings are made lazily, from the environment and the topology, when the app first needs them: importing reads nothing.
The values and why each one is what it is were measured on celery 5.7 and kombu 5.7 with Redis.
"""

from __future__ import annotations

from typing import Any

import click
from celery import Celery

from polarq.client.deployment import RUN_ROLLOUT, SUBMIT_QUEUE, SUBMIT_ROLLOUT
from polarq.errors import InvalidTopology, LedgerUnavailable
from polarq.ledger.keys import PRIORITY_STEPS, Keys
from polarq.ledger.refusal import unavailable
from polarq.settings import Settings
from polarq.topology import Topology, broker_url, load_topology, redis_url
from polarq.topology.redis_address import Sentinels

WORKER_STEP = "polarq_worker.boot:NodeStep"
WORKER_POOL = "polarq_worker.pool:EnginePool"


def celery_settings(topology: Topology | None = None, settings: Settings | None = None) -> dict[str, Any]:
    """Celery's settings for a deployment (from the environment when not given)."""
    settings = settings or Settings.from_env()
    topology = topology or load_topology(settings=settings)
    prefix = Keys(topology.redis.prefix).celery
    broker, broker_options = _reached(broker_url(topology, settings))
    results, results_options = _reached(redis_url(topology, settings))
    return {
        "broker_url": broker,
        "broker_use_ssl": broker_options.pop("tls", None),
        "result_backend": results,
        "redis_backend_use_ssl": results_options.pop("tls", None),
        # Jobs wait on one asyncio engine. Its capacity is live; this is only Celery's own start value.
        "worker_pool": WORKER_POOL,
        "worker_concurrency": 1,
        # A message is a doorbell: it is gone once heard, and the ledger finds what was not heard. Late acknowledgement
        # would redeliver on every broken connection, and a refused reconnect with unacked messages ends the worker.
        "task_acks_late": False,
        "worker_disable_prefetch": True,
        "worker_prefetch_multiplier": 1,
        "task_reject_on_worker_lost": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "visibility_timeout": 6 * 3600,
            "unacked_restore_interval": 10,
            "unacked_restore_throttle": 1,
            "global_keyprefix": prefix,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,
            "priority_steps": list(PRIORITY_STEPS),
            "queue_order_strategy": "round_robin",
            **broker_options,
        },
        "task_default_queue": SUBMIT_QUEUE,
        "task_create_missing_queues": True,
        "task_publish_retry": True,
        "task_publish_retry_policy": {"max_retries": 5, "interval_start": 0, "interval_step": 0.2, "interval_max": 1},
        "task_serializer": "json",
        "accept_content": ["json"],
        "result_serializer": "json",
        "task_protocol": 2,
        # The ledger is the truth; what Celery's own result says is decoration, and is tried for about five minutes.
        "task_ignore_result": False,
        "result_expires": int(topology.retention.result_s),
        "result_extended": False,
        "result_backend_always_retry": True,
        "result_backend_max_retries": 40,
        "result_backend_transport_options": {
            "global_keyprefix": prefix,
            "retry_policy": {"timeout": 5.0},
            **results_options,
        },
        "redis_socket_timeout": 30,
        "redis_socket_connect_timeout": 5,
        "redis_socket_keepalive": True,
        "redis_backend_health_check_interval": 10,
        # What Flower shows.
        "task_track_started": True,
        "worker_send_task_events": True,
        "task_send_sent_event": True,
        "worker_enable_remote_control": True,
        "worker_hijack_root_logger": False,
        "worker_proc_alive_timeout": 60,
    }


def _reached(url: str) -> tuple[str, dict[str, Any]]:
    """A Redis as Celery is told of it: the address, and transport options that say what it cannot hold (`tls` is none
    of them)."""
    try:
        address = Sentinels.parse(url)
    except ValueError as exc:
        raise unavailable(exc, url) from None
    if address is None:
        return url, {}
    options: dict[str, Any] = {"master_name": address.master, "sentinel_kwargs": address.sentinel_options}
    return address.for_celery, options if address.tls is None else {**options, "tls": address.tls}


class PolarqApp(Celery):
    """Celery, except for two things: an unusable topology or address is one line on the command line, and tasks stay
    private."""

    def _load_config(self) -> Any:
        try:
            return super()._load_config()  # type: ignore[misc]
        except (InvalidTopology, LedgerUnavailable) as exc:
            if click.get_current_context(silent=True) is None:
                raise
            raise _Refused(f"polarq worker: {exc}") from None

    def send_task(self, name: str, *args: Any, **options: Any) -> Any:
        """As Celery's; a submission's arguments hold the instruction, so monitors are shown none of them."""
        if name == SUBMIT_ROLLOUT:
            options = {"argsrepr": "(<task>)", "kwargsrepr": "{}", **options}
        return super().send_task(name, *args, **options)


class _Refused(click.ClickException):
    exit_code = 78  # sysexits.h EX_CONFIG: something the operator has to change

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file, err=True)


def make_app(topology: Topology | None = None, settings: Settings | None = None) -> Celery:
    """A Celery app for one deployment, with polarq's tasks. Nothing is read or connected until it is used."""
    made = PolarqApp("polarq", include=["polarq.tasks"], set_as_current=False)
    made.add_defaults(lambda: celery_settings(topology, settings))
    made.steps["worker"].add(WORKER_STEP)
    return made


app = make_app()

__all__ = ["RUN_ROLLOUT", "SUBMIT_ROLLOUT", "app", "celery_settings", "make_app"]
