"""`polarq demo`: one real rollout batch on this machine, end to end, without a GPU.

A Redis, a scripted inference server and a real worker are started, the calculator example is submitted as a trainer
would, and everything is stopped again, also on Ctrl-C and when something fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from polarq.cli.demo_report import Report, Story
from polarq.cli.door import RedisDoor, Update
from polarq.cli.interrupts import Interrupts
from polarq.cli.options import Json
from polarq.cli.outcome import ExitCode, Unusable, command, complain, task_code
from polarq.cli.picture import Picture
from polarq.cli.progress import follow
from polarq.cli.terminal import Screen
from polarq.client import Client
from polarq.contracts.task import Task
from polarq.errors import PolarqError
from polarq.ledger import Ledger, calls_for
from polarq.ledger.server import server_facts
from polarq.settings import Settings
from polarq.topology import Topology

if TYPE_CHECKING:
    from polarq.testing.stack import LocalStack

NEEDED = ("aiohttp", "tokenizers", "jinja2", "minisweagent")
"""Modules of the extra `demo`."""
DRAIN_GRACE_S = 5.0
"""Nobody waits for the demo's rollouts once it is told to stop."""


@command
def demo(
    num_samples: Annotated[int, typer.Option("--num-samples", "-n", min=1, max=64, help="Rollouts of the task.")] = 4,
    max_run_workers: Annotated[int, typer.Option(min=1, max=64, help="Harnesses running at once.")] = 2,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where results and logs are kept; else a new folder.", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, metavar="S", help="Seconds the rollouts may take.")] = 300.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running until Ctrl-C.", show_default=False)
    ] = False,
    as_json: Json = False,
) -> ExitCode:
    """Run a real batch here: Redis, worker, proxy, an unmodified agent, scored by tests. No GPU needed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Unusable(f"the demo needs {', '.join(missing)}: pip install 'polarq[demo]'")
    home = _state_folder(state_dir)
    report = Report(home, keep=keep)
    story = Story(Screen(), report, quiet=as_json)
    interrupts = Interrupts()
    with interrupts.caught():
        code = _play(story, interrupts, num_samples, max_run_workers, timeout)
    story.end(code)
    return code


def _play(story: Story, interrupts: Interrupts, num_samples: int, max_run_workers: int, timeout_s: float) -> ExitCode:
    """The whole demo, from the first process to the last one's end."""
    from polarq.testing.stack import PartDidNotStart

    report, running = story.report, ExitStack()
    try:
        stack = _start(running, story, interrupts, max_run_workers)
        picture = _run(stack, story, num_samples, timeout_s)
        report.picture = picture
        with story.timed("results_s"):
            _keep_results(stack.client, picture, report.results)
        story.tell_results()
        if report.keep:
            story.tell_kept(stack.topology_path)
            _until_stopped(stack)
    except PartDidNotStart as exc:
        complain(str(exc), exc.last_lines)
        return ExitCode.FAILED
    finally:
        with story.timed("stop_s"):
            running.close()
    return task_code(picture.state, picture.counts)


def _start(running: ExitStack, story: Story, interrupts: Interrupts, max_run_workers: int) -> LocalStack:
    """Starts every part; `running` stops them in reverse order."""
    from polarq.testing.ports import free_port
    from polarq.testing.redis import EmbeddedRedis
    from polarq.testing.stack import LocalStack

    home, settings = story.report.home, Settings.from_env()
    with story.part("redis_s", "Redis") as told:
        url, prefix = settings.redis_url, "polarq"
        if url is None:
            server = EmbeddedRedis(password=secrets.token_urlsafe(24), data_dir=home / "redis")
            with interrupts.held():
                running.enter_context(server)
            url = server.url
            told(f"a private one on 127.0.0.1:{server.port}")
        else:
            # Somebody's own Redis may serve a real fleet: the demo keeps to keys of its own, and takes them away again.
            prefix = f"polarq-demo-{secrets.token_hex(4)}"
            with Ledger(url, calls_for(Topology())) as ledger:
                ledger.do(server_facts())  # raises with its one line before anything else is started
            running.callback(_sweep, story, url, prefix)
            told(f"POLARQ_REDIS_URL, under the prefix {prefix}")
    stack = LocalStack(
        home,
        nodes={"node0": {"max_run_workers": max_run_workers}},
        sections={"redis": {"url": url, "prefix": prefix}, "gateway": {"drain_grace_s": DRAIN_GRACE_S}},
        redis_url=url,
        bound=True,
        isolation="auto",
        env={"NO_PROXY": _no_proxy("NO_PROXY"), "no_proxy": _no_proxy("no_proxy")},
    )
    running.callback(stack.stop)
    # Both at once: neither needs the other to start.
    with interrupts.held():
        stack.start_inference(free_port(), wait=False)
    stack.write_topology()
    stack.topology_path.chmod(0o600)  # the password of Redis is in it
    os.environ.update({name: stack.env[name] for name in ("POLARQ_TOPOLOGY", "POLARQ_REDIS_URL", "POLARQ_STATE_DIR")})
    with story.part("worker_s", "worker") as told_worker:
        with interrupts.held():
            worker = stack.start_worker("node0", wait=False)
        with story.part("inference_s", "inference") as told:
            with ThreadPoolExecutor(1) as meanwhile:
                # Needed below, and there is time now. In a thread, as a signal that arrives while a module is loaded
                # may end in one of its except clauses.
                meanwhile.submit(importlib.import_module, "polarq.tasks")
                stack.wait_for_inference()
            told(f"scripted model at {stack.inference_url}, no GPU")
        stack.wait_for_node("node0")
        told_worker(f"celery -A polarq worker -Q node0 (pid {worker.pid})")
    story.tell("proxy", f"started by the worker, at {stack.topology.gateway.nodes[0].proxy_url}")
    return stack


def _run(stack: LocalStack, story: Story, num_samples: int, timeout_s: float) -> Picture:
    """Submits as a trainer does, and follows to the end."""
    from polarq.tasks import Batch, submit_rollout
    from polarq.testing.calculator import TASK_FILE

    task = Task.load(TASK_FILE).model_copy(
        update={"task_id": f"calculator-{secrets.token_hex(3)}", "num_samples": num_samples}
    )
    with story.timed("rollouts_s"):
        batch = cast(Batch, submit_rollout.delay(task))
        story.tell_submitted(task)
        door = _WorkerDoor(stack)
        try:
            return follow(story.screen, door, batch.rollout_task_id, timeout_s, quiet=story.quiet)
        except (KeyboardInterrupt, PolarqError):
            # What runs is stopped at once, so that the worker has nothing to wait for.
            with suppress(PolarqError):
                stack.client.cancel(batch.rollout_task_id)
            raise


class _WorkerDoor(RedisDoor):
    """Notices when the worker ends while its rollouts are waited for."""

    def __init__(self, stack: LocalStack) -> None:
        super().__init__(stack.client)
        self._stack = stack

    def watch(self, task_id: str, timeout_s: float | None) -> Iterator[Update]:
        for update in super().watch(task_id, timeout_s):
            if not update.picture.state.terminal:
                self._stack.check_worker("node0")
            yield update


def _keep_results(client: Client, picture: Picture, folder: Path) -> None:
    """Each rollout's whole result as a JSON file."""
    folder.mkdir(exist_ok=True)
    for row in picture.rows:
        result = client.rollout(row.rollout_id)
        (folder / f"{row.rollout_id}.json").write_text(
            json.dumps(result.model_dump(mode="json"), allow_nan=False, indent=1) + "\n", encoding="utf-8"
        )


def _until_stopped(stack: LocalStack) -> None:
    """With --keep: until Ctrl-C, which then is the normal end; or until the worker ends by itself."""
    with suppress(KeyboardInterrupt):
        while True:
            stack.check_worker("node0")
            time.sleep(0.5)


def _state_folder(chosen: Path | None) -> Path:
    """A folder that only its owner can read: the topology in it holds a password."""
    if chosen is None:
        return Path(tempfile.mkdtemp(prefix="polarq-demo-"))
    try:
        chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        chosen.chmod(0o700)
        shutil.rmtree(chosen / "logs", ignore_errors=True)
    except OSError as exc:
        raise Unusable(f"cannot use {chosen}: {exc.strerror}; choose another --state-dir") from None
    return chosen.resolve()


def _sweep(story: Story, url: str, prefix: str) -> None:
    """Takes the demo's keys out of a Redis that is not its own."""
    import redis

    from polarq.ledger.servers import sync_client

    try:
        with sync_client(url) as client:
            for key in client.scan_iter(match=f"{prefix}:*", count=1000):
                client.unlink(key)
    except redis.RedisError as exc:
        story.warn(f"keys under {prefix} are still in Redis ({type(exc).__name__}); they expire by themselves")


def _no_proxy(name: str) -> str:
    """Everything of the demo is on loopback, whatever proxy the environment names."""
    return ",".join(part for part in (os.environ.get(name, ""), "127.0.0.1,localhost,::1") if part)
