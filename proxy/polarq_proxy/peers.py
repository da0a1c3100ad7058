"""The other processes of the same proxy: a call of a session that is theirs is passed on to them, byte for byte."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.front import owner_of, peer_path

_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "content-length", "expect",
    }
)  # fmt: skip


class Peers:
    """`index` is this process, out of `processes`."""

    def __init__(self, folder: Path, index: int, processes: int) -> None:
        self._folder = folder
        self.index = index
        self.processes = processes
        self._clients: dict[int, aiohttp.ClientSession] = {}

    @property
    def path(self) -> Path:
        """Where this process listens for the others."""
        return peer_path(self._folder, self.index)

    def owner(self, session: str | None) -> int | None:
        """The process that a session belongs to, if it is another one."""
        owner = owner_of(session, self.processes)
        return None if not session or owner == self.index else owner

    async def passed_on(self, request: web.BaseRequest, owner: int) -> web.StreamResponse:
        """What the owner answers. A harness that leaves takes the call at the owner with it."""
        client = self._clients.get(owner)
        if client is None:
            client = self._clients[owner] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(peer_path(self._folder, owner)), limit=0),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept", "Content-Type"),
            )
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
        data = request.content.iter_any() if request.body_exists else None
        url = URL(f"http://peer{request.rel_url.raw_path_qs}", encoded=True)
        try:
            answer = await client.request(request.method, url, headers=headers, data=data, allow_redirects=False)
        except aiohttp.ClientError as exc:
            text = f"the process of the proxy that has this session is being started again ({exc}); ask again"
            raise CallFault(FaultKind.OVERLOADED, text) from exc
        async with answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            with suppress(ConnectionError):  # the harness is gone: leaving the block hangs up on the owner
                await response.prepare(request)
                try:
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                except aiohttp.ClientError:
                    # The owner died in the middle: so the harness sees a cut, and not an end.
                    if request.transport is not None:
                        request.transport.abort()
            return response

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
