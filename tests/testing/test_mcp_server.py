"""The MCP server of the conformance suite, asked by the protocol's text over each of its transports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from polarq.testing.conformance import mcp_server
from polarq.testing.conformance.mcp_server import Web, answered, code_of

HELLO = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
READY = {"jsonrpc": "2.0", "method": "notifications/initialized"}
LIST = {"jsonrpc": "2.0", "id": "a", "method": "tools/list"}
CALL = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "code_of", "arguments": {"word": "fig"}}}


def the_three(replies: list[dict[str, Any]]) -> None:
    hello, tools, called = replies
    assert [one["id"] for one in replies] == [0, "a", 2]
    assert hello["result"]["protocolVersion"] == "2025-03-26"
    assert "tools" in hello["result"]["capabilities"]
    assert [tool["name"] for tool in tools["result"]["tools"]] == ["code_of"]
    assert tools["result"]["tools"][0]["inputSchema"]["required"] == ["word"]
    assert called["result"]["content"] == [{"type": "text", "text": code_of("fig")}]


def test_over_stdio_each_request_has_one_line_and_a_notification_none() -> None:
    said = "".join(f"{json.dumps(one)}\n" for one in (HELLO, READY, LIST, CALL))
    command = [sys.executable, "-I", mcp_server.__file__]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=60, check=True)
    the_three([json.loads(line) for line in done.stdout.splitlines()])


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        yield server


def test_over_http_a_request_is_answered_and_a_notification_accepted(web: Web) -> None:
    with httpx.Client(trust_env=False, timeout=60) as client:
        url = web.url("streamable-http")
        assert client.post(url, json=READY).status_code == 202
        the_three([client.post(url, json=one).json() for one in (HELLO, LIST, CALL)])
        assert client.get(url).status_code == 405


def test_over_events_replies_come_on_the_stream(web: Web) -> None:
    with httpx.Client(trust_env=False, timeout=60) as client, client.stream("GET", web.url("sse")) as stream:
        lines = (line.partition(": ")[2] for line in stream.iter_lines() if line.startswith("data: "))
        where = httpx.URL(web.url("sse")).join(next(lines))
        replies = []
        for one in (HELLO, READY, LIST, CALL):
            assert client.post(where, json=one).status_code == 202
            if "id" in one:
                replies.append(json.loads(next(lines)))
        the_three(replies)
        assert client.post(web.url("sse").replace("/sse", "/messages?session=other"), json=LIST).status_code == 404


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("resources/list", {}, -32601),
        ("tools/call", {"name": "code_of", "arguments": {}}, -32602),
        ("tools/call", {"name": "other", "arguments": {"word": "fig"}}, -32602),
    ],
)
def test_what_it_does_not_have_is_an_error_by_the_protocols_number(
    method: str, params: dict[str, Any], code: int
) -> None:
    reply = answered({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    assert reply is not None
    assert reply["error"]["code"] == code
