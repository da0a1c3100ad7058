"""The apptainer runtime keeps the contract of every runtime, with the real program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarq.contracts.specs import RuntimeSpec
from polarq.testing.runtime_contract import CONTRACT_ENV, New, RuntimeContract
from polarq_worker.runtimes.apptainer.runtime import ApptainerRuntime

from .apptainer_here import IMAGE, apptainer_host, needs_apptainer

pytestmark = pytest.mark.apptainer


class TestApptainerRuntime(RuntimeContract):
    @pytest.fixture
    async def new(self, tmp_path: Path) -> AsyncIterator[New]:
        needs_apptainer()
        spec = RuntimeSpec(backend="apptainer", image=str(IMAGE), env=CONTRACT_ENV)
        made: list[ApptainerRuntime] = []
        host = apptainer_host(tmp_path / "kept")

        def new(runtime_id: str) -> ApptainerRuntime:
            made.append(ApptainerRuntime(spec, runtime_id=runtime_id, root=tmp_path / runtime_id, host=host))
            return made[-1]

        yield new
        for runtime in made:
            await runtime.stop()
