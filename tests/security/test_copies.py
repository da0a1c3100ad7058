"""Folders that are copied out of a sandbox while a program in it does its worst."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from polarq.errors import RuntimeFault
from polarq_worker.runtimes import confined
from polarq_worker.runtimes.confined import Progress
from polarq_worker.runtimes.fetched import LISTED, MAX_DEPTH, TooMany, printable, stays_inside

TURNS = 1000


SWAPPER = """
import ctypes, sys
rename = ctypes.CDLL(None, use_errno=True).renameat2
first, second = (path.encode() for path in sys.argv[1:])
if rename(-100, first, -100, second, 2) != 0:
    sys.exit("renameat2 cannot exchange here")
print("swapping", flush=True)
while True:
    rename(-100, first, -100, second, 2)
"""


@contextmanager
def swapped(folder: Path, outside: Path) -> Iterator[None]:
    """`folder/inner` is a folder and a link to `outside`, in turns, as fast as it goes, by a program of its own."""
    link = folder.parent / "link"
    link.symlink_to(outside)
    command = [sys.executable, "-c", SWAPPER, str(folder / "inner"), str(link)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as swapper:
        assert swapper.stdout is not None
        assert swapper.stdout.readline() == b"swapping\n"
        yield
        swapper.kill()
    if (folder / "inner").is_symlink():
        (folder / "inner").unlink()
        link.rename(folder / "inner")


def test_a_folder_that_becomes_a_link_while_it_is_copied_brings_nothing_from_elsewhere(tmp_path: Path) -> None:
    outside, sandbox = tmp_path / "outside", tmp_path / "sandbox"
    (sandbox / "out" / "inner").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (sandbox / "out" / "inner" / "secret").write_text("mine")
    seen = set()
    with swapped(sandbox / "out", outside):
        for turn in range(TURNS):
            copy = tmp_path / "copies" / str(turn)
            confined.get_dir(sandbox, ["out"], copy, Progress())
            found = copy / "inner"
            assert not found.is_symlink(), "a link that leads out came along"
            if (found / "secret").exists():
                seen.add((found / "secret").read_text())
    assert seen <= {"mine"}
    confined.get_dir(sandbox, ["out"], tmp_path / "after", Progress())
    assert (tmp_path / "after" / "inner" / "secret").read_text() == "mine"
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_a_path_through_a_folder_that_becomes_a_link_never_leads_out(tmp_path: Path) -> None:
    outside, sandbox = tmp_path / "outside", tmp_path / "sandbox"
    (sandbox / "inner").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (sandbox / "inner" / "secret").write_text("mine")
    read = set()
    with swapped(sandbox, outside):
        for turn in range(TURNS):
            target = tmp_path / f"got{turn}"
            with suppress(RuntimeFault, OSError):
                confined.get_file(sandbox, ["inner", "secret"], target, Progress(max_bytes=100))
                read.add(target.read_text())
            with suppress(RuntimeFault, OSError):
                confined.put_bytes(sandbox, ["inner", f"planted{turn}"], b"x", 0o644)
    assert read <= {"mine"}
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_names_and_depths_without_end_are_bounded(tmp_path: Path) -> None:
    base = tmp_path / "base"
    deep = base
    for _ in range(MAX_DEPTH + 5):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "file").write_text("too deep")
    for name in (b"a\nb", b"\xff\xfe", b"n" * 255, b"-rf", b"..."):
        Path(os.fsdecode(os.fsencode(base) + b"/" + name)).write_text("x")
    fetched = confined.get_dir(base, [], tmp_path / "copy", Progress())
    (refused,) = fetched.refused
    assert f"deeper than {MAX_DEPTH} folders" in refused.reason
    assert fetched.files == 5
    assert {os.fsencode(path.name) for path in (tmp_path / "copy").iterdir() if path.is_file()} >= {
        b"a\nb",
        b"\xff\xfe",
    }


def test_refusals_are_counted_beyond_those_named(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for number in range(LISTED + 50):
        (base / str(number)).symlink_to("/etc/passwd")
    fetched = confined.get_dir(base, [], tmp_path / "copy", Progress())
    assert (len(fetched.refused), fetched.refused_more, fetched.files) == (LISTED, 50, 0)
    with pytest.raises(TooMany):
        confined.get_dir(base, [], tmp_path / "again", Progress(max_files=10))


@pytest.mark.parametrize(
    ("link", "depth", "inside"),
    [
        ("a", 0, True),
        ("a/b", 0, True),
        ("../a", 1, True),
        ("../../a", 1, False),
        ("..", 0, False),
        ("/etc", 3, False),
        ("a/../b", 3, False),
        ("../a/../../b", 3, False),
        ("./a", 0, True),
        ("", 0, False),
        ("../..", 2, True),
    ],
)
def test_a_link_stays_inside_or_is_left_out(link: str, depth: int, inside: bool) -> None:
    assert stays_inside(link, depth) is inside


def test_any_name_is_told_in_one_printable_line() -> None:
    for name in ("a\nb", "\x1b[2J", "\udcff", "a\u202eb", "plain é"):
        assert printable(name).isprintable()
        printable(name).encode()
