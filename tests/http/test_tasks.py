"""Submitting, reading, listing and cancelling tasks over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from polarq.contracts.rollout import RolloutState
from polarq.http import shim as shim_module
from polarq.http.task_body import task_body
from polarq.ledger import Keys
from polarq.testing.redis import EmbeddedRedis
from tests.http.rig import Rig, a_task, running_shim


async def test_a_submitted_task_is_in_the_ledger_and_running(shim: Rig) -> None:
    response = await shim.http.post("/rollout/task/submit", json=a_task(samples=2))
    assert (response.status_code, response.json()) == (200, {"task_id": "t", "status": "running"})
    record = await shim.client.record("t")
    assert record.counts.queued == 2


async def test_the_same_request_is_answered_with_the_existing_task_and_another_with_409(shim: Rig) -> None:
    await shim.submit(a_task())
    assert (await shim.http.post("/rollout/task/submit", json=a_task())).json()["status"] == "running"
    other = await shim.http.post("/rollout/task/submit", json=a_task(samples=3))
    assert other.status_code == 409
    assert "taken by a different request" in other.json()["detail"]


async def test_a_finished_rollout_is_a_session_result_in_polars_words(shim: Rig) -> None:
    await shim.submit(a_task(metadata={"group_id": "g1", "note": 1}))
    await shim.end("t.0")
    task = (await shim.http.get("/rollout/task/t")).json()
    assert task["status"] == "completed"
    assert (task["total_sessions"], task["completed_sessions"]) == (1, 1)
    assert task["counts"]["completed"] == 1
    (session,) = task["results"]
    assert session["session_id"] == "t.0"
    assert session["status"] == "COMPLETED"
    assert session["error"] is None
    assert session["metadata"] == {"group_id": "g1", "note": 1}
    assert session["timing"] == pytest.approx(
        {"register_to_init_queue_ms": 250, "init_ms": 500, "run_ms": 2000, "postrun_ms": 500}
    )
    assert session["outcome"]["trainable"] is True
    assert session["rollout"]["index"] == 0
    trajectory = session["trajectory"]
    assert trajectory["status"] == "COMPLETED"
    (trace,) = trajectory["traces"]
    assert trace["response_ids"] == [7, 8, 9]
    assert trace["response_logprobs"] == [-0.5, -0.5, -0.5]
    assert trace["loss_mask"] == [1, 1, 1]
    assert trace["reward"] == 1.0
    metadata = trajectory["metadata"]
    assert (metadata["builder"], metadata["record_count"], metadata["trace_count"]) == ("per_request", 1, 1)
    assert metadata["task_metadata"] == {"group_id": "g1", "note": 1}
    assert metadata["group_id"] == "g1"
    assert metadata["evaluation"]["outcome_reward"] == 1.0
    assert metadata["evaluation"]["strategy"] == "test_on_output"
    assert metadata["evaluation"]["report"] == {"passed": 2}


@pytest.mark.parametrize(
    ("state", "word"),
    [(RolloutState.FAILED, "ERROR"), (RolloutState.TIMED_OUT, "TIMEOUT")],
)
async def test_a_failed_rollout_keeps_its_traces_and_says_why(shim: Rig, state: RolloutState, word: str) -> None:
    await shim.submit(a_task())
    await shim.end("t.0", state=state, reward=None)
    (session,) = (await shim.http.get("/rollout/task/t")).json()["results"]
    assert (session["status"], session["trajectory"]["status"]) == (word, word)
    assert session["error"] == session["trajectory"]["error"] == "the harness exited with 3"
    assert session["outcome"]["boundary"] == "harness"
    assert session["trajectory"]["traces"][0]["response_ids"] == [7, 8, 9]
    assert "evaluation" not in session["trajectory"]["metadata"]


async def test_trajectories_can_be_left_out_or_left_as_references(shim: Rig) -> None:
    await shim.submit(a_task())
    await shim.end("t.0")
    (none,) = (await shim.http.get("/rollout/task/t?trajectories=none")).json()["results"]
    (refs,) = (await shim.http.get("/rollout/task/t?trajectories=refs")).json()["results"]
    assert none["trajectory"]["traces"] == refs["trajectory"]["traces"] == []
    assert none["trajectory"]["metadata"]["record_count"] == 1
    assert none["trajectory"]["metadata"]["builder"] == "per_request"
    assert none["rollout"]["payload"] is None
    assert refs["rollout"]["payload"]["chunks"] == 1
    assert none["rollout"]["reward"]["outcome"] == 1.0


async def test_results_are_paged_in_sample_order(shim: Rig) -> None:
    await shim.submit(a_task(samples=5))
    for index in (3, 0, 4, 1):
        await shim.end(f"t.{index}", reward=float(index))
    page = (await shim.http.get("/rollout/task/t?offset=1&limit=2")).json()
    assert [session["session_id"] for session in page["results"]] == ["t.1", "t.3"]
    assert (page["results_total"], page["results_offset"], page["completed_sessions"]) == (4, 1, 4)
    assert (await shim.http.get("/rollout/task/t?offset=9")).json()["results"] == []


async def test_a_waiting_request_is_answered_when_the_last_rollout_ends(
    shim: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim_module, "_REREAD_S", 3600.0)  # the event alone must wake it
    await shim.submit(a_task(samples=2))
    await shim.end("t.0")
    waiting = asyncio.create_task(shim.http.get("/rollout/task/t?wait=60&trajectories=none"))
    for _ in range(5):
        # Each is answered after the shim has taken up what came before it.
        assert (await shim.http.get("/tasks")).status_code == 200
    assert not waiting.done()
    await shim.end("t.1")
    task = (await waiting).json()
    assert (task["status"], task["completed_sessions"]) == ("completed", 2)


async def test_a_wait_that_ends_early_answers_with_the_running_task(shim: Rig) -> None:
    await shim.submit(a_task())
    task = (await shim.http.get("/rollout/task/t?wait=0.05")).json()
    assert (task["status"], task["results"]) == ("running", [])


async def test_a_missing_payload_makes_an_error_of_its_session_and_spoils_no_other(shim: Rig) -> None:
    await shim.submit(a_task(samples=2))
    await shim.end("t.0")
    await shim.end("t.1")
    record = await shim.client.record("t")
    summary = record.rollouts[0].summary
    assert summary is not None
    assert summary.payload is not None
    await shim.client.ledger.redis.delete(f"{summary.payload.key}:0")
    lost, kept = (await shim.http.get("/rollout/task/t")).json()["results"]
    assert lost["status"] == "ERROR"
    assert "not in the store" in lost["error"]
    assert lost["outcome"]["state"] == "completed"
    assert lost["rollout"]["payload_problem"] == lost["error"]
    assert kept["status"] == "COMPLETED"
    assert len(kept["trajectory"]["traces"]) == 1


async def test_an_unknown_task_is_404_in_polars_words(shim: Rig) -> None:
    for path in ("/rollout/task/nope", "/rollout/task/x:task", "/tasks/nope/sessions"):
        response = await shim.http.get(path)
        assert (response.status_code, response.json()) == (404, {"detail": "Task not found"})
    response = await shim.http.delete("/rollout/task/nope")
    assert (response.status_code, response.json()) == (404, {"detail": "Task not found"})


async def test_a_cancelled_task_in_the_queue_ends_at_once(shim: Rig) -> None:
    await shim.submit(a_task(samples=2))
    task = (await shim.http.delete("/rollout/task/t")).json()
    assert task["status"] == "cancelled"
    assert [session["status"] for session in task["results"]] == ["ERROR", "ERROR"]
    assert task["results"][0]["outcome"]["reason"] == "cancelled"
    assert task["counts"]["cancelled"] == 2
    again = await shim.http.delete("/rollout/task/t")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_a_running_task_is_cancelling_until_its_worker_has_stopped(shim: Rig) -> None:
    await shim.submit(a_task())
    claim = await shim.claim("t.0")
    task = (await shim.http.delete("/rollout/task/t?wait=0")).json()
    assert task["status"] == "cancelling"
    waiting = asyncio.create_task(shim.http.delete("/rollout/task/t?wait=60"))
    await shim.end("t.0", state=RolloutState.CANCELLED, reward=None, claim=claim)
    assert (await waiting).json()["status"] == "cancelled"


async def test_cancelling_a_task_id_that_ends_in_a_number_cancels_no_rollout_of_another_task(shim: Rig) -> None:
    await shim.submit(a_task("t", samples=2))
    response = await shim.http.delete("/rollout/task/t.1?register_if_missing=true")
    assert response.json()["status"] == "cancelled"
    assert (await shim.client.record("t")).counts.cancelled == 0


async def test_a_cancel_registered_ahead_refuses_the_late_task(shim: Rig) -> None:
    response = await shim.http.delete("/rollout/task/late?register_if_missing=true")
    assert response.status_code == 200
    assert response.json() == {
        "task_id": "late",
        "status": "cancelled",
        "total_sessions": 0,
        "completed_sessions": 0,
        "results": [],
        "result_paths": [],
    }
    late = await shim.http.post("/rollout/task/submit", json=a_task("late"))
    assert late.status_code == 409


async def test_the_task_list_is_filtered_and_newest_first(shim: Rig) -> None:
    await shim.submit(a_task("a", samples=2))
    await shim.submit(a_task("b", agent={"harness": "shell", "custom_shell": {"command": "true"}}))
    await shim.submit(a_task("c"))
    await shim.end("a.0", reward=1.0)
    await shim.end("a.1", reward=0.0)

    async def ids(query: str = "") -> list[str]:
        return [row["task_id"] for row in (await shim.http.get(f"/tasks{query}")).json()["tasks"]]

    assert await ids() == ["a", "c", "b"]
    assert await ids("?status=completed") == ["a"]
    assert await ids("?status=failed") == []
    assert await ids("?harness=shell") == ["b"]
    assert await ids("?limit=1") == ["a"]
    row = (await shim.http.get("/tasks?status=completed")).json()["tasks"][0]
    assert (row["mean_reward"], row["mean_traces"], row["mean_completions"]) == (0.5, 1.0, 1.0)
    assert (row["num_samples"], row["completed_sessions"], row["errored_sessions"]) == (2, 2, 0)
    assert (row["model"], row["source"]) == ("tiny", "live")
    assert await ids(f"?since={row['updated_at']}") == ["a"]
    await shim.end("b.0")
    assert await ids() == ["b", "a", "c"]


async def test_sessions_are_listed_while_they_run(shim: Rig) -> None:
    await shim.submit(a_task(samples=3))
    claim = await shim.claim("t.1")
    await shim.advance(claim, RolloutState.READY)
    await shim.advance(claim, RolloutState.RUNNING)
    await shim.end("t.2", reward=0.25)
    listed = (await shim.http.get("/tasks/t/sessions")).json()
    assert listed["task_id"] == "t"
    queued, running, done = listed["sessions"]
    assert (queued["session_id"], queued["status"]) == ("t.0", "REGISTERED")
    assert (running["status"], running["node_id"]) == ("RUNNING", "node0")
    assert "reward" not in running
    assert (done["status"], done["reward"], done["error"]) == ("COMPLETED", 0.25, None)
    assert done["timing"]["run_ms"] == 2000


async def test_one_session_is_read_and_cancelled_alone(shim: Rig) -> None:
    await shim.submit(a_task(samples=2))
    waiting = (await shim.http.get("/sessions/t.0")).json()
    assert (waiting["status"], waiting["result"]) == ("REGISTERED", None)
    await shim.end("t.0")
    done = (await shim.http.get("/sessions/t.0")).json()
    assert (done["status"], done["completion_count"]) == ("COMPLETED", 1)
    assert done["result"]["trajectory"]["traces"][0]["response_ids"] == [7, 8, 9]
    gone = (await shim.http.delete("/sessions/t.1")).json()
    assert gone == {"session_id": "t.1", "deleted": True, "messages_deleted": 0, "status": "ERROR"}
    late = (await shim.http.delete("/sessions/t.0")).json()
    assert (late["deleted"], late["status"]) == (False, "COMPLETED")
    for unknown in ("t.7", "nope.0", "t", "..0"):
        response = await shim.http.get(f"/sessions/{unknown}")
        assert (response.status_code, response.json()) == (404, {"detail": "Session not found"})


async def test_a_large_task_is_sent_session_by_session(shim: Rig) -> None:
    """The body is one JSON document whatever its size, and what the callback sends."""
    await shim.submit(a_task(samples=6))
    for index in range(6):
        await shim.end(f"t.{index}", response_ids=list(range(200_000)))
    async with shim.http.stream("GET", "/rollout/task/t") as response:
        assert response.headers["transfer-encoding"] == "chunked"
        body = await response.aread()
    task: dict[str, Any] = response.json()
    assert [len(s["trajectory"]["traces"][0]["response_ids"]) for s in task["results"]] == [200_000] * 6
    ledger = shim.client.ledger
    record = await ledger.do(ledger.calls.task("t", with_request=True))
    assert record is not None
    assert await task_body(ledger, record) == body


async def test_a_body_that_breaks_off_is_never_taken_for_a_whole_one(keys: Keys) -> None:
    with EmbeddedRedis() as server:
        async with running_shim(server.url, keys) as shim:
            await shim.submit(a_task(samples=20))
            for index in range(20):
                await shim.end(f"t.{index}", response_ids=list(range(200_000)))
            async with shim.http.stream("GET", "/rollout/task/t") as response:
                # More is to come than the sockets hold: the shim waits for its reader, and Redis goes meanwhile.
                parts = response.aiter_raw()
                assert (await anext(parts)).startswith(b'{"task_id":"t"')
                server.stop()
                with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                    async for _ in parts:
                        pass


async def test_a_body_that_is_not_compressed_as_it_says_is_its_senders_mistake(shim: Rig) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await shim.http.post("/rollout/task/submit", content=b"no gzip", headers=headers)
    assert response.status_code == 400
    assert "the body cannot be read" in response.json()["detail"]
