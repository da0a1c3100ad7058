"""The parts of the docker runtime that need no daemon: frames, records, configuration, logins."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from pathlib import Path
from typing import Any, Self

import pytest
from aiodocker import Docker
from aiohttp import UnixConnector

from polarq.contracts.specs import RuntimeSpec
from polarq.errors import BackendAway, ImageDenied
from polarq.topology.runtimes import DockerRuntimeSection, RuntimesSection
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker import config
from polarq_worker.runtimes.docker.commands import Command
from polarq_worker.runtimes.docker.daemon import address
from polarq_worker.runtimes.docker.logins import HUB, login, registry_of
from polarq_worker.runtimes.docker.printed import Printed
from polarq_worker.runtimes.docker.records import Records
from polarq_worker.runtimes.docker.shell import Secrets

TOKEN = "0123456789abcdef" * 2


def fed(records: Records, data: bytes, size: int) -> tuple[bytes, list[str]]:
    output, found = b"", list[str]()
    for at in range(0, len(data), size):
        more, told = records.feed(data[at : at + size])
        output, found = output + more, found + told
    return output + records.rest(), found


class TestRecords:
    @pytest.mark.parametrize("size", [1, 2, 7, 33, 1000])
    def test_they_are_taken_out_and_everything_else_comes_through(self, size: int) -> None:
        mark = f"\x01{TOKEN} ".encode()
        data = b"a\x01b\x01" + mark + b"S 7 0 0\n\xf0\x9f" + mark[:20] + b"\0" + mark + b"E\n" + b"end\x01"
        output, told = fed(Records(TOKEN), data, size)
        assert (output, told) == (b"a\x01b\x01\xf0\x9f" + mark[:20] + b"\0end\x01", ["S 7 0 0", "E"])

    def test_another_commands_record_is_output(self) -> None:
        data = b"\x01" + b"f" * 32 + b" E 0 0 0\n"
        assert fed(Records(TOKEN), data, 1000) == (data, [])

    def test_what_begins_like_one_and_never_ends_is_output_and_not_kept_in_memory(self) -> None:
        data = b"\x01" + TOKEN.encode() + b" " + b"x" * 10_000
        records = Records(TOKEN)
        output, told = records.feed(data)
        assert (output, told, records.rest()) == (data, [], b"")


class FakeDaemon:
    """Speaks just enough HTTP to run one command, whose frames it sends as it is told to."""

    def __init__(self, path: Path, pieces: list[bytes]) -> None:
        self.path = path
        self._pieces = pieces

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
            if b"/start" in head.split(b"\r\n")[0]:
                writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
                for piece in self._pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.close()
                return
            body = json.dumps({"ApiVersion": "1.41", "Id": "e"}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
            writer.write(body)


def frame(stream: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", stream, len(data)) + data


class TestFrames:
    """Field case R01."""

    async def run(self, tmp_path: Path, pieces: list[bytes]) -> tuple[bytes, bytes, Command]:
        out, err = Printed(8 << 20, tmp_path / "log.stdout"), Printed(8 << 20, tmp_path / "log.stderr")
        async with FakeDaemon(tmp_path / "daemon.sock", pieces) as daemon:
            docker = Docker("http://docker", connector=UnixConnector(str(daemon.path)))
            command = Command(docker, "c", Secrets(TOKEN, "", ""), out, err)
            command.begin(["x"], {}, "")
            assert command.reading is not None
            await command.reading
            await docker.close()
            await docker.connector.close()
        return out.value(), err.value(), command

    async def test_frames_cut_after_each_byte_are_put_together(self, tmp_path: Path) -> None:
        whole = bytes.fromhex("0100000000000003F09FA702000000000000047761726e0100000000000001AA0100000000000000")
        out, err, command = await self.run(tmp_path, [bytes([byte]) for byte in whole])
        assert (out.decode(), err) == ("\U0001f9ea", b"warn")
        assert command.broken is None
        assert (tmp_path / "log.stdout").read_bytes() == out

    async def test_a_frame_of_three_megabytes_is_one(self, tmp_path: Path) -> None:
        data = bytes(range(256)) * 4096 * 3
        out, err, _ = await self.run(tmp_path, [frame(1, data), frame(2, b"end")])
        assert (out == data, err) == (True, b"end")

    async def test_the_end_is_told_by_records_behind_the_output(self, tmp_path: Path) -> None:
        start, end = f"\x01{TOKEN} S 7 1 0\n".encode(), f"\x01{TOKEN} K 137 2 0\n".encode()
        done = f"\x01{TOKEN} E\n".encode()
        frames = [frame(2, start), frame(1, b"out" + done), frame(2, b"err" + end[:9]), frame(2, end[9:])]
        out, err, command = await self.run(tmp_path, frames)
        ending = await command.ended
        assert (out, err) == (b"out", b"err")
        assert (ending.how, ending.code, ending.oom_kills, command.pid) == ("K", 137, 1, "7")


def spec(**more: Any) -> RuntimeSpec:
    return RuntimeSpec.model_validate({"backend": "docker", "image": "i", **more})


def body(**more: Any) -> dict[str, Any]:
    online = more.pop("online", True)
    return config.container(
        spec(**more), Host("n", "7"), runtime_id="r-1-3-agent", image="i", image_id="sha256:1", online=online
    )


class TestConfiguration:
    def test_limits_are_the_tasks(self) -> None:
        limits = body(cpus=0.5, memory_mb=64, storage_mb=100, gpus=2, max_processes=77)["HostConfig"]
        assert limits["NanoCpus"] == 500_000_000
        assert limits["Memory"] == limits["MemorySwap"] == 64 << 20
        assert limits["StorageOpt"] == {"size": "100M"}
        assert limits["DeviceRequests"] == [{"Driver": "", "Count": 2, "Capabilities": [["gpu"]]}]
        assert limits["PidsLimit"] == 77

    def test_rights_are_few_always(self) -> None:
        limits = body()["HostConfig"]
        assert limits["CapDrop"] == ["ALL"]
        assert {"SYS_ADMIN", "NET_RAW", "MKNOD", "SYS_PTRACE", "NET_ADMIN"}.isdisjoint(limits["CapAdd"])
        assert "no-new-privileges" in limits["SecurityOpt"]
        assert not limits.get("Privileged")

    def test_an_offline_one_has_no_network_and_no_volumes_of_the_internet(self) -> None:
        volumes = {"internet_volumes": ["/a:/a"], "kwargs": {"volumes": ["/b:/b:ro"]}}
        on, off = body(**volumes)["HostConfig"], body(online=False, **volumes)["HostConfig"]
        assert (on["NetworkMode"], on["Binds"]) == ("bridge", ["/b:/b:ro", "/a:/a"])
        assert (off["NetworkMode"], off["Binds"]) == ("none", ["/b:/b:ro"])
        assert body(network="host", network_policy="full")["HostConfig"]["NetworkMode"] == "host"

    def test_labels_name_node_worker_sandbox_and_rollout(self) -> None:
        labels = body()["Labels"]
        assert {labels[key] for key in (config.NODE, config.INCARNATION, config.RUNTIME, config.ROLLOUT)} == {
            "n", "7", "r-1-3-agent", "r-1",
        }  # fmt: skip
        assert config.labels("pool-abc", Host("n", "7"), "")[config.ROLLOUT] == ""

    def test_names_are_allowed_and_nobody_elses(self, tmp_path: Path) -> None:
        odd = "r/\u00e4 " * 50
        names = {config.name(odd, Host("n", "7", tmp_path / folder)) for folder in "ab"}
        names.add(config.name(odd, Host("m", "7", tmp_path / "a")))
        assert len(names) == 3
        assert all(len(name) < 100 and name.replace("-", "").replace("_", "").isalnum() for name in names)

    def test_what_no_container_can_give_is_said_with_its_key(self) -> None:
        problems = config.problems(
            spec(
                workdir="a/../b",
                direct_exec_init_command="x",
                internet_volumes=["nonsense"],
                kwargs={"privileged": True, "volumes": ["/a"], "shm_mb": 0},
            )
        )
        keys = [line.split(":")[0] for line in problems]
        assert keys == [
            "direct_exec_init_command",
            "workdir",
            "kwargs.privileged",
            "kwargs.volumes",
            "internet_volumes",
            "kwargs.shm_mb",
        ]
        assert config.problems(spec(workdir="/testbed", cpus=1, kwargs={"volumes": ["/a:/b:ro"], "shm_mb": 512})) == []

    def test_the_environment_is_the_images_over_ours(self) -> None:
        assert config.environment(["PATH=/opt", "A=b=c"]) == {
            "LANG": "C.UTF-8", "TERM": "dumb", "PATH": "/opt", "A": "b=c",
        }  # fmt: skip


class TestAddress:
    def test_the_topology_names_it_then_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
        named = RuntimesSection(docker=DockerRuntimeSection(url="unix:///x.sock"))
        assert address(Host(settings=named)) == "unix:///x.sock"
        assert address(Host()) == "tcp://elsewhere:2375"

    def test_without_any_one_line_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("DOCKER_HOST", raising=False)
        monkeypatch.setattr("polarq.docker_daemon.usual_sockets", lambda: [tmp_path / "none.sock"])
        with pytest.raises(BackendAway, match=r"runtimes\.docker\.url") as raised:
            address(Host())
        assert "\n" not in str(raised.value)


class TestLogins:
    def file(self, tmp_path: Path, content: object) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        return str(path)

    def test_an_images_registry_is_its_first_part_or_the_hub(self) -> None:
        assert registry_of("registry.test:5000/a/b:c") == "registry.test:5000"
        assert registry_of("localhost/a") == "localhost"
        assert registry_of("library/debian") == registry_of("debian") == HUB

    def test_a_login_is_found_however_its_registry_is_spelled(self, tmp_path: Path) -> None:
        secret = base64.b64encode(b"me:pass:word").decode()
        file = self.file(tmp_path, {"auths": {"https://registry.test/v2/": {"auth": secret}}})
        assert login("registry.test/a", file) == {
            "username": "me", "password": "pass:word", "serveraddress": "registry.test",
        }  # fmt: skip
        assert login("other.test/a", file) is None

    def test_a_token_is_taken_as_it_is(self, tmp_path: Path) -> None:
        file = self.file(tmp_path, {"auths": {"registry.test": {"identitytoken": "t"}}})
        assert login("registry.test/a", file) == {"identitytoken": "t", "serveraddress": "registry.test"}

    @pytest.mark.parametrize(
        "content",
        [
            {"credHelpers": {"registry.test": "pass"}},
            {"auths": {"registry.test": {}}, "credsStore": "desktop"},
            {"auths": {"registry.test": {"auth": "%%%"}}},
        ],
    )
    def test_what_cannot_be_used_is_refused_in_one_line_without_secrets(self, tmp_path: Path, content: object) -> None:
        file = self.file(tmp_path, content)
        with pytest.raises(ImageDenied, match=r"registry\.test") as raised:
            login("registry.test/a", file)
        assert "\n" not in str(raised.value)
        assert login("other.test/a", file) is None

    def test_a_file_that_is_named_must_be_there(self, tmp_path: Path) -> None:
        with pytest.raises(ImageDenied, match="registry_auth"):
            login("a", str(tmp_path / "none"))


def test_labels_of_another_node_or_deployment_are_not_its_own(tmp_path: Path) -> None:
    hosts = [Host("n", "7", tmp_path / "a"), Host("m", "7", tmp_path / "a"), Host("n", "7", tmp_path / "b")]
    labelled = [config.labels("r", host, "") for host in hosts]
    assert [[config.is_own(labels, host) for labels in labelled] for host in hosts] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]
    assert not config.is_own(None, hosts[0])
