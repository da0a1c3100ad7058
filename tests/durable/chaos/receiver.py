"""Where the callbacks of a chaos run go: an HTTP server that is unwell now and then, and remembers what it took."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from polarq.callback.delivery import DELIVERY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, signature_holds

SECRET = "chaos"
MOST_FAILURES = 2
"""Of one delivery: fewer than it is tried."""
SLOW_S = 2.0


class Receiver:
    """`url` is fit to be a task's callback_url."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._failed = Counter[str]()
        self.took: dict[str, list[str]] = defaultdict(list)
        """task_id -> the delivery id of each callback that was taken."""
        self.states: dict[str, set[str]] = defaultdict(set)
        self.unsigned: list[str] = []
        self.unwell = 0
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(receiver.hear(dict(self.headers.items()), body))
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing is printed."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}/"
            thread = threading.Thread(target=server.serve_forever, name="chaos receiver", daemon=True)
            thread.start()
            try:
                yield
            finally:
                server.shutdown()
                thread.join()

    def hear(self, headers: dict[str, str], body: bytes) -> int:
        """The status to answer with."""
        delivery, told_at = headers[DELIVERY_HEADER], headers[TIMESTAMP_HEADER]
        if not signature_holds(SECRET, told_at, body, headers.get(SIGNATURE_HEADER, "")):
            self.unsigned.append(delivery)
            return 403
        with self._lock:
            ill = self._failed[delivery] < MOST_FAILURES and self._chance.random() < 0.4
            slow = self._chance.random() < 0.2
            self._failed[delivery] += ill
            self.unwell += ill
        if slow:
            time.sleep(SLOW_S)
        if ill:
            return 503
        task = json.loads(body)
        with self._lock:
            self.took[task["task_id"]].append(delivery)
            self.states[task["task_id"]].add(task["status"])
        return 200
