"""Where files of sandboxes are kept: under names that stay inside, for as long as somebody wants them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

import pytest

from polarq.errors import ArtifactsUnavailable
from polarq.store.artifacts import ArtifactStore, fetch, stored_name
from tests.needs import not_here


def put(store: ArtifactStore, folder: Path, rollout_id: str, token: int, name: str, data: bytes = b"x") -> str:
    made = folder / "made"
    made.write_bytes(data)
    return store.put(rollout_id, token, name, made)


@pytest.mark.parametrize(
    "name", ["../../x", "a/../../../x", "..", "/etc/passwd", "a\nb", "x" * 300, "\udcff\udcfe", "a b/c?d#e", "é" * 200]
)
def test_no_name_leads_out_of_its_attempt_or_fails(tmp_path: Path, name: str) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    where = put(store, tmp_path, "t.0", 7, name)
    assert os.path.realpath(where).startswith(str(tmp_path / "store" / "t" / "0-7") + "/")
    assert all(letter.isprintable() for letter in where)


def test_different_names_are_different_files() -> None:
    names = ["a b", "a%20b", "x" * 300, "x" * 301, "a/b", "a%2Fb", "é", "e\u0301"]
    assert len({stored_name(name) for name in names}) == len(names)


def test_an_attempt_goes_as_a_whole_and_no_other_with_it(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    first, second = (put(store, tmp_path, "t.0", token, "a/b") for token in (1, 2))
    store.drop("t.0", 1)
    store.drop("t.0", 1)
    assert (Path(first).exists(), Path(second).exists()) == (False, True)
    store.drop("t.0", 2)
    assert list((tmp_path / "store").iterdir()) == []


def test_what_has_lain_for_its_time_is_swept(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    old, new = put(store, tmp_path, "old.0", 1, "a"), put(store, tmp_path, "new.0", 1, "a")
    os.utime(Path(old).parent, (0, 0))
    assert store.sweep(3600) == 1
    assert (Path(old).exists(), Path(new).exists()) == (False, True)
    assert ArtifactStore(str(tmp_path / "nowhere")).sweep(3600) == 0


def test_what_else_lies_in_a_folder_that_is_named_as_their_place_stays(tmp_path: Path) -> None:
    place = tmp_path / "data"
    (place / "project/src").mkdir(parents=True)
    (place / "project/src/file").write_text("mine")
    (place / "project/notes").write_text("mine")
    (place / "empty").mkdir()
    (tmp_path / "linked/0-1").mkdir(parents=True)
    (place / "link").symlink_to(tmp_path / "linked")
    for path in (place / "project/src", place / "project/notes", tmp_path / "linked/0-1", place / "empty"):
        os.utime(path, (0, 0))
    store = ArtifactStore(str(place))
    os.utime(Path(put(store, tmp_path, "old.0", 1, "a")).parent, (0, 0))
    assert store.sweep(3600) == 1
    assert sorted(path.name for path in place.iterdir()) == ["empty", "link", "project"]
    assert (place / "project/src/file").exists() and (place / "link/0-1").exists()


def test_what_is_fetched_is_what_was_stored(tmp_path: Path) -> None:
    where = put(ArtifactStore(str(tmp_path / "store")), tmp_path, "t.0", 1, "a", b"stored")
    whole = hashlib.sha256(b"stored").hexdigest()
    fetch(where, tmp_path / "got", whole)
    assert (tmp_path / "got").read_bytes() == b"stored"
    with pytest.raises(ArtifactsUnavailable, match="exists already"):
        fetch(where, tmp_path / "got", whole)
    with pytest.raises(ArtifactsUnavailable, match="has changed"):
        fetch(where, tmp_path / "other", hashlib.sha256(b"else").hexdigest())
    assert not (tmp_path / "other").exists()
    with pytest.raises(ArtifactsUnavailable, match="not there"):
        fetch(f"{where}x", tmp_path / "other", whole)


def test_an_fsspec_address_is_written_read_and_cleared(tmp_path: Path) -> None:
    if importlib.util.find_spec("fsspec") is None:
        not_here("fsspec is not installed (polarq[archive])")
    store = ArtifactStore(f"memory://artifacts-{tmp_path.name}")
    where = put(store, tmp_path, "t.0", 1, "a/b c", b"far")
    assert where.startswith("memory://")
    fetch(where, tmp_path / "got", hashlib.sha256(b"far").hexdigest())
    assert (tmp_path / "got").read_bytes() == b"far"
    assert store.sweep(0) == 0
    store.drop("t.0", 1)
    with pytest.raises(ArtifactsUnavailable, match="not there"):
        fetch(where, tmp_path / "again", "")
