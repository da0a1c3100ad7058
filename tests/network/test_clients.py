"""Programs that sandboxes are full of, through an HTTP proxy that the usual variables name."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

import pytest

from polarq_worker.network.way_out import WayOut
from tests.needs import not_here
from tests.network.rig import LONG_S, Web, egress, serving

URLLIB = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=100).read().decode())"
HTTPX = "import sys, httpx; print(httpx.get(sys.argv[1], timeout=100).text)"
AIOHTTP = """
import asyncio, sys, aiohttp
async def main():
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(sys.argv[1]) as answer:
        print(await answer.text())
asyncio.run(main())
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def curl(*more: str) -> list[str]:
    if shutil.which("curl") is None:
        not_here("there is no curl")
    return ["curl", "-sS", "-m", "100", *more]


async def run(command: Sequence[str], proxy: str, own: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code and both streams; only loopback by another name goes by the proxy."""
    bare = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env = WayOut(True, proxy).applied({**bare, **(own or {})})
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(LONG_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


CLIENTS: dict[str, Callable[[], list[str]]] = {
    "curl": curl,
    "curl that tunnels": lambda: curl("--proxytunnel"),
    "curl that uploads": lambda: curl("-T", "/etc/passwd"),
    "urllib": lambda: python(URLLIB),
    "httpx": lambda: python(HTTPX),
    "aiohttp": lambda: python(AIOHTTP),
}


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_reaches_whom_the_list_names(client: str) -> None:
    web = Web()
    async with serving(web.handle) as port, egress(f"127.0.0.1:{port}") as door:
        code, out, err = await run([*CLIENTS[client](), f"http://127.0.0.1:{port}/x?y=1"], door.url)
        assert (code, "web heard /x?y=1" in out) == (0, True), err
        assert door.denied == {}
    assert web.connections == 1


@pytest.mark.parametrize("client", [name for name in CLIENTS if name != "curl that uploads"])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_client_is_told_that_it_was_refused(client: str, scheme: str) -> None:
    async with egress(policy="proxy-only") as door:
        _, out, err = await run([*CLIENTS[client](), f"{scheme}://refused.example/"], door.url)
        assert "403" in out + err or "network policy proxy-only refuses refused.example" in out + err
        assert set(door.denied) == {f"refused.example:{443 if scheme == 'https' else 80}"}


async def test_a_tasks_own_proxy_is_not_asked() -> None:
    own = {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "all_proxy": "socks5://127.0.0.1:9"}
    web = Web()
    async with serving(web.handle) as port, egress(f"127.0.0.1:{port}") as door:
        code, out, err = await run([*curl(), f"http://127.0.0.1:{port}/own"], door.url, own)
        assert (code, "heard /own" in out) == (0, True), err
