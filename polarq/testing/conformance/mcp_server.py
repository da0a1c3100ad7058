"""A small MCP server with one tool, by the protocol's text: of the standard library only, and of any Python 3.

    python mcp_server.py        one message a line, on standard input and output (transport `stdio`)

`Web` serves the same over HTTP: `/mcp` is transport `streamable-http`, `/sse` the older `sse`. The tool's answer can be
had by nobody who did not call it: `code_of` says what it is.
"""

from __future__ import annotations

import hashlib
import json
import queue
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from typing import Self  # of a newer Python than a sandbox may have

TOOL = "code_of"
_VERSION = "2025-06-18"
"""Of the protocol, where a client names none."""
_TOOL = {
    "name": TOOL,
    "description": "Tells the code of a word.",
    "inputSchema": {
        "type": "object",
        "properties": {"word": {"type": "string", "description": "Any word."}},
        "required": ["word"],
    },
}


def code_of(word: str) -> str:
    """16 letters and digits."""
    return hashlib.sha256(f"the code of {word}".encode()).hexdigest()[:16]


def answered(message: Any) -> dict[str, Any] | None:
    """The reply to one JSON-RPC message; None for what wants none."""
    if not isinstance(message, dict) or "id" not in message or "method" not in message:
        return None
    head = {"jsonrpc": "2.0", "id": message["id"]}
    method, params = message["method"], message.get("params") or {}
    if method == "initialize":
        return {
            **head,
            "result": {
                "protocolVersion": params.get("protocolVersion", _VERSION),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "codes", "version": "1.0"},
            },
        }
    if method == "ping":
        return {**head, "result": {}}
    if method == "tools/list":
        return {**head, "result": {"tools": [_TOOL]}}
    word = (params.get("arguments") or {}).get("word")
    if method == "tools/call" and params.get("name") == TOOL and isinstance(word, str):
        return {**head, "result": {"content": [{"type": "text", "text": code_of(word)}], "isError": False}}
    if method == "tools/call":
        return {**head, "error": {"code": -32602, "message": f"call {TOOL} with a text 'word'"}}
    return {**head, "error": {"code": -32601, "message": f"there is no {method} here"}}


def over_stdio() -> None:
    for line in sys.stdin:
        reply = answered(json.loads(line)) if line.strip() else None
        if reply is not None:
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        where = urlsplit(self.path)
        many = [reply for reply in map(answered, message if isinstance(message, list) else [message]) if reply]
        if where.path == "/mcp":
            reply = many if isinstance(message, list) else many[0] if many else None
            self._say(200 if reply else 202, reply or None)
            return
        waiting = self.server.streams.get((parse_qs(where.query).get("session") or [""])[0])
        if where.path != "/messages" or waiting is None:
            self._say(404)
            return
        for one in many:
            waiting.put(one)
        self._say(202)

    def do_GET(self) -> None:
        if urlsplit(self.path).path != "/sse":
            self._say(405)  # it has nothing to say unasked
            return
        session = uuid.uuid4().hex
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.server.streams[session] = waiting
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self._event("endpoint", f"/messages?session={session}")
        while (reply := waiting.get()) is not None:
            self._event("message", json.dumps(reply))
        self.close_connection = True

    def do_DELETE(self) -> None:
        self._say(405)

    def _say(self, status: int, reply: Any = None) -> None:
        body = b"" if reply is None else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if body:
            self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def _event(self, kind: str, data: str) -> None:
        self.wfile.write(f"event: {kind}\ndata: {data}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Standard error is not for this."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.streams: dict[str, queue.SimpleQueue[Any]] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none of ours to tell of."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Web:
    """The server over HTTP, at a port of this machine, for as long as the context lasts."""

    def __enter__(self) -> Self:
        self._server = _Server()
        self._thread = threading.Thread(target=self._server.serve_forever, name="mcp over http")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for waiting in list(self._server.streams.values()):
            waiting.put(None)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def url(self, transport: str) -> str:
        path = {"sse": "sse", "streamable-http": "mcp"}[transport]
        return f"http://127.0.0.1:{self._server.server_address[1]}/{path}"


if __name__ == "__main__":
    over_stdio()
