"""`polarq acknowledge`: results that are stored elsewhere go, by id of the task or of one rollout."""

from __future__ import annotations

from polarq.client import Client
from tests.cli.conftest import Cli
from tests.cli.driving import finish, record, task


def test_a_rollout_then_its_whole_task_is_acknowledged_and_once(client: Client, cli: Cli) -> None:
    record(client, task("t", 2))
    finish(client, "t.0")
    assert cli("acknowledge", "t.0").out == "t.0: 1 result acknowledged and deleted\n"
    refused = cli("acknowledge", "t")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == ("polarq: rollout 't.1' is queued: only what has ended can be acknowledged; nothing was\n")
    finish(client, "t.1")
    assert cli("acknowledge", "t", "--json").json == {"target": "t", "acknowledged": 1}
    assert cli("acknowledge", "t").out == "t was acknowledged already\n"
    assert [r.acknowledged_at is not None for r in client.record("t").rollouts] == [True, True]
    assert cli("show", "t").code == 0


def test_what_is_not_there_is_said(client: Client, cli: Cli) -> None:
    ran = cli("acknowledge", "nope")
    assert ran.code == 2
    assert "no task 'nope'" in ran.err
