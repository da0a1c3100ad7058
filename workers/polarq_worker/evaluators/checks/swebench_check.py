"""What the package swebench makes of a test log.

Request: {instance, log, patch}, the instance with the fields of `swebench.types.TestSpec`; reply: the package's own
report of it, or {unusable: why}.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any


def skip_init(name: str) -> None:
    """Lets the modules of a package be imported without what its `__init__` brings along: clients of containers, clouds
    and data sets, which take seconds and are of no use here."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    assert spec is not None
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules[name] = package


def check(request: dict[str, Any]) -> dict[str, Any]:
    skip_init("swebench.harness")
    grading = importlib.import_module("swebench.harness.grading")
    types = importlib.import_module("swebench.types")
    parsers = importlib.import_module("swebench.harness.log_parsers")
    instance = request["instance"]
    if instance["log_parser"] not in parsers.PARSER_REGISTRY:
        return {"unusable": f"swebench has no log parser '{instance['log_parser']}'"}
    spec = types.TestSpec(image="", eval_script_list=[], **instance)
    prediction = {
        "instance_id": instance["instance_id"],
        "model_name_or_path": "polarq",
        "model_patch": request["patch"],
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "test_output.txt"
        log.write_text(request["log"], encoding="utf-8")
        report = grading.get_eval_report(spec, prediction, str(log), include_tests_status=True)
    found: dict[str, Any] = report[instance["instance_id"]]
    return found


if __name__ == "__main__":
    try:
        with contextlib.redirect_stdout(sys.stderr):
            reply = check(json.load(sys.stdin))
        json.dump(reply, sys.stdout)
    except MemoryError:
        sys.exit(87)
