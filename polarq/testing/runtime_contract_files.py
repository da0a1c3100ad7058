"""The contract of every sandbox backend: files in and out, also those of a sandbox that means harm."""

from __future__ import annotations

import asyncio
import gzip
import os
from pathlib import Path

import pytest

from polarq.errors import RuntimeFault
from polarq.testing.runtime_protocols import LONG_S, Sandbox


class TransferContract:
    """Files in and out."""

    async def test_a_file_comes_in_and_out_with_its_mode(self, runtime: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "tool.sh"
        source.write_bytes(b"#!/bin/bash\necho ran\n")
        source.chmod(0o755)
        await runtime.put_file(source, "/polar/session/bin/tool")
        assert (await runtime.exec(["./tool"], cwd="/polar/session/bin", timeout_s=LONG_S)).stdout == b"ran\n"
        await runtime.get_file("/polar/session/bin/tool", tmp_path / "back", max_bytes=1000)
        assert (tmp_path / "back").read_bytes() == source.read_bytes()

    async def test_a_folder_replaces_what_was_there(self, runtime: Sandbox, tmp_path: Path) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        for folder, name in ((first, "old"), (second, "new")):
            (folder / "sub").mkdir(parents=True)
            (folder / "sub" / name).write_text(name)
            (folder / "link").symlink_to("sub")
        await runtime.put_dir(first, "data")
        await runtime.put_dir(second, "data")
        result = await runtime.exec("cd data && find . | sort && cat sub/new && readlink link", timeout_s=LONG_S)
        assert result.stdout_text.split() == [".", "./link", "./sub", "./sub/new", "newsub"]

    async def test_a_folder_comes_out_without_what_leads_out_of_it(self, runtime: Sandbox, tmp_path: Path) -> None:
        script = """mkdir -p out/sub; echo a > out/sub/a; chmod 4755 out/sub/a; mkfifo out/pipe; mkdir -p out/sub/deep
            ln -s /etc/passwd out/passwd; ln -s / out/root; ln -s ../../x out/sub/up; ln -s sub/../../x out/round
            ln -s sub/a out/link; ln -s ../a out/sub/deep/back"""
        await runtime.exec(script, timeout_s=LONG_S)
        fetched = await runtime.get_dir("out", tmp_path / "got", max_bytes=1000, max_files=20)
        got = {str(path.relative_to(tmp_path / "got")): path for path in (tmp_path / "got").rglob("*")}
        assert sorted(got) == ["link", "sub", "sub/a", "sub/deep", "sub/deep/back"]
        assert got["link"].is_symlink()
        assert got["sub/deep/back"].read_text() == "a\n"
        assert got["sub/a"].stat().st_mode & 0o7777 == 0o755
        refused = {entry.path: entry.reason for entry in fetched.refused}
        assert set(refused) == {"passwd", "root", "sub/up", "round", "pipe"}
        assert all(refused.values())

    async def test_a_file_that_does_not_fit_costs_no_other(self, runtime: Sandbox, tmp_path: Path) -> None:
        script = "mkdir out; echo a > out/a; truncate -s 1T out/sparse; head -c 5000 /dev/zero > out/big; touch out/z"
        await runtime.exec(script, timeout_s=LONG_S)
        fetched = await runtime.get_dir("out", tmp_path / "got", max_bytes=1000, max_files=20)
        assert sorted(path.name for path in (tmp_path / "got").iterdir()) == ["a", "z"]
        assert sorted(entry.path for entry in fetched.refused) == ["big", "sparse"]

    async def test_what_is_fetched_is_limited(self, runtime: Sandbox, tmp_path: Path) -> None:
        await runtime.exec("mkdir out; head -c 5000 /dev/zero > out/big; touch out/{1..30}", timeout_s=LONG_S)
        with pytest.raises(RuntimeFault, match="1000 bytes"):
            await runtime.get_file("out/big", tmp_path / "big", max_bytes=1000)
        with pytest.raises(RuntimeFault, match="20 files"):
            await runtime.get_dir("out", tmp_path / "got", max_bytes=10_000, max_files=20)

    @pytest.mark.parametrize("path", ["../file", "/polar/session/../../file", "a/../../../file"])
    async def test_a_path_that_climbs_is_refused(self, runtime: Sandbox, tmp_path: Path, path: str) -> None:
        with pytest.raises(RuntimeFault, match=r"\.\."):
            await runtime.put_bytes(b"x", path)
        with pytest.raises(RuntimeFault, match=r"\.\."):
            await runtime.get_file(path, tmp_path / "got", max_bytes=1000)

    async def test_links_lead_nothing_out_of_the_sandbox(self, runtime: Sandbox, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_text("secret")
        await runtime.exec(f"ln -s {outside} folder; ln -s {outside}/secret file", timeout_s=LONG_S)
        for path in ("folder/secret", "file"):
            with pytest.raises(RuntimeFault):
                await runtime.get_file(path, tmp_path / "got", max_bytes=1000)
        with pytest.raises(RuntimeFault):
            await runtime.put_bytes(b"planted", "folder/planted")
        await runtime.put_bytes(b"mine", "file")
        assert sorted(path.name for path in outside.iterdir()) == ["secret"]
        assert (outside / "secret").read_text() == "secret"
        assert (await runtime.exec("cat file", timeout_s=LONG_S)).stdout == b"mine"

    async def test_a_pipe_is_not_fetched(self, runtime: Sandbox, tmp_path: Path) -> None:
        await runtime.exec("mkfifo pipe", timeout_s=LONG_S)
        with pytest.raises(RuntimeFault, match="regular file"):
            await runtime.get_file("pipe", tmp_path / "got", max_bytes=1000)

    async def test_a_missing_file_is_named(self, runtime: Sandbox, tmp_path: Path) -> None:
        with pytest.raises(RuntimeFault, match="nothing/here"):
            await runtime.get_file("nothing/here", tmp_path / "got", max_bytes=1000)


NEWLINE = "two\nlines"
LONGEST = "n" * 255


class HostileFilesContract:
    """What a sandbox can put in the way of whoever fetches its files."""

    async def test_odd_names_come_in_and_out(self, runtime: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "odd"
        source.mkdir()
        for name in (NEWLINE, LONGEST, "-rf", " ", "\u00e4\U0001f9ea"):
            (source / name).write_text(name)
        await runtime.put_dir(source, "in")
        await runtime.put_file(source / LONGEST, LONGEST)
        await runtime.put_dir(source, f"{LONGEST[1:]}d")
        await runtime.get_dir("in", tmp_path / "out", max_bytes=100_000, max_files=100)
        assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
            path.name: path.read_text() for path in source.iterdir()
        }
        await runtime.get_file(f"in/{NEWLINE}", tmp_path / "got", max_bytes=1000)
        assert (tmp_path / "got").read_text() == NEWLINE

    async def test_a_name_that_is_no_text_costs_no_other(self, runtime: Sandbox, tmp_path: Path) -> None:
        await runtime.exec("mkdir out; echo a > out/a; echo b > out/$'\\xff\\xfe'", timeout_s=LONG_S)
        await runtime.get_dir("out", tmp_path / "got", max_bytes=1000, max_files=10)
        assert (tmp_path / "got/a").read_text() == "a\n"

    async def test_hard_links_are_files_like_others(self, runtime: Sandbox, tmp_path: Path) -> None:
        await runtime.exec("mkdir out; echo a > out/a; ln out/a out/b; chmod 600 out/a", timeout_s=LONG_S)
        await runtime.get_dir("out", tmp_path / "got", max_bytes=1000, max_files=10)
        assert [(tmp_path / "got" / name).read_text() for name in "ab"] == ["a\n", "a\n"]
        assert (tmp_path / "got/a").stat().st_uid == os.getuid()

    async def test_an_archive_that_would_burst_is_a_file_like_others(self, runtime: Sandbox, tmp_path: Path) -> None:
        # Each member is a megabyte of zeros: 5 MB, and 5 GB to whoever unpacks it.
        bomb = tmp_path / "bomb.tar.gz"
        bomb.write_bytes(gzip.compress(bytes(1 << 20), 9) * 5000)
        await runtime.put_file(bomb, "out/bomb.tar.gz")
        await runtime.get_file("out/bomb.tar.gz", tmp_path / "one", max_bytes=10_000_000)
        await runtime.get_dir("out", tmp_path / "got", max_bytes=10_000_000, max_files=10)
        for got in (tmp_path / "one", tmp_path / "got/bomb.tar.gz"):
            assert got.read_bytes() == bomb.read_bytes()

    async def test_a_tree_without_end_is_cut_and_can_be_removed(self, runtime: Sandbox, tmp_path: Path) -> None:
        deep = "mkdir -p out/$(printf 'd/%.0s' $(seq 1500)); echo a > out/a"
        assert (await runtime.exec(deep, timeout_s=LONG_S)).ok
        fetched = await runtime.get_dir("out", tmp_path / "got", max_bytes=1000, max_files=5000)
        assert (tmp_path / "got/a").read_text() == "a\n"
        assert len(fetched.refused) == 1
        await runtime.stop()

    async def test_a_sparse_file_is_not_fetched_beyond_the_limit(self, runtime: Sandbox, tmp_path: Path) -> None:
        await runtime.exec("truncate -s 1T sparse", timeout_s=LONG_S)
        with pytest.raises(RuntimeFault, match="1000 bytes"):
            await runtime.get_file("sparse", tmp_path / "got", max_bytes=1000)
        assert not (tmp_path / "got").exists() or (tmp_path / "got").stat().st_size < 10_000_000

    async def test_a_folder_that_turns_into_a_link_leads_nowhere(self, runtime: Sandbox, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "hostname").write_text("of the host")
        script = f"""mkdir -p out/swapped; echo mine > out/swapped/hostname; ln -s {outside} link; echo x > up
            while :; do mv -T out/swapped aside; mv -T link out/swapped; mv -T out/swapped link
            mv -T aside out/swapped; done"""
        swapping = asyncio.ensure_future(runtime.exec(script, timeout_s=LONG_S))
        while not (await runtime.exec("[ -s up ]", timeout_s=LONG_S)).ok:
            assert not swapping.done(), await swapping
        for number in range(30):
            got = tmp_path / f"got{number}"
            await runtime.get_dir("out", got, max_bytes=1000, max_files=10)
            texts = {path.read_text() for path in got.rglob("*") if path.is_file() and not path.is_symlink()}
            assert texts <= {"mine\n"}
            try:
                await runtime.get_file("out/swapped/hostname", tmp_path / "one", max_bytes=1000)
            except RuntimeFault:
                continue
            assert (tmp_path / "one").read_text() == "mine\n"
        swapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swapping
        assert (outside / "hostname").read_text() == "of the host"
