"""A judge's server whose answers a test writes, one per call; real HTTP on loopback."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class ScriptedJudge:
    """`answers` are used up in order: a text, None (a refusal), or (HTTP status, headers)."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    async def _answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        if not self.answers:
            return web.json_response({"error": "the script has no answer left"}, status=400)
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], headers=answer[1], text="busy")
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        if answer is None:
            message["refusal"] = "I would rather not."
        usage = {"prompt_tokens": 90, "completion_tokens": 10}
        whole = json.dumps({"choices": [{"message": message}], "usage": usage})
        return web.Response(text=whole, content_type="application/json")


@asynccontextmanager
async def scripted_judge(*answers: Any) -> AsyncIterator[ScriptedJudge]:
    judge = ScriptedJudge(*answers)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", judge._answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield judge
    finally:
        await runner.cleanup()
