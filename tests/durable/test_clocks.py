"""Clocks of hosts that are wrong by hours, and are set while rollouts run: only the ledger's clock decides anything."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from celery import Celery

from polarq.callback.record import attempts
from polarq.celery import make_app
from polarq.contracts import RolloutState
from polarq.contracts.rollout import TaskResult
from polarq.errors import TaskNotFound
from polarq.testing.ports import free_port
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.durable.clocks import WrongClock
from tests.durable.gates import PATIENCE_S
from tests.durable.measured import durations_hold, events_of, noted, server_time, slow_task, times_in
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

S = RolloutState
LEASE_S = 4.0
HOUR_S = 3600
STEP_S = 400
"""Longer than any budget here."""
GATEWAY = {
    "lease_s": LEASE_S,
    "reap_interval_s": 0.5,
    "ring_again_s": 2.0,
    "heartbeat_interval_seconds": 1.0,
    "max_attempts": 50,
}
SMALL = {"max_init_workers": 2, "max_run_workers": 2, "max_postrun_workers": 2}
WRONG = {"node0": (HOUR_S, "America/St_Johns"), "node1": (-HOUR_S, "Pacific/Apia")}
BERLIN = "Europe/Berlin"
BOTH = ("node0", "node1")


@pytest.fixture(scope="module")
def clocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WrongClock]:
    folder = tmp_path_factory.mktemp("clocks")
    return {node: WrongClock(folder, node, ahead_s=ahead_s, zone=zone) for node, (ahead_s, zone) in WRONG.items()}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, clocks: dict[str, WrongClock]) -> Iterator[LocalStack]:
    home = tmp_path_factory.mktemp("skewed")
    with LocalStack(
        home,
        scenario=str(write_scenario(home)),
        nodes=dict.fromkeys(BOTH, SMALL),
        sections={"gateway": GATEWAY},
        before={node: clock.before for node, clock in clocks.items()},
    ) as made:
        yield made


@pytest.fixture
def stack(shared: LocalStack, clocks: dict[str, WrongClock]) -> LocalStack:
    """Both nodes alive, their clocks an hour off, one before the true time and one behind it."""
    for node, (ahead_s, _) in WRONG.items():
        clocks[node].set(ahead_s)
        if shared.workers[node].exit_code is not None:
            shared.start_worker(node)
        pause(shared, node, on=False)
    return shared


def pause(stack: LocalStack, node: str, *, on: bool = True) -> None:
    """Returns when the worker itself has heard of it."""
    ledger = stack.client.ledger
    after = ledger.do(ledger.calls.last_event_id())
    if next(n.paused for n in stack.client.nodes() if n.node_id == node) == on:
        return
    stack.client.pause_node(node, on=on)
    heard = ("node.paused" if on else "node.resumed", node)
    wait_until(
        lambda: heard in {(e.type, e.data.get("node_id")) for e in ledger.do(ledger.calls.events(after))}, PATIENCE_S
    )


def lease_ends(stack: LocalStack, rollout_ids: list[str]) -> list[datetime]:
    """When the leases end as the server has it."""
    redis, keys = stack.client.ledger.redis, stack.client.ledger.calls.keys
    found = [redis.hget(keys.rollout(rollout_id), "lease_ms") for rollout_id in rollout_ids]
    return [datetime.fromtimestamp(int(ms or 0) / 1000, UTC) for ms in found]


def outlive_leases(stack: LocalStack, rollout_ids: list[str]) -> None:
    """Returns when each lease was renewed until after the ends of all that was held when this began, twice over."""
    for _ in range(2):
        ends = max(lease_ends(stack, rollout_ids))
        wait_until(
            lambda ends=ends: min(lease_ends(stack, rollout_ids)) > ends + timedelta(seconds=LEASE_S / 2),  # type: ignore[misc]
            PATIENCE_S,
        )


def test_a_clock_that_is_wrong_is_wrong_for_a_process_and_for_its_wall_clock_only(
    clocks: dict[str, WrongClock],
) -> None:
    code = "import time; print(time.time(), time.monotonic(), time.strftime('%z'))"
    command = [*clocks["node0"].before, sys.executable, "-c", code]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    ours = datetime.now(UTC).timestamp()
    assert HOUR_S - 60 < float(said[0]) - ours < HOUR_S + 60
    assert said[2] in {"-0330", "-0230"}


def test_clocks_that_are_hours_off_and_set_meanwhile_cost_no_lease_no_call_and_no_second(
    stack: LocalStack, clocks: dict[str, WrongClock], tmp_path: Path
) -> None:
    stack.client.submit(slow_task("steps", tmp_path, gates=3, num_samples=4))
    rollout_ids = [f"steps.{n}" for n in range(4)]
    wait_until(lambda: set(noted(tmp_path, "began")) == set(rollout_ids), PATIENCE_S)
    owners = {rollout.owner for rollout in stack.client.record("steps").rollouts}
    assert owners == set(BOTH)
    for gate, sign in enumerate((+1, -1, 0)):
        for node, (ahead_s, _) in WRONG.items():
            clocks[node].set(ahead_s + sign * STEP_S)
        outlive_leases(stack, rollout_ids)
        (tmp_path / f"gate{gate}").touch()
        calls = gate + 1
        wait_until(lambda calls=calls: all(n >= calls for n in calls_made(stack, rollout_ids)), PATIENCE_S)  # type: ignore[misc]
    result = stack.client.wait("steps", PATIENCE_S)
    assert [(r.outcome.state, r.attempt) for r in result.results] == [(S.COMPLETED, 1)] * 4, result.results[0].outcome
    assert [r.trajectory and r.trajectory.fidelity.calls for r in result.results] == [3] * 4
    for rollout in result.results:
        durations_hold(stack, rollout, tmp_path)
    said = {event.type for event in events_of(stack, "steps")}
    assert not said & {"session.reaped", "node.lost"}
    stored = times_in(
        result.model_dump_json() + "".join(event.model_dump_json() for event in events_of(stack, "steps"))
    )
    assert stored
    assert all(time.endswith(("Z", "+00:00")) for time in stored), stored


def calls_made(stack: LocalStack, rollout_ids: list[str]) -> list[int]:
    """Completions on record, by rollout of one task."""
    keys, redis = stack.client.ledger.calls.keys, stack.client.ledger.redis
    rollouts = stack.client.record(rollout_ids[0].rpartition(".")[0]).rollouts
    return [int(redis.llen(keys.completions(r.rollout_id, r.attempt, r.token))) for r in rollouts]


@pytest.mark.parametrize("dies", BOTH)
def test_a_lease_ends_by_the_servers_clock_whatever_its_holders_and_the_reapers_say(
    stack: LocalStack, tmp_path: Path, dies: str
) -> None:
    task_id = f"dies-{dies}"
    other = next(node for node in BOTH if node != dies)
    pause(stack, other)
    stack.client.submit(slow_task(task_id, tmp_path))
    wait_until(lambda: f"{task_id}.0" in noted(tmp_path, "began"), PATIENCE_S)
    stack.workers[dies].kill()
    [ends] = lease_ends(stack, [f"{task_id}.0"])
    pause(stack, other, on=False)
    (tmp_path / "gate0").touch()
    result = stack.client.wait(task_id, PATIENCE_S).results[0]
    assert (result.outcome.state, result.attempt, result.node_id) == (S.COMPLETED, 2, other)
    [reaped] = [event for event in events_of(stack, task_id) if event.type == "session.reaped"]
    assert reaped.at >= ends
    # Had either clock been asked, it would have come at once or after an hour.
    assert reaped.at - ends < timedelta(seconds=PATIENCE_S)
    durations_hold(stack, result, tmp_path)


def test_what_a_node_says_of_itself_is_by_the_servers_clock(stack: LocalStack) -> None:
    now = server_time(stack)
    wait_until(lambda: all(node.last_seen_at and node.last_seen_at > now for node in stack.client.nodes()), PATIENCE_S)
    for node in stack.client.nodes():
        assert node.last_seen_at is not None
        assert node.started_at is not None
        assert node.started_at < node.last_seen_at < server_time(stack)


@pytest.mark.parametrize("node", BOTH)
def test_when_a_callback_was_sent_is_by_the_servers_clock(stack: LocalStack, node: str) -> None:
    ledger, before = stack.client.ledger, server_time(stack)
    nobody = f"http://127.0.0.1:{free_port()}/"
    pin = {"policy": "pinned", "node_id": node}
    stack.client.submit(shell_task(f"told-{node}", ask(1), callback_url=nobody, placement=pin))
    tries = attempts(ledger.calls.keys, f"told-{node}")
    wait_until(lambda: bool(ledger.do(tries)), PATIENCE_S)
    assert all(before < made.at < server_time(stack) for made in ledger.do(tries))


# --- a client that knows Celery only


def foreign_client(stack: LocalStack, zone: str) -> Celery:
    foreign = Celery("foreign", set_as_current=False)
    ours = make_app(stack.topology, stack.settings).conf
    for key in ("broker_url", "result_backend", "broker_transport_options", "result_backend_transport_options"):
        foreign.conf[key] = ours[key]
    foreign.conf["timezone"] = zone
    return foreign


@contextmanager
def only(stack: LocalStack, node: str) -> Iterator[None]:
    """The others hear nothing, not even what comes while they still wait for the server (a second at most)."""
    others = [stack.workers[other] for other in BOTH if other != node]
    for other in others:
        other.signal(signal.SIGSTOP)
    try:
        over = server_time(stack) + timedelta(seconds=2)
        wait_until(lambda: server_time(stack) > over, PATIENCE_S)
        yield
    finally:
        for other in others:
            other.signal(signal.SIGCONT)


@pytest.mark.parametrize("node", BOTH)
def test_an_eta_with_a_local_offset_is_the_senders_moment_whatever_the_worker_thinks_the_time_is(
    stack: LocalStack, clocks: dict[str, WrongClock], node: str
) -> None:
    with only(stack, node):
        foreign = foreign_client(stack, "Asia/Kolkata")
        eta = (datetime.now(UTC) + timedelta(seconds=8)).astimezone(ZoneInfo("Asia/Kolkata"))
        task = shell_task(f"eta-{node}", ask(1))
        pending = foreign.send_task("polarq.submit_rollout", [task], queue="polarq", eta=eta, expires=600.5)
        control = make_app(stack.topology, stack.settings).control

        def taken() -> bool:
            answers = control.inspect(timeout=1.0).scheduled() or {}
            return pending.id in str(answers) or pending.state == "SUCCESS"

        wait_until(taken, PATIENCE_S)
        # What waits in the worker is not moved by what becomes of its clock.
        clocks[node].set(WRONG[node][0] + STEP_S)
        assert pending.get(timeout=PATIENCE_S)["state"] == "completed"
    created = stack.client.record(f"eta-{node}").created_at
    assert created >= eta
    assert created - eta < timedelta(seconds=PATIENCE_S)


@pytest.mark.parametrize("node", BOTH)
def test_what_has_expired_does_not_start_and_what_has_not_does(stack: LocalStack, node: str) -> None:
    with only(stack, node):
        foreign = foreign_client(stack, "America/St_Johns")
        # A second ago: as if it had waited in the queue until then.
        late = foreign.send_task(
            "polarq.submit_rollout", [shell_task(f"late-{node}", ask(1))], queue="polarq", expires=-1
        )
        good = foreign.send_task(
            "polarq.submit_rollout", [shell_task(f"good-{node}", ask(1))], queue="polarq", expires=HOUR_S / 2
        )
        assert good.get(timeout=PATIENCE_S)["rewards"] == [1.0]
        wait_until(lambda: str(late.state) == "REVOKED", PATIENCE_S)
    with pytest.raises(TaskNotFound):
        stack.client.record(f"late-{node}")


# --- the hour that comes twice


BEFORE_THE_HOUR = datetime(2026, 10, 25, 0, 59, 50, tzinfo=UTC)
LINE_TIME = re.compile(r"^(\d\d:\d\d:\d\d) (\w+)")


def ahead_to(moment: datetime) -> int:
    return round(moment.timestamp() - datetime.now(UTC).timestamp())


def polarq(stack: LocalStack, *words: str) -> str:
    command = [sys.executable, "-m", "polarq.cli", *words]
    env = {**stack.env, "TZ": BERLIN, "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout


def test_the_hour_that_comes_twice_changes_no_order_and_no_duration(tmp_path: Path) -> None:
    clock = WrongClock(tmp_path, "all", ahead_s=ahead_to(BEFORE_THE_HOUR - timedelta(minutes=10)), zone=BERLIN)
    with (
        EmbeddedRedis(binary=clock.redis_binary(tmp_path)) as server,
        LocalStack(
            tmp_path,
            scenario=str(write_scenario(tmp_path)),
            redis=server,
            sections={"gateway": GATEWAY},
            before={"node0": clock.before},
        ) as stack,
    ):
        clock.set(ahead_to(BEFORE_THE_HOUR))
        wait_until(lambda: server_time(stack) >= BEFORE_THE_HOUR)
        stack.client.submit(slow_task("hour", tmp_path))
        wait_until(lambda: "hour.0" in noted(tmp_path, "began"), PATIENCE_S)
        turn = datetime(2026, 10, 25, 1, 0, 1, tzinfo=UTC)
        wait_until(lambda: server_time(stack) > turn, PATIENCE_S)
        (tmp_path / "gate0").touch()
        result: TaskResult = stack.client.wait("hour", PATIENCE_S)
        assert result.results[0].outcome.state is S.COMPLETED
        durations_hold(stack, result.results[0], tmp_path)
        stack.client.submit(shell_task("after", ask(1)))
        assert stack.client.wait("after", PATIENCE_S).counts.completed == 1

        lines = [found for line in polarq(stack, "tail", "hour").splitlines() if (found := LINE_TIME.match(line))]
        assert {line[2] for line in lines} == {"CEST", "CET"}
        hours = {"CEST": 2, "CET": 1}
        at = [datetime.strptime(f"2026-10-25 {line[1]} +0{hours[line[2]]}00", "%Y-%m-%d %H:%M:%S %z") for line in lines]
        assert at == sorted(at), "as they happened, though the wall clock went back"
        shown = polarq(stack, "show", "hour.0")
        assert re.search(r"from 2026-10-25 02:59:\d\d CEST to 2026-10-25 02:0\d:\d\d CET", shown), shown
        status = polarq(stack, "status")
        listed = re.findall(r"(after|hour)\b.*2026-10-25 02:0\d:\d\d CET", status)
        assert listed == ["after", "hour"], f"latest change first: {status}"
        stored = times_in(polarq(stack, "show", "hour.0", "--json"))
        assert stored
        assert all(time.endswith(("Z", "+00:00")) for time in stored)
