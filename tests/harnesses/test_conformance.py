"""Every program that a preset installs, for real, through the conformance suite (`make test-harnesses`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq import bubblewrap
from polarq.registry import plugin
from polarq.testing.conformance.bench import Bench, default_cache
from polarq.testing.conformance.checks import CHECKS, Suite
from polarq.testing.conformance.found import Finding
from polarq.testing.conformance.scenario import CheckName, load, shipped
from polarq.testing.conformance.table import told, write

from ..needs import not_here

IMAGE = os.environ.get("POLARQ_BASE_IMAGE", "polarq-base:local")
IN_DOCKER: tuple[CheckName, ...] = ("works", "continues", "quiet", "overflow", "timed_out")
"""What a container may change."""

Case = tuple[str, str, str]


def cases() -> Iterator[Any]:
    for name in shipped():
        scenario = load(name, plugin("harnesses", name).conformance)
        if scenario.not_run:
            continue
        first = ("local", "docker") if scenario.in_base_image else ("local",)
        for number, dialect in enumerate(plugin("harnesses", name).dialects):
            for backend in ("local",) if number else first:
                marks = [pytest.mark.harness, *([pytest.mark.docker] if backend == "docker" else [])]
                case = (name, dialect, backend)
                for check in IN_DOCKER if backend == "docker" else CHECKS:
                    yield pytest.param(case, check, id="-".join([*case, check]), marks=marks)


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> Iterator[tuple[Case, Suite]]:
    name, dialect, backend = request.param
    runtime: dict[str, Any] = {"backend": backend}
    if backend == "docker":
        runtime["image"] = IMAGE
        try:
            subprocess.run(["docker", "image", "inspect", IMAGE], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            not_here(f"no Docker daemon with an image {IMAGE} (.ci/docker-up makes both)")
    elif why := bubblewrap.why_not():
        not_here(why)
    cache = Path(os.environ.get("HARNESS_CACHE") or default_cache())
    with Bench(load(name, plugin("harnesses", name).conformance), dialect, runtime, cache=cache) as bench:
        yield (name, dialect, backend), Suite(bench)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("suite", "check"), list(cases()), indirect=["suite"], scope="module")
def test_the_program(suite: tuple[Case, Suite], check: CheckName) -> None:
    case, checks = suite
    finding = checks.one(check)
    _keep(case, finding)
    assert finding.ok, finding.detail


def _keep(case: Case, finding: Finding) -> None:
    if folder := os.environ.get("HARNESS_RESULTS"):
        harness, dialect, backend = case
        write(Path(folder), [told(finding, harness=harness, dialect=dialect, backend=backend)])
