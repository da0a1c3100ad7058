"""What brings a Python program into a sandbox, where it must refuse or take what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polarq_worker.harnesses.programs.program import Program, PythonProgram, PythonSource
from polarq_worker.harnesses.programs.versions import Versions

VERSIONS = Versions("1.2.3", "1.2.0", "1.3.0")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder that is the sandbox's PATH, with nothing of Python's in it."""
    folder = tmp_path / "image"
    folder.mkdir()
    for name in ("bash", "cut", "grep", "head", "ln", "mkdir", "mv", "rm", "sed", "sort", "tail", "tr", "chmod", "id"):
        (folder / name).symlink_to(Path("/usr/bin") / name)
    return folder


def install(program: Program, image: Path, tmp_path: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    action = program.install("some", program.versions.default, exact=False)
    env = {
        "PATH": path or str(image),
        "SESSION_DIR": str(tmp_path / "session"),
        "HOME": str(tmp_path),
        **(action.env or {}),
    }
    return subprocess.run(["bash", "-c", action.command or ""], env=env, capture_output=True, text=True, check=False)


def program_of(image: Path, name: str, text: str) -> None:
    (image / name).write_text(text)
    (image / name).chmod(0o755)


def environment_with(package: str, version: str, folder: Path) -> Path:
    """A real environment with a package of that version in it; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return folder / "bin/python"


@pytest.mark.parametrize(("below", "words"), [("3.13", "Python 3.12 or newer (below 3.13) is needed"), ("", "1.2.3")])
def test_a_python_that_is_too_new_is_not_taken(below: str, words: str, image: Path, tmp_path: Path) -> None:
    # Answers only whether it is at least some version; its environments are empty.
    script = 'case $2 in venv) mkdir -p "$3/bin" && ln -s /bin/false "$3/bin/python" && exit ;; esac\n'
    script += '[ "$(printf "%s\\n" "$3" 3.13 | sort -V | head -n 1)" = "$3" ]\n'
    program_of(image, "python3", f"#!/usr/bin/bash\n{script}")
    done = install(PythonProgram("a-package", "tool", VERSIONS, python="3.12", python_below=below), image, tmp_path)
    assert done.returncode == 1
    # Without an upper limit it goes on to installing.
    assert words in done.stderr.splitlines()[-1], done.stderr


def test_a_library_of_the_image_is_found_by_the_python_that_has_it(image: Path, tmp_path: Path) -> None:
    python = environment_with("a-package", "1.2.9", tmp_path / "venv")
    done = install(PythonProgram("a-package", "python", VERSIONS), image, tmp_path, f"{python.parent}:{image}")
    assert done.returncode == 0, done.stderr
    home = tmp_path / "session/.polarq/programs/some"
    assert (home / "installed").read_text().splitlines()[:2] == ["image", "1.2.9"]
    look = "import importlib.metadata as m; print(m.version('a-package'))"
    found = subprocess.run([str(home / "bin/python"), "-c", look], capture_output=True, text=True, check=False)
    assert found.stdout == "1.2.9\n", found.stderr


def test_a_program_that_no_registry_ships_is_taken_from_the_image(image: Path, tmp_path: Path) -> None:
    python = environment_with("tool", "1.2.0", tmp_path / "venv")
    program_of(image, "tool", f"#!{python}\nprint('it runs')\n")
    done = install(PythonSource("tool", "tool", VERSIONS), image, tmp_path)
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([str(tmp_path / "session/.polarq/programs/some/bin/tool")], capture_output=True, check=True)
    assert ran.stdout == b"it runs\n"


@pytest.mark.parametrize("there", [False, True])
def test_one_that_is_not_there_or_too_old_is_asked_of_the_image(there: bool, image: Path, tmp_path: Path) -> None:
    if there:
        python = environment_with("tool", "1.1.9", tmp_path / "venv")
        program_of(image, "tool", f"#!{python}\n")
    done = install(PythonSource("tool", "tool", VERSIONS), image, tmp_path)
    assert done.returncode == 1
    words = "no registry ships tool: it has to be in the image, in a version of at least 1.2.0 and below 1.3.0"
    assert words in done.stderr.splitlines()[-1]
