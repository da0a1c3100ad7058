"""The command line in this process (fast) and as a program (pipes, terminals, signals)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq.cli.main import main
from polarq.client import Client
from polarq.ledger.keys import Keys
from polarq.settings import Settings
from polarq.topology import load_topology

POLARQ = [sys.executable, "-m", "polarq.cli"]


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Ran]


def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a person's or CI's environment says about polarq and about the terminal."""
    for name in [name for name in os.environ if name.startswith("POLARQ_")]:
        monkeypatch.delenv(name)
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def deployment(tmp_path: Path, keys: Keys, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A topology of this test alone, in the environment: every command reads it."""
    path = tmp_path / "topology.yaml"
    path.write_text(yaml.safe_dump({"redis": {"prefix": keys.prefix}}), encoding="utf-8")
    clean_environment(monkeypatch)
    monkeypatch.setenv("POLARQ_TOPOLOGY", str(path))
    monkeypatch.setenv("POLARQ_REDIS_URL", redis_url)
    monkeypatch.setenv("POLARQ_STATE_DIR", str(tmp_path / "state"))
    return path


@pytest.fixture
def client(deployment: Path) -> Iterator[Client]:
    with Client(load_topology(deployment), Settings.from_env()) as made:
        yield made


@pytest.fixture
def cli(deployment: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command in this process."""

    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run


def program(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command as a program."""
    return subprocess.run([*POLARQ, *arguments], capture_output=True, text=True, timeout=60, check=False, **more)
