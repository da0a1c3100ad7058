"""From a task's spec to a runtime: what is missing, not allowed, or cannot be given is refused with one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarq.contracts.specs import RuntimeSpec
from polarq.errors import InvalidTask, UnknownPlugin
from polarq.topology.models import SecuritySection
from polarq_worker.runtimes.base import Runtime
from polarq_worker.runtimes.create import create_runtime
from polarq_worker.runtimes.local import LocalRuntime


def create(spec: dict[str, object], **security: object) -> Runtime:
    return create_runtime(
        RuntimeSpec.parse({"backend": "local", **spec}),
        runtime_id="r1",
        root=Path("/nonexistent/root"),
        security=SecuritySection.parse(security),
    )


def test_local_is_found_by_name() -> None:
    assert isinstance(create({}), LocalRuntime)


def test_a_backend_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(UnknownPlugin, match=r"'kubernetes' is not installed here \(installed: .*local"):
        create({"backend": "kubernetes"})


def test_an_import_path_needs_an_allowed_module() -> None:
    path = "polarq_worker.runtimes.local:LocalRuntime"
    with pytest.raises(UnknownPlugin, match=r"security\.allowed_modules"):
        create({"import_path": path})
    assert isinstance(create({"import_path": path}, allowed_modules=["polarq_worker.runtimes"]), LocalRuntime)


def test_an_import_path_must_lead_to_a_runtime() -> None:
    with pytest.raises(UnknownPlugin, match="not a polarq runtime"):
        create({"import_path": "pathlib:Path"}, allowed_modules=["pathlib"])


def test_what_the_backend_cannot_give_is_listed_whole() -> None:
    with pytest.raises(InvalidTask) as refused:
        create({"gpus": 2, "storage_mb": 100})
    assert sorted(problem.split(":")[0] for problem in refused.value.problems) == ["gpus", "storage_mb"]


def test_an_image_must_be_allowed() -> None:
    with pytest.raises(InvalidTask, match=r"'evil:latest' is not in security\.allowed_images"):
        create({"image": "evil:latest"}, allowed_images=["good/*"])


@pytest.mark.parametrize("spec", [{"kwargs": {"volumes": ["/etc:/x:ro"]}}, {"internet_volumes": ["/etc"]}])
def test_a_mount_must_be_allowed(spec: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match=r"'/etc' is not below a folder of security\.allowed_mounts"):
        create(spec, allowed_mounts=[str(tmp_path)])


def test_a_link_does_not_lead_an_upload_out_of_its_roots(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to("/etc")
    action = {"type": "upload_file", "source": str(tmp_path / "data/link/passwd"), "target": "x"}
    with pytest.raises(InvalidTask, match=r"prepare\.0\.source"):
        create({"prepare": [action]}, upload_roots=[str(tmp_path / "data")])
    inside = {**action, "source": str(tmp_path / "data/file")}
    create({"prepare": [inside], "eval_prepare": [inside]}, upload_roots=[str(tmp_path / "data")])
