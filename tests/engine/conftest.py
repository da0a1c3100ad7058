"""One real inference server and one reference model for all tests of this folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from polarq.testing.tiny_model import make_tiny_model

from ..needs import not_here
from .reference import Forward, ReferenceModel
from .server import Server, Target
from .vllm_server import EngineDidNotStart, run_vllm

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
def target() -> Target:
    try:
        return Target.from_env()
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def engine(
    target: Target, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, note: Note
) -> Iterator[Server]:
    """The server of POLARQ_ENGINE_URL, else a vLLM that is started here."""
    if target.url is not None:
        try:
            yield Server.at(target)
        except (ValueError, httpx.HTTPError) as error:
            pytest.fail(f"{target.url}: {error}", pytrace=False)
        return
    if importlib.util.find_spec("vllm") is None:
        not_here("vLLM is not installed in this environment: run `make test-engine`")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    model_dir, cache = request.getfixturevalue("model_dir"), request.getfixturevalue("engine_cache")
    with contextlib.ExitStack() as running:
        try:
            started = running.enter_context(run_vllm(model_dir, cache, log))
        except EngineDidNotStart as error:
            pytest.fail(str(error), pytrace=False)
        note(f"server: healthy after {started.start_s:.1f} s, warm after {started.warm_up_s:.1f} s more")
        yield started.server


@pytest.fixture
def tiny(engine: Server) -> None:
    """For tests that are about the tiny random model and its tokenizer."""
    if not engine.started_here:
        engine.lacks("this is about the model that is served by a server started here")


@pytest.fixture(scope="session")
def loaded(engine: Server) -> ReferenceModel | None:
    """None: the served model is not here."""
    if engine.checkpoint is None:
        return None
    if importlib.util.find_spec("transformers") is None:
        not_here("comparing with a checkpoint needs torch and transformers")
    return ReferenceModel(engine.checkpoint)


@pytest.fixture(scope="session")
def reference(engine: Server, loaded: ReferenceModel | None) -> ReferenceModel:
    """For tests that are nothing without a plain forward pass."""
    if loaded is None:
        engine.lacks("no checkpoint to compare with: give its folder as POLARQ_ENGINE_CHECKPOINT")
    return loaded


@pytest.fixture(scope="session")
def forward(loaded: ReferenceModel | None, target: Target, note: Note) -> Iterator[Forward]:
    """For tests that hold a forward pass against what they have shown already, where there is one."""
    found = Forward(loaded, target.tolerance)
    yield found
    if found.left_out:
        note(f"no checkpoint was given: {found.left_out} comparisons with a forward pass were left out")
