"""`/openapi.json` describes what is really served."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from polarq.http import polar_shapes
from tests.http.rig import Rig, a_task


async def document(shim: Rig) -> dict[str, Any]:
    response = await shim.http.get("/openapi.json")
    made: dict[str, Any] = response.json()
    return made


def refs(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for part in value.values() for ref in refs(part)]
    return [ref for part in value for ref in refs(part)] if isinstance(value, list) else []


async def test_every_described_operation_is_served_and_every_reference_resolves(shim: Rig) -> None:
    spec = await document(shim)
    assert spec["openapi"] == "3.1.0"
    schemas = spec["components"]["schemas"]
    found = refs(spec)
    assert found
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= set(schemas)
    operation_ids = [op["operationId"] for path in spec["paths"].values() for op in path.values()]
    assert len(operation_ids) == len(set(operation_ids))
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            if path == "/events":
                continue
            response = await shim.http.request(method, path.replace("{", "").replace("}", ""))
            assert response.status_code != 405, path
            assert str(response.status_code) in operation["responses"], (method, path, response.status_code)


async def test_the_task_is_described_as_it_is_checked(shim: Rig) -> None:
    spec = await document(shim)
    task = spec["components"]["schemas"]["Task"]
    assert {"instruction", "agent"} <= set(task["required"])
    assert task["properties"]["num_samples"]["minimum"] == 1
    assert task["additionalProperties"] is False
    parameters = {p["name"]: p for p in spec["paths"]["/rollout/task/{task_id}"]["get"]["parameters"]}
    assert parameters["task_id"]["in"] == "path"
    assert parameters["wait"]["schema"]["maximum"] == 60
    assert parameters["trajectories"]["schema"]["enum"] == ["none", "refs", "full"]


async def test_answers_have_the_shape_that_is_described(shim: Rig) -> None:
    await shim.announce("node0")
    await shim.submit(a_task(samples=2, metadata={"group_id": "g"}))
    await shim.end("t.0")

    async def fits(shape: Any, path: str) -> None:
        TypeAdapter(shape).validate_json((await shim.http.get(path)).content, strict=True)

    await fits(polar_shapes.Health, "/health")
    await fits(polar_shapes.Ready, "/ready")
    await fits(polar_shapes.TaskStatus, "/rollout/task/t")
    await fits(polar_shapes.TaskStatus, "/rollout/task/t?trajectories=none")
    await fits(polar_shapes.TaskList, "/tasks")
    await fits(polar_shapes.SessionList, "/tasks/t/sessions")
    await fits(polar_shapes.SessionView, "/sessions/t.0")
    await fits(polar_shapes.SessionView, "/sessions/t.1")
    await fits(polar_shapes.ServerStatus, "/rollout/status")
    await fits(list[polar_shapes.GatewayNodeInfo], "/nodes")
    await fits(polar_shapes.InferenceStatus, "/admin/inference/status")
    await fits(polar_shapes.CallbackTries, "/rollout/task/t/callbacks")
    await fits(polar_shapes.ErrorAnswer, "/rollout/task/nope")
