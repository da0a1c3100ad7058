"""Plug-ins are found by name, import paths only where they are allowed, and every miss says what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq import registry
from polarq.errors import UnknownPlugin
from polarq.registry import imported, names, plugin


def install(folder: Path, distribution: str, *lines: str) -> None:
    """What installing a package with these entry points of `polarq.runtimes` leaves behind."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polarq.runtimes]\n" + "\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._installed.cache_clear()
    yield tmp_path
    registry._installed.cache_clear()


def test_a_builtin_is_found_by_its_name() -> None:
    assert plugin("runtimes", "local").__name__ == "LocalRuntime"
    assert "local" in names("runtimes")


def test_an_installed_package_adds_a_name(site: Path) -> None:
    (site / "my_runtime.py").write_text("class Mine: ...\n")
    install(site, "my_runtime", "mine = my_runtime:Mine")
    assert plugin("runtimes", "mine").__name__ == "Mine"


def test_a_missing_name_is_answered_with_what_is_there() -> None:
    with pytest.raises(UnknownPlugin, match=r"runtime 'locl' is not installed here \(installed: .*local.*\)"):
        plugin("runtimes", "locl")


def test_a_name_given_by_two_packages_is_refused(site: Path) -> None:
    install(site, "one", "mine = one:Mine")
    install(site, "two", "mine = two:Mine")
    with pytest.raises(UnknownPlugin, match="one:Mine and two:Mine"):
        plugin("runtimes", "mine")


def test_a_missing_module_is_named(site: Path) -> None:
    (site / "needy.py").write_text("import no_such_library\n")
    install(site, "needy", "needy = needy:Runtime")
    with pytest.raises(UnknownPlugin, match="needs module 'no_such_library'"):
        plugin("runtimes", "needy")


def test_a_plugin_that_breaks_on_import_is_one_line(site: Path) -> None:
    (site / "broken.py").write_text("raise ValueError('two\\nlines')\n")
    install(site, "broken", "broken = broken:Runtime", "number = string:digits")
    with pytest.raises(UnknownPlugin, match="ValueError: two lines"):
        plugin("runtimes", "broken")
    with pytest.raises(UnknownPlugin, match="not a class"):
        plugin("runtimes", "number")


def test_a_script_that_is_named_as_a_plugin_does_not_end_its_process(site: Path) -> None:
    (site / "script.py").write_text("raise SystemExit(3)\n")
    install(site, "script", "script = script:Runtime")
    with pytest.raises(UnknownPlugin, match="cannot be loaded: SystemExit: 3"):
        plugin("runtimes", "script")
    with pytest.raises(UnknownPlugin, match="cannot be loaded: SystemExit: 3"):
        imported("script:Runtime", ["script"])


@pytest.mark.parametrize("path", ["pathlib:Path", "pathlib.Path"])
def test_an_import_path_is_followed_where_the_module_is_allowed(path: str) -> None:
    assert imported(path, ["pathlib"]) is Path


def test_allowing_a_package_allows_what_is_below_it_and_nothing_beside() -> None:
    assert imported("xml.dom.minidom:Node", ["xml.dom"]).__name__ == "Node"
    with pytest.raises(UnknownPlugin, match="allowed_modules"):
        imported("xml.domino:Node", ["xml.dom"])


def test_a_module_that_is_not_allowed_is_not_imported(site: Path) -> None:
    (site / "evil.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(UnknownPlugin, match=r"add 'evil' to security\.allowed_modules"):
        imported("evil:Thing", [])
    assert "evil" not in sys.modules


@pytest.mark.parametrize("path", ["", "Path", "pathlib:", ":Path", "pathlib:Path.home", "path lib:Path", "..x:Y"])
def test_a_bad_import_path_is_refused(path: str) -> None:
    with pytest.raises(UnknownPlugin, match="module:Class"):
        imported(path, ["pathlib"])


def test_an_import_path_to_nothing_or_no_class_is_refused() -> None:
    with pytest.raises(UnknownPlugin, match="has no 'Nothing'"):
        imported("pathlib:Nothing", ["pathlib"])
    with pytest.raises(UnknownPlugin, match="not a class"):
        imported("pathlib:sys", ["pathlib"])
