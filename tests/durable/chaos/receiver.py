"""A trainer's server for callbacks that fails now and then: refuses for a while, or breaks before it has answered."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from types import TracebackType
from typing import Self

from polarq.callback.delivery import DELIVERY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, signature_holds

SECRET = "chaos"
MOST_FAILURES = 2
"""Of one delivery, fewer than a sender tries."""


@dataclass(frozen=True)
class Taken:
    """One delivery that was answered with 200."""

    delivery_id: str
    signed: bool
    task_id: str
    ended: int
    """Rollouts that the body says have ended."""


class Receiver:
    """Listens within the block; `taken` has, for each task's address, what arrived there."""

    def __init__(self, seed: int) -> None:
        self.taken: dict[str, list[Taken]] = defaultdict(list)
        self.failed: Counter[str] = Counter()
        """How it failed, by the word for it."""
        self._seed = seed
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._post(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def url(self, task_id: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{task_id}"

    def _post(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        name = request.path.removeprefix("/")
        if (how := self._fails(name)) is not None:
            if how == "refused":
                request.send_response(503)
                request.send_header("Content-Length", "0")
                request.end_headers()
            else:
                request.close_connection = True
            return
        said = json.loads(body)
        signed = signature_holds(
            SECRET, request.headers[TIMESTAMP_HEADER], body, request.headers.get(SIGNATURE_HEADER, "")
        )
        taken = Taken(request.headers[DELIVERY_HEADER], signed, said["task_id"], int(said["completed_sessions"]))
        with self._lock:
            self.taken[name].append(taken)
        request.send_response(200)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _fails(self, name: str) -> str | None:
        """As the seed says: the first tries of some deliveries."""
        chance = Random(f"{self._seed} {name}")
        failures = chance.choice([0, 0, 0, 1, MOST_FAILURES])
        how = chance.choice(["refused", "broken"])
        with self._lock:
            self._tries[name] += 1
            if self._tries[name] > failures:
                return None
            self.failed[how] += 1
            return how

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="chaos receiver", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
