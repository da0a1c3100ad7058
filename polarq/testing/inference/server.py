"""The server with a life of its own: started in a test, or as a program."""

from __future__ import annotations

import errno
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from polarq.errors import PolarqError
from polarq.testing.inference.app import build_app
from polarq.testing.inference.calls import CallLedger
from polarq.testing.inference.engine import ENGINE
from polarq.testing.inference.options import ServerOptions
from polarq.testing.inference.scenario import Scenario, load_scenario

SHUTDOWN_S = 1.0
"""How long answers that are on their way may take after a stop is asked for."""


class CannotListen(PolarqError):
    """The address is taken or not ours."""


class ScriptedInference:
    """An async context manager around one running server.

        async with ScriptedInference(scenario="calculator") as inference:
            ...  # POST to f"{inference.base_url}/v1/chat/completions"
        assert inference.ledger[0].sampled_ids == ...

    Give `options`, or a scenario (a name, a file or a `Scenario`) and keywords of `ServerOptions`.
    """

    def __init__(
        self,
        options: ServerOptions | None = None,
        *,
        scenario: Scenario | str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        **settings: Any,
    ) -> None:
        if options is None:
            if scenario is not None:
                settings["scenario"] = load_scenario(scenario) if isinstance(scenario, str) else scenario
            options = ServerOptions.parse(settings, what="scripted inference server")
        self.options = options
        self._host = host
        self._port = port
        self._app = build_app(options)
        self._runner: web.AppRunner | None = None

    @property
    def ledger(self) -> CallLedger:
        """Every call that was sampled, in the order in which they began. Stays readable after the end."""
        return self._app[ENGINE].ledger

    @property
    def port(self) -> int:
        return self._port

    @property
    def base_url(self) -> str:
        """`http://HOST:PORT`, without `/v1`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def start(self) -> Self:
        """Raises `CannotListen`."""
        runner = web.AppRunner(
            self._app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None, handle_signals=False
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as exc:
            await runner.cleanup()
            why = "is taken; choose another port, or 0 for any" if exc.errno == errno.EADDRINUSE else f"{exc.strerror}"
            raise CannotListen(f"{self._host}:{self._port} {why}") from None
        self._runner = runner
        self._port = runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
