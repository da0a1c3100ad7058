"""The HTTP proxy of a sandbox: who is let through, and how everybody else is told no."""

from __future__ import annotations

import asyncio

import pytest

from polarq_worker.network.egress_door import Model
from polarq_worker.network.model_door import ProxyAddress, ToProxy
from tests.network.rig import LONG_S, Names, Web, echo, egress, serving


async def test_whom_the_list_names_is_reached_and_nobody_else() -> None:
    web = Web()
    async with serving(web.handle) as port, egress(f"127.0.0.1:{port}") as door:
        assert "web heard /a?b=c" in await door.get(f"http://127.0.0.1:{port}/a?b=c")
        assert (await door.connect("example.org:443")).startswith("HTTP/1.1 403 Refused by network policy")
        assert (await door.get("http://example.org/")).startswith("HTTP/1.1 403 ")
        assert door.denied == {"example.org:443": 1, "example.org:80": 1}


async def test_a_refusal_names_the_policy_and_what_would_allow_it() -> None:
    async with egress("python.example") as door:
        said = await door.connect("pypi.example:443")
    assert "network policy allowlist refuses pypi.example:443: add 'pypi.example' to the task's" in said
    async with egress(policy="proxy-only") as door:
        said = await door.connect("pypi.example:8443")
    assert "network policy proxy-only refuses pypi.example:8443: only the model is reached" in said
    assert "'allowlist' with 'pypi.example:8443' in allowed_hosts" in said


async def test_a_tunnel_carries_bytes_both_ways_and_keeps_a_half_close() -> None:
    async with serving(echo) as port, egress(f"127.0.0.1:{port}") as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        # What comes right behind the head belongs to the tunnel.
        writer.write(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\nfirst".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(5) == b"first"
        block = bytes(range(256)) * 4096
        writer.write(block)
        writer.write_eof()
        assert await reader.read() == block
        writer.close()


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:80",
        "localhost:80",
        "LOCALHOST.:80",
        "0x7f000001:80",
        "0177.0.0.1:80",
        "2130706433:80",
        "127.1:80",
        "127.0.0.1.:80",
        "0:80",
        "0.0.0.0:80",
        "[::1]:80",
        "[::]:80",
        "[::ffff:127.0.0.1]:80",
        "[::ffff:7f00:1]:80",
        "[::7f00:1]:80",
        "[64:ff9b::7f00:1]:80",
        "[2002:7f00:1::]:80",
        "[fe80::1]:80",
        "[fd00:ec2::254]:80",
        "169.254.169.254:80",
        "100.100.100.200:80",
        "10.0.0.1:80",
        "192.168.1.1:80",
        "172.16.5.5:80",
        "100.64.0.1:80",
        "198.18.0.1:80",
        "224.0.0.1:80",
        "255.255.255.255:80",
    ],
)
async def test_an_address_inside_is_refused_in_every_spelling(target: str) -> None:
    """Also where a list lets through any name at all, in any case."""
    names = Names({"localhost": [["127.0.0.1", "::1"]]})
    async with egress("*.example", "localhost", "8.8.8.8", names=names) as door:
        assert (await door.connect(target)).startswith("HTTP/1.1 403 ")
        assert (await door.get(f"http://{target}/")).startswith("HTTP/1.1 403 ")
        assert door.denied == {target: 2}


@pytest.mark.parametrize(
    "inside",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "fe80::1%lo",
    ],
)
async def test_a_name_that_leads_inside_is_refused(inside: str) -> None:
    async with egress("inside.example", names=Names({"inside.example": [[inside]]})) as door:
        said = await door.connect("inside.example:443")
        assert said.startswith("HTTP/1.1 403 ")
        assert "of this machine or of a private network" in said
        assert door.denied == {"inside.example:443": 1}


async def test_a_private_address_is_reached_by_name_when_the_list_has_the_address_too() -> None:
    web, names = Web(), Names({"wheels.example": [["127.0.0.1"]]})
    async with serving(web.handle) as port:
        async with egress(f"wheels.example:{port}", names=names) as door:
            assert f"add '127.0.0.1:{port}'" in await door.get(f"http://wheels.example:{port}/")
        async with egress(f"wheels.example:{port}", f"127.0.0.1:{port}", names=names) as door:
            assert "web heard /" in await door.get(f"http://wheels.example:{port}/")
            assert f"Host: wheels.example:{port}\r\n" in web.heads[0]


async def test_a_name_is_resolved_once_and_what_was_checked_is_connected_to() -> None:
    first, second = Web("first"), Web("second")
    names = Names({"turns.example": [["127.0.0.1"], ["127.0.0.2"]]})
    async with (
        serving(first.handle, "127.0.0.1") as port,
        serving(second.handle, "127.0.0.2", port),
        egress(f"turns.example:{port}", f"127.0.0.1:{port}", names=names) as door,
    ):
        assert "first heard" in await door.get(f"http://turns.example:{port}/")
        assert names.asked == ["turns.example"]
        # The second answer is another address, which is not in the list.
        assert "HTTP/1.1 403 " in await door.get(f"http://turns.example:{port}/")
    assert (first.connections, second.connections) == (1, 0)


async def test_of_several_addresses_only_those_that_may_be_are_tried() -> None:
    web, names = Web(), Names({"both.example": [["169.254.169.254", "127.0.0.2", "127.0.0.1"]]})
    async with serving(web.handle) as port, egress(f"both.example:{port}", f"127.0.0.1:{port}", names=names) as door:
        assert "web heard /" in await door.get(f"http://both.example:{port}/")


async def test_polarqs_own_services_are_opened_by_no_wildcard() -> None:
    web, names = Web(), Names({"redis.example": [["127.0.0.1"]]})
    async with serving(web.handle) as port:
        own = [("redis.example", port)]
        async with egress(f"*.example:{port}", f"127.0.0.1:{port}", names=names, closed=own) as door:
            assert "one of polarq's own services" in await door.get(f"http://redis.example:{port}/")
        async with egress(f"redis.example:{port}", f"127.0.0.1:{port}", names=names, closed=own) as door:
            assert "web heard /" in await door.get(f"http://redis.example:{port}/")


async def test_a_name_without_an_address_and_a_server_that_is_away_are_no_refusals() -> None:
    async with serving(echo) as port:
        pass
    async with egress("gone.example", f"127.0.0.1:{port}") as door:
        assert (await door.connect("gone.example:443")).startswith("HTTP/1.1 502 ")
        assert "cannot be reached" in await door.connect(f"127.0.0.1:{port}")
        assert door.denied == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LocalHost.", "[::1]"])
async def test_the_model_is_reached_also_by_who_sends_everything_to_the_proxy(host: str) -> None:
    async def nobody() -> None: ...

    web = Web("model")
    async with serving(web.handle) as port:
        way = ToProxy(lambda: ProxyAddress("127.0.0.1", port), nobody)
        async with egress(policy="proxy-only", model=Model(28080, way)) as door:
            assert "model heard /s/x/v1" in await door.get(f"http://{host}:28080/s/x/v1")
            assert " 200 " in await door.connect(f"{host}:28080")
            assert " 403 " in await door.connect(f"{host}:{port}")
            assert door.denied == {f"{host}:{port}": 1}


async def test_what_was_refused_is_counted_and_its_list_is_bounded() -> None:
    async with egress() as door:
        for n in range(130):
            await door.connect(f"h{n}.example:443")
        await door.connect("h0.example:443")
        assert len(door.denied) == 100
        assert door.denied["h0.example:443"] == 2
        assert door.door.denials.more == 30


async def test_a_client_that_says_nothing_is_hung_up_on() -> None:
    async with egress(head_s=0.05) as door:
        assert (await door.ask("GET http://slow.exa")).startswith("HTTP/1.1 408 ")


async def test_a_client_that_sends_much_before_it_reads_sees_why_it_was_refused() -> None:
    async with egress() as door:
        head = f"POST http://up.example/ HTTP/1.1\r\nContent-Length: {1 << 22}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(head.encode() + b"x" * (1 << 22))
        await writer.drain()
        async with asyncio.timeout(LONG_S):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 403 ")
        writer.close()
