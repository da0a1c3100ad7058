"""A Responses request without a server around it, and a Responses stream as the strictest of its readers takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarq_proxy.call import Answer, Choice, ChoiceDelta, ModelCall, Piece
from polarq_proxy.dialects.base import NativeRequest, ReplyHead
from polarq_proxy.dialects.openai_responses import OpenAIResponsesDialect
from polarq_proxy.dialects.responses_stream import ResponsesStream

from .rig import Rig, refuse

DIALECT = OpenAIResponsesDialect()
ANSWER_ID = "0123456789abcdef01234567"
HEAD = ReplyHead(ANSWER_ID, 1_700_000_000)
PATH = "/v1/responses"
FIXTURES = Path(__file__).parent.parent / "fixtures" / "harness"

_TERMINAL = ("response.completed", "response.incomplete", "response.failed")
_TEXTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


def parsed(body: Any) -> ModelCall:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    match = re.fullmatch("responses", "responses")
    assert match is not None
    return DIALECT.parse(NativeRequest("responses", {}, {}, data), match)


def asked(given: Any = "hello", **fields: Any) -> ModelCall:
    return parsed({"model": "asked", "input": given, **fields})


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    """What a list of items means to the model."""
    return asked(list(items), **fields).messages


def call_part(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answered(finish: str = "stop", **message: Any) -> Answer:
    return Answer([Choice(0, {"role": "assistant", "content": None, **message}, finish_reason=finish)], model="served")


def rendered(call: ModelCall, answer: Answer) -> dict[str, Any]:
    tree = json.loads(DIALECT.render(call, answer, HEAD).body, parse_constant=refuse)
    assert isinstance(tree, dict)
    return tree


def stream_of(call: ModelCall) -> ResponsesStream:
    writer = DIALECT.writer(call, HEAD)
    assert isinstance(writer, ResponsesStream)
    return writer


def said(**delta: Any) -> Piece:
    return Piece([ChoiceDelta(0, delta)])


def turn(name: str, number: int) -> dict[str, Any]:
    """The body of a harness's N-th request."""
    body = json.loads((FIXTURES / name / f"turn{number}.json").read_text("utf-8"))["body"]
    assert isinstance(body, dict)
    return body


@dataclass
class Events:
    """A stream, read by a client that keeps one current item; what such a client would lose is an assertion here."""

    all: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0

    @classmethod
    def of(cls, data: bytes) -> Events:
        events = cls()
        for block in data.decode("utf-8").split("\n\n"):
            if block.startswith(":"):
                events.comments += 1
            elif block:
                name, _, rest = block.partition("\n")
                assert name.startswith("event: "), block
                assert rest.startswith("data: "), block
                event = json.loads(rest[6:], parse_constant=refuse)
                assert event["type"] == name[7:]
                assert event["sequence_number"] == len(events.all)
                events.all.append(event)
        return events

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.all]

    @property
    def last(self) -> dict[str, Any]:
        return self.all[-1]

    def deltas(self, kind: str = "response.output_text") -> str:
        return "".join(event["delta"] for event in self.all if event["type"] == f"{kind}.delta")

    def items(self) -> list[dict[str, Any]]:
        """The items that were sent whole, each checked against everything that was said of it before."""
        found: list[dict[str, Any]] = []
        current: dict[str, Any] | None = None
        text = ""
        for event in self.all:
            kind = event["type"]
            if kind == "response.output_item.added":
                assert current is None, "an item begins before the last one ended"
                current, text = event["item"], ""
                assert event["output_index"] == len(found)
                assert current["status"] == "in_progress"
            elif kind == "response.output_item.done":
                assert current is not None
                assert event["output_index"] == len(found)
                item = event["item"]
                assert (item["id"], item["type"]) == (current["id"], current["type"])
                assert text == _text_of(item)
                found.append(item)
                current = None
            elif "item_id" in event:
                assert current is not None
                assert (event["item_id"], event["output_index"]) == (current["id"], len(found))
                if kind.endswith(".delta"):
                    assert event["delta"], "a delta says nothing"
                    text += event["delta"]
                elif kind.startswith("response.content_part."):
                    assert (event["content_index"], event["part"]["text"]) == (0, text)
                else:
                    assert kind.endswith(".done")
                    assert text == event.get("text", event.get("arguments", event.get("input")))
        assert current is None, "an item never ended"
        return found

    def response(self) -> dict[str, Any]:
        """The response object of a stream that is whole."""
        assert self.kinds[:2] == ["response.created", "response.in_progress"]
        assert [kind for kind in self.kinds if kind in _TERMINAL] == self.kinds[-1:]
        response = self.last["response"]
        assert isinstance(response, dict)
        if self.kinds[-1] != "response.failed":
            assert response["output"] == self.items()
        assert self.kinds[-1] == f"response.{response['status']}"
        first = self.all[0]["response"]
        assert (first["status"], first["output"], first["id"]) == ("in_progress", [], response["id"])
        return response


def _text_of(item: dict[str, Any]) -> str:
    if item["type"] in _TEXTS:
        return "".join(part["text"] for part in item["content"])
    return str(item.get("arguments", item.get("input", "")))


def streamed(call: ModelCall, pieces: Sequence[Piece], answer: Answer, held: int = 0) -> Events:
    """Everything that a writer sends; the last `held` pieces come with the end."""
    writer = stream_of(call)
    split = len(pieces) - held
    out = [writer.piece(piece) for piece in pieces[:split]]
    return Events.of(b"".join([*out, writer.end(pieces[split:], answer)]))


async def ask(rig: Rig, given: Any = "hello", **fields: Any) -> dict[str, Any]:
    """The whole answer to a request that must succeed."""
    status, body = await rig.post({"model": "asked", "input": given, **fields}, PATH)
    assert status == 200, body
    assert isinstance(body, dict)
    return body


async def stream(rig: Rig, given: Any = "hello", **fields: Any) -> Events:
    status, headers, raw = await rig.raw({"model": "asked", "input": given, "stream": True, **fields}, PATH)
    assert status == 200, raw
    assert headers["content-type"].startswith("text/event-stream")
    return Events.of(raw)
