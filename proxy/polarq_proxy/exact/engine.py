"""Rendering by the inference server itself, through its engine room."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from polarq_proxy.call import Answer, ModelCall
from polarq_proxy.engines.base import EngineRequest
from polarq_proxy.exact.base import CannotContinue, Missed
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import encode

if TYPE_CHECKING:
    from polarq_proxy.endpoints import Endpoint

RENDER_TIMEOUT_S = 20.0
SAMPLE_TIMEOUT_S = 60.0
"""For one sampled token: a server that just started may compile first."""


class EngineRenderer:
    """Asks one endpoint. Its name is the model's: replicas of one node render alike."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @property
    def name(self) -> str:
        return self._endpoint.model

    async def ids(self, call: ModelCall, *, generation_prompt: bool = True) -> list[int]:
        engine = self._endpoint.engine
        try:
            model = await self._endpoint.ensure_model()
            request = engine.rendering(call, model, generation_prompt=generation_prompt)
            if request is None:
                raise CannotContinue(Missed.NOT_RENDERED, f"{engine.name} has no route for it")
            return engine.read_rendering(await self._posted(request, RENDER_TIMEOUT_S))
        except CallFault as fault:
            raise CannotContinue(Missed.NOT_RENDERED, fault.message) from fault

    async def sample(self, call: ModelCall, prompt_ids: list[int] | None) -> Answer:
        """An answer outside any session, for `check`. Raises `CallFault`."""
        engine = self._endpoint.engine
        model = await self._endpoint.ensure_model()
        request = engine.request(call, model, stream=False, prompt_ids=prompt_ids)
        return engine.read(await self._posted(request, SAMPLE_TIMEOUT_S))

    async def _posted(self, request: EngineRequest, timeout_s: float) -> bytes:
        upstream = self._endpoint.upstream
        try:
            async with asyncio.timeout(timeout_s):
                async with upstream.post(request.path, encode(request.body), {}) as response:
                    data = await response.read()
                    if response.status != 200:
                        raise self._endpoint.engine.fault(response.status, response.headers, data)
                    return data
        except TimeoutError:
            text = f"{upstream.where} did not answer {request.path} in {timeout_s:g} s"
            raise CallFault(FaultKind.TIMED_OUT, text) from None
