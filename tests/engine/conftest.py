"""One real vLLM server and one reference model for all tests of this folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polarq.testing.tiny_model import make_tiny_model

from ..needs import not_here
from .reference import ReferenceModel
from .vllm_server import EngineDidNotStart, VllmServer, run_vllm

ROOT = Path(__file__).resolve().parents[2]
ENGINE_TEST_TIMEOUT_S = 720
"""The first test's time includes the server's start and warm-up."""

Note = Callable[[str], None]
notes_key = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[notes_key] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was measured: a passed test says only that the figure was below its bound."""
    if config.stash[notes_key]:
        terminalreporter.section("measured against the real engine")
        for line in config.stash[notes_key]:
            terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the server is an engine test; nothing else in this folder needs more than `make test` installs."""
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(ENGINE_TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def engine_cache() -> Path:
    """Kept between runs, so that kernels are compiled once per machine."""
    cache = Path(os.environ.get("POLARQ_ENGINE_CACHE") or ROOT / ".polarq" / "engine-cache")
    cache.mkdir(parents=True, exist_ok=True)
    return cache


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def note(pytestconfig: pytest.Config) -> Note:
    """Keep one line about a measured figure for the end of the run."""
    return pytestconfig.stash[notes_key].append


@pytest.fixture(scope="session")
def engine(
    model_dir: Path, engine_cache: Path, tmp_path_factory: pytest.TempPathFactory, note: Note
) -> Iterator[VllmServer]:
    if importlib.util.find_spec("vllm") is None:
        not_here("vLLM is not installed in this environment: run `make test-engine`")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with contextlib.ExitStack() as running:
        try:
            server = running.enter_context(run_vllm(model_dir, engine_cache, log))
        except EngineDidNotStart as error:
            pytest.fail(str(error), pytrace=False)
        note(f"server: healthy after {server.start_s:.1f} s, warm after {server.warm_up_s:.1f} s more")
        yield server


@pytest.fixture(scope="session")
def reference(engine: VllmServer) -> ReferenceModel:
    return ReferenceModel(engine.model_dir)
