"""Rendering by the inference server itself, through its engine room."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from polarq_proxy.call import ModelCall
from polarq_proxy.exact.base import CannotContinue, Missed
from polarq_proxy.faults import CallFault
from polarq_proxy.jsons import encode

if TYPE_CHECKING:
    from polarq_proxy.endpoints import Endpoint

RENDER_TIMEOUT_S = 20.0


class EngineRenderer:
    """Asks one endpoint. Its name is the model's: replicas of one node render alike."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @property
    def name(self) -> str:
        return self._endpoint.model

    async def ids(self, call: ModelCall, *, generation_prompt: bool = True) -> list[int]:
        endpoint = self._endpoint
        try:
            model = await endpoint.ensure_model()
            request = endpoint.engine.rendering(call, model, generation_prompt=generation_prompt)
            if request is None:
                raise CannotContinue(Missed.NOT_RENDERED, f"{endpoint.engine.name} has no route for it")
            async with asyncio.timeout(RENDER_TIMEOUT_S):
                async with endpoint.upstream.post(request.path, encode(request.body), {}) as response:
                    data = await response.read()
                    if response.status != 200:
                        raise endpoint.engine.fault(response.status, response.headers, data)
            return endpoint.engine.read_rendering(data)
        except TimeoutError:
            raise CannotContinue(Missed.NOT_RENDERED, f"no answer in {RENDER_TIMEOUT_S:g} s") from None
        except CallFault as fault:
            raise CannotContinue(Missed.NOT_RENDERED, fault.message) from fault
