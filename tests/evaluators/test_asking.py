"""Whatever a judge's or a teacher's server sends, there is an answer in the end, or one line that says why not."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from email.utils import formatdate
from typing import Any

import pytest

from polarq.contracts.rollout import Boundary, RolloutState
from polarq_worker.evaluators.asking import MAX_ANSWER_BYTES, Asking, ServerFailed, Tally
from polarq_worker.evaluators.base import EvaluationTimedOut
from polarq_worker.outcomes import StageFailed
from polarq_worker.stages.faults import of_evaluate
from tests.evaluators.conftest import Bench
from tests.evaluators.judging import RawServer, Script, endless, raw_server, whole
from tests.evaluators.test_llm_judge import judged
from tests.evaluators.traces import trajectory

OBJECT = '{"is": "one"}'


class Rig:
    """A server and what asks it."""

    def __init__(self, server: RawServer, asking: Asking, tally: Tally) -> None:
        self.server, self.asking, self.tally = server, asking, tally

    async def ask(self, **more: Any) -> dict[str, Any]:
        return await self.asking(f"{self.server.url}/v1/x", {"a": 1}, **more)

    async def failed(self, error: type[Exception] = ServerFailed, **more: Any) -> str:
        """The line that says why there is no answer."""
        with pytest.raises(error) as caught:
            await self.ask(**more)
        line = str(caught.value)
        assert line.isprintable()
        assert len(line) < 400
        return line


@asynccontextmanager
async def asked(
    *scripts: Script, retries: int = 0, call_timeout_s: float = 60, budget_s: float = 60
) -> AsyncIterator[Rig]:
    async with raw_server(*scripts) as server:
        tally = Tally()
        asking = Asking(
            "the server", key="k", call_timeout_s=call_timeout_s, retries=retries,
            deadline=time.monotonic() + budget_s, tally=tally,
        )  # fmt: skip
        async with aclosing(asking):
            yield Rig(server, asking, tally)


async def test_an_answer_is_a_json_object_whatever_it_is_called() -> None:
    async with asked(whole(OBJECT, content_type="text/plain")) as rig:
        assert await rig.ask() == {"is": "one"}
    (head,) = rig.server.heads
    assert "authorization: bearer k" in head.lower()


async def test_an_answer_may_have_as_many_bytes_as_it_is_allowed_and_none_more() -> None:
    just = json.dumps({"x": "y" * (MAX_ANSWER_BYTES - 9)})
    assert len(just) == MAX_ANSWER_BYTES
    async with asked(whole(just), whole(f"{just} "), whole(f"{just} ")) as rig:
        assert len((await rig.ask())["x"]) == MAX_ANSWER_BYTES - 9
        assert await rig.failed() == "the server refused: its answer has more than 4,194,304 bytes"
        assert len((await rig.ask(most_bytes=MAX_ANSWER_BYTES + 1))["x"]) == MAX_ANSWER_BYTES - 9


async def test_an_answer_without_an_end_is_left_and_not_asked_for_again() -> None:
    async with asked(endless(), retries=3) as rig:
        assert await rig.failed() == "the server refused: its answer has more than 4,194,304 bytes"
        assert rig.tally.calls == 1


async def test_an_answer_that_comes_a_byte_at_a_time_has_the_time_of_a_whole_one() -> None:
    slow = endless(piece=b" ", pause_s=0.05)
    async with asked(slow, whole(OBJECT), retries=1, call_timeout_s=0.5) as rig:
        assert await rig.ask() == {"is": "one"}
    assert rig.tally.refused == ["no whole answer within 0.5 s"]
    async with asked(slow, call_timeout_s=0.2) as rig:
        assert await rig.failed() == "the server did not answer: no whole answer within 0.2 s"
    async with asked(slow, retries=3, budget_s=0.2) as rig:
        assert await rig.failed(EvaluationTimedOut) == "the server did not answer within the evaluation's budget"


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"])
async def test_a_redirect_is_not_followed_and_its_target_is_named(status: str) -> None:
    async with raw_server(whole(OBJECT)) as other, asked(whole("", status, location=f"{other.url}/v1/x")) as rig:
        line = await rig.failed()
        assert not other.heads
    told = f"it redirects to '{other.url}/v1/x', which is not followed; name that address"
    assert line == f"the server refused: HTTP {status[:3]}: {told}"


@pytest.mark.parametrize(
    ("body", "kind", "shown"),
    [
        ("<html>\n<p>Log in</p>", "text/html", "<html> <p>Log in</p>"),
        ("data: {}\n\n", "text/event-stream", "data: {}"),
        ("[1]", "application/json", "[1]"),
        ("", "application/json", ""),
        (OBJECT[:-1], "application/json", OBJECT[:-1]),
        ("[" * 200_000, "application/json", "[" * 200),
        (b"\xff\xfe\x00", "application/json", "\ufffd\ufffd\x00"),
    ],
)
async def test_what_is_no_json_object_is_asked_for_again_and_then_shown(
    body: str | bytes, kind: str, shown: str
) -> None:
    async with asked(whole(body, content_type=kind), whole(OBJECT), retries=1) as rig:
        assert await rig.ask() == {"is": "one"}
    (problem,) = rig.tally.refused
    assert problem == f"its answer ({kind}) is no JSON object: {shown}".strip()


async def test_an_answer_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    async with asked(whole(bomb, content_encoding="gzip"), retries=3) as rig:
        assert await rig.failed() == "the server refused: its answer is packed (gzip), which it was asked not to do"
    assert rig.tally.calls == 1
    assert "accept-encoding: identity" in rig.server.heads[0].lower()
    async with asked(whole(bomb, "503 Busy", content_encoding="gzip"), whole(OBJECT), retries=1) as rig:
        assert await rig.ask() == {"is": "one"}
    assert rig.tally.refused == ["HTTP 503:"]


BUSY = "429 Too Many Requests"
LONG_AGO = formatdate(0, usegmt=True)


@pytest.mark.parametrize(
    "after", [None, "0", LONG_AGO, "soon", "-5", "1e9", "\u00b2", "Mon, 1 Jan 99999999999999999999 0:0:0 GMT"]
)
async def test_a_busy_server_is_asked_again_as_often_as_is_allowed(after: str | None) -> None:
    told = {} if after is None else {"retry_after": after}
    async with asked(whole("slow\ndown", BUSY, **told), whole(OBJECT), retries=1) as rig:
        assert await rig.ask() == {"is": "one"}
    async with asked(whole("slow\ndown", BUSY, **told), retries=1) as rig:
        assert await rig.failed() == "the server did not answer: HTTP 429: slow down"
    assert rig.tally.calls == 2


@pytest.mark.parametrize("after", ["61", "9" * 400, formatdate(4e9, usegmt=True)])
async def test_a_server_that_wants_more_time_than_there_is_ends_the_asking(after: str) -> None:
    async with asked(whole("", BUSY, retry_after=after), retries=3) as rig:
        assert await rig.failed(EvaluationTimedOut) == "the server did not answer in time: HTTP 429:"
    assert rig.tally.calls == 1


async def test_a_refusal_without_an_end_is_cut() -> None:
    async with asked(endless(BUSY, b"x" * 65536), whole(OBJECT), retries=1) as rig:
        assert await rig.ask() == {"is": "one"}
    assert rig.tally.refused == [f"HTTP 429: {'x' * 200}"]
    async with asked(endless("401 No", b"x" * 65536)) as rig:
        assert await rig.failed() == f"the server refused: HTTP 401: {'x' * 200}"


@pytest.mark.parametrize(
    ("script", "config", "reason", "says"),
    [
        (endless(), {}, "evaluator_failed", "more than 4,194,304 bytes"),
        (endless(piece=b" ", pause_s=0.05), {"judge_timeout": 0.2}, "evaluator_failed", "no whole answer within 0.2 s"),
        (endless(piece=b" ", pause_s=0.05), {}, "evaluate_timeout", "within the evaluation's budget"),
        (whole("<html>", content_type="text/html"), {}, "evaluator_failed", "(text/html) is no JSON object: <html>"),
        (whole("", BUSY), {}, "evaluator_failed", "HTTP 429"),
        (whole("", BUSY, retry_after="60"), {"judge_max_retries": 1}, "evaluate_timeout", "HTTP 429"),
    ],
)
async def test_a_judge_without_an_answer_is_an_outcome_and_no_reward(
    script: Script, config: dict[str, Any], reason: str, says: str, bench: Bench
) -> None:
    async with raw_server(script) as server:
        await bench.start(judged(server, **{"judge_max_retries": 0, **config}))
        bench.trajectory = trajectory("It is 42.")
        with pytest.raises(StageFailed) as caught, of_evaluate(60):
            await bench.verdict(timeout_s=2.0 if reason == "evaluate_timeout" else 60)
    outcome = caught.value.outcome
    assert (outcome.boundary, outcome.reason) == (Boundary.EVALUATOR, reason)
    assert outcome.state is (RolloutState.TIMED_OUT if reason == "evaluate_timeout" else RolloutState.FAILED)
    assert (says in outcome.message, "\n" in outcome.message) == (True, False)
