"""Archives, both ways, also those that mean harm. No sandbox is needed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import socket
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.archives.pack import Owner, Packer, parents_of
from polarq_worker.runtimes.archives.tar import BrokenArchive, Entry, Kind, TarReader
from polarq_worker.runtimes.archives.unpack import TooLong, Unpacker
from polarq_worker.runtimes.fetched import MAX_DEPTH, TooMany


def archive(*entries: tuple[str, bytes, bytes, str, int], format: int = tarfile.PAX_FORMAT) -> bytes:
    """(name, type, content, link, mode) each."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for name, kind, content, link, mode in entries:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname, info.mode = kind, len(content), link, mode
            info.uid = info.gid = 12345
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def read(data: bytes, size: int) -> tuple[list[Entry], bytes]:
    reader, entries, content = TarReader(), list[Entry](), b""
    for at in range(0, len(data), size):
        for item in reader.feed(data[at : at + size]):
            if isinstance(item, Entry):
                entries.append(item)
            else:
                content += item
    assert reader.ended
    return entries, content


class TestTarReader:
    @pytest.mark.parametrize("size", [1, 511, 512, 513, 100_000])
    @pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
    def test_it_reads_what_others_write_however_it_is_cut(self, size: int, format: int) -> None:
        long = "d/" + "n" * 250
        data = archive(
            ("d", tarfile.DIRTYPE, b"", "", 0o755),
            (long, tarfile.REGTYPE, b"x" * 700, "", 0o4755),
            ("d/l", tarfile.SYMTYPE, b"", "t" * 200, 0o777),
            ("d/h", tarfile.LNKTYPE, b"", long, 0o644),
            ("d/\udcff", tarfile.REGTYPE, b"y", "", 0o600),
            ("d/p", tarfile.FIFOTYPE, b"", "", 0o600),
            format=format,
        )
        entries, content = read(data, size)
        assert [(entry.name.rstrip("/"), entry.kind, entry.link) for entry in entries] == [
            ("d", Kind.FOLDER, ""),
            (long, Kind.FILE, ""),
            ("d/l", Kind.LINK, "t" * 200),
            ("d/h", Kind.HARD_LINK, long),
            ("d/\udcff", Kind.FILE, ""),
            ("d/p", Kind.PIPE, ""),
        ]
        assert (content, entries[1].mode) == (b"x" * 700 + b"y", 0o4755)

    def test_a_header_without_end_is_refused(self) -> None:
        info = tarfile.TarInfo("././@LongLink")
        info.type, info.size = tarfile.GNUTYPE_LONGNAME, 8 << 30
        with pytest.raises(BrokenArchive, match="8589934592 bytes"):
            TarReader().feed(info.tobuf(tarfile.GNU_FORMAT))

    def test_what_is_no_archive_is_refused(self) -> None:
        with pytest.raises(BrokenArchive):
            TarReader().feed(b"x" * 512)


REG, DIR, SYM, LNK = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
TOP = ("out/", DIR, b"", "", 0o755)


class TestUnpacker:
    """Field case S02."""

    def unpacked(self, target: Path, data: bytes, *, max_bytes: int = 1 << 20, max_files: int = 100) -> Unpacker:
        unpacker = Unpacker(target, max_bytes, max_files)
        unpacker.begin("")
        unpacker.feed(data)
        unpacker.end()
        return unpacker

    def test_nothing_leaves_the_folder_and_one_bad_entry_costs_no_other(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.mkdir()
        target = tmp_path / "deep/target"
        data = archive(
            TOP,
            ("out/a", SYM, b"", "/etc/hostname", 0o777),
            ("out/d", SYM, b"", str(victim), 0o777),
            ("out/d/x", REG, b"planted", "", 0o644),
            ("out/inside", SYM, b"", "ok", 0o777),
            ("out/ok", DIR, b"", "", 0o755),
            ("out/inside/x", REG, b"through a link", "", 0o644),
            ("out/hard", LNK, b"", "/etc/passwd", 0o644),
            ("out/hard2", LNK, b"", "out/../../victim", 0o644),
            ("out/../../victim/x", REG, b"climbed", "", 0o644),
            ("../../x", REG, b"climbed", "", 0o644),
            (f"{victim}/absolute", REG, b"absolute", "", 0o644),
            ("out/new\nline", REG, b"n", "", 0o644),
            ("out/" + "n" * 255, REG, b"longest", "", 0o644),
            ("out/" + "n" * 256, REG, b"too long", "", 0o644),
            ("out/pipe", tarfile.FIFOTYPE, b"", "", 0o644),
            ("out/disk", tarfile.BLKTYPE, b"", "", 0o644),
            ("out/tty", tarfile.CHRTYPE, b"", "", 0o644),
            ("out/setuid", REG, b"s", "", 0o6777),
            ("out/setuid", REG, b"again", "", 0o644),
            ("out/last", REG, b"last", "", 0o644),
        )
        fetched = self.unpacked(target, data).fetched
        assert list(victim.iterdir()) == []
        assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "victim"]
        assert sorted(path.name for path in target.iterdir()) == sorted(
            ["inside", "ok", "new\nline", "n" * 255, "setuid", "last"]
        )
        assert list((target / "ok").iterdir()) == []
        assert (target / "setuid").stat().st_mode & 0o7777 == 0o755
        assert (target / "setuid").read_text() == "s"
        assert (target / "last").read_text() == "last"
        assert len(fetched.refused) == 14
        assert all(one.reason and "\n" not in one.path for one in fetched.refused)

    def test_a_hard_link_to_what_came_along_is_a_file(self, tmp_path: Path) -> None:
        self.unpacked(tmp_path, archive(TOP, ("out/a", REG, b"same", "", 0o644), ("out/b", LNK, b"", "out/a", 0o644)))
        assert (tmp_path / "b").read_text() == "same"
        assert (tmp_path / "b").stat().st_nlink == 1

    def test_the_limit_of_bytes_counts_hard_links_and_leaves_out_what_does_not_fit(self, tmp_path: Path) -> None:
        data = archive(
            TOP,
            ("out/a", REG, b"x" * 60, "", 0o644),
            ("out/b", LNK, b"", "out/a", 0o644),
            ("out/c", REG, b"x" * 41, "", 0o644),
            ("out/d", REG, b"x" * 40, "", 0o644),
        )
        fetched = self.unpacked(tmp_path, data, max_bytes=100).fetched
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d"]
        assert ([one.path for one in fetched.refused], fetched.bytes, fetched.files) == (["b", "c"], 100, 2)

    def test_a_huge_file_is_not_read_past(self, tmp_path: Path) -> None:
        info = tarfile.TarInfo("out/huge")
        info.size = 5 << 30
        unpacker = Unpacker(tmp_path, 1000, 10)
        unpacker.begin("")
        with pytest.raises(TooLong) as raised:
            unpacker.feed(archive(TOP)[:512] + info.tobuf(tarfile.PAX_FORMAT))
        assert raised.value.path == "huge"
        # The next archive is of what lies beside it.
        unpacker.begin("sub/x")
        (tmp_path / "sub").mkdir()
        unpacker.feed(archive(("x", REG, b"beside", "", 0o644)))
        unpacker.end()
        assert (tmp_path / "sub/x").read_text() == "beside"

    @pytest.mark.parametrize("format", ["gnu", "posix", "oldgnu"])
    def test_a_sparse_file_is_not_blown_up(self, tmp_path: Path, format: str) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/ok").write_text("ok")
        os.truncate(os.open(tmp_path / "out/sparse", os.O_CREAT | os.O_WRONLY), 5 << 30)
        command = ["tar", "--sparse", "--format", format, "-C", str(tmp_path), "-cf", "-", "out"]
        data = subprocess.run(command, check=True, capture_output=True).stdout
        assert len(data) < 100_000
        fetched = self.unpacked(tmp_path / "got", data, max_bytes=1 << 40).fetched
        assert [(path.name, path.stat().st_size) for path in (tmp_path / "got").iterdir()] == [("ok", 2)]
        assert (fetched.bytes, len(fetched.refused)) == (2, 1)
        assert "sparse" in fetched.refused[0].path

    @pytest.mark.parametrize(
        "pack", [gzip.compress, zlib.compress, bz2.compress, lzma.compress], ids=["gzip", "zlib", "bz2", "lzma"]
    )
    def test_what_is_compressed_is_no_archive_to_it(self, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
        bomb = pack(archive(TOP, ("out/zeros", REG, bytes(20_000_000), "", 0o644)))
        with pytest.raises(BrokenArchive):
            self.unpacked(tmp_path, bomb.ljust(1024, b"x"))
        assert list(tmp_path.iterdir()) == []

    def test_too_many_entries_end_it_with_whole_files_only(self, tmp_path: Path) -> None:
        many = [(f"out/{number:03}", REG, b"x", "", 0o644) for number in range(50)]
        with pytest.raises(TooMany, match="20 files"):
            self.unpacked(tmp_path, archive(TOP, *many), max_files=20)
        assert len(list(tmp_path.iterdir())) == 20

    def test_what_breaks_off_leaves_no_half_file(self, tmp_path: Path) -> None:
        data = archive(TOP, ("out/a", REG, b"x" * 2000, "", 0o644))
        unpacker = Unpacker(tmp_path, 1 << 20, 10)
        unpacker.begin("")
        unpacker.feed(data[:2000])
        with pytest.raises(BrokenArchive):
            unpacker.end()
        unpacker.close()
        assert list(tmp_path.iterdir()) == []

    def test_folders_are_limited_in_depth(self, tmp_path: Path) -> None:
        deep = [("out/" + "/".join("d" * (level + 1)), DIR, b"", "", 0o755) for level in range(MAX_DEPTH + 30)]
        fetched = self.unpacked(tmp_path, archive(TOP, *deep), max_files=1000).fetched
        assert len(fetched.refused) == 1
        assert len(list(tmp_path.rglob("*"))) == MAX_DEPTH

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeFault, match="not a folder"):
            self.unpacked(tmp_path / "got", archive(("out", REG, b"x", "", 0o644)))


def joined(parts: Iterator[bytes]) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as tar:
        return {info.name: info for info in tar.getmembers()}


class TestPacker:
    def test_a_folder_comes_with_its_links_and_without_special_files(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub/file").write_bytes(b"x" * 1000)
        (tmp_path / "sub/file").chmod(0o4711)
        (tmp_path / "link").symlink_to("/etc/passwd")
        os.mkfifo(tmp_path / "pipe")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            found = joined(Packer(Owner(7, 8)).under("polar/a").folder("polar/a/data", tmp_path))
        assert set(found) == {
            "polar/a",
            "polar/a/data",
            "polar/a/data/sub",
            "polar/a/data/sub/file",
            "polar/a/data/link",
        }
        assert found["polar/a/data/sub/file"].mode == 0o711
        assert found["polar/a/data/link"].linkname == "/etc/passwd"
        assert {(info.uid, info.gid) for info in found.values()} == {(7, 8)}

    def test_folders_on_the_way_are_those_between(self) -> None:
        assert parents_of("/polar/session/a/b/c", "/polar/session") == ("polar/session/a", "polar/session/a/b")
        assert parents_of("/testbed/a", "/polar/session") == ()
        assert parents_of("/polar/session/a", "/polar/session") == ()

    def test_a_file_that_becomes_shorter_is_said(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(b"x" * (3 << 20))
        parts = Packer().file("file", file)
        next(parts)
        next(parts)
        file.write_bytes(b"")
        with pytest.raises(RuntimeFault, match="shorter"):
            list(parts)
