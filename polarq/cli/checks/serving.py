"""Each node's proxy and inference: they answer, with the right model, and with token ids."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from polarq.cli.checks.base import Deployment, Finding, fail, ok, warn
from polarq.contracts.node import NodeRecord
from polarq.errors import LedgerUnavailable
from polarq.ledger import Ledger, calls_for
from polarq.topology import InferenceEndpoint, Node, redis_url

TIMEOUT_S = 30.0
"""A cold engine compiles at its first call."""
CONNECT_S = 3.0

Answer = Mapping[str, Any]


def check_proxies(deployment: Deployment) -> Iterator[Finding]:
    """Every node's proxy. One that its worker would start is not missed while no worker runs."""
    alive = _alive_nodes(deployment)
    for node in deployment.topology.gateway.nodes:
        part = f"proxy {node.id}"
        record = alive.get(node.id)
        url = record.proxy_url if record is not None and record.proxy_url else node.proxy_url
        try:
            answer = _client(deployment.settings.token or "").get(f"{url}/health", timeout=CONNECT_S)
        except httpx.HTTPError as exc:
            yield _silent(part, node, url, record, exc)
            continue
        if answer.status_code == httpx.codes.OK:
            yield ok(part, f"answers at {url}")
            yield from _seen(part, answer)
        else:
            yield fail(
                part,
                f"{url}/health answers {answer.status_code}",
                "see the proxy's log; is the port another program's?",
            )


def _seen(part: str, answer: httpx.Response) -> Iterator[Finding]:
    """What the proxy found out about its inference servers."""
    try:
        endpoints = [entry for entry in _json(answer).get("inference", []) if isinstance(entry, dict)]
    except (ValueError, TypeError):
        return
    for endpoint in endpoints:
        if endpoint.get("said"):
            yield ok(part, f"found {endpoint['said']}")
        if endpoint.get("exact_off"):
            yield warn(part, str(endpoint["exact_off"]), "the node runs in observe mode; set proxy.context accordingly")


def _silent(part: str, node: Node, url: str, record: NodeRecord | None, exc: Exception) -> Finding:
    fact = f"{url} does not answer ({type(exc).__name__})"
    if node.proxy.mode == "external":
        return fail(part, fact, f"start it: polarq proxy --node {node.id}")
    if record is None:
        return warn(part, "its worker is not running", f"start it: celery -A polarq worker -Q {node.id}")
    return fail(part, fact, f"the worker is up; see its log, and whether port {node.port} is another program's")


def _alive_nodes(deployment: Deployment) -> dict[str, NodeRecord]:
    try:
        with Ledger(redis_url(deployment.topology, deployment.settings), calls_for(deployment.topology)) as ledger:
            return {record.node_id: record for record in ledger.nodes() if record.alive}
    except LedgerUnavailable:
        return {}  # said by the check of Redis


def check_inference(deployment: Deployment) -> Iterator[Finding]:
    """Every node's inference endpoints, by one real call each."""
    done = set()
    for node in deployment.topology.gateway.nodes:
        for endpoint in node.endpoints:
            wanted = endpoint.model or node.model_served
            if (endpoint.base_url, endpoint.engine, wanted) not in done:
                done.add((endpoint.base_url, endpoint.engine, wanted))
                yield from _endpoint(f"inference {node.id}", endpoint, wanted)


def _endpoint(part: str, endpoint: InferenceEndpoint, wanted: str) -> Iterator[Finding]:
    key = os.environ.get(endpoint.api_key_env, "") if endpoint.api_key_env else ""
    if endpoint.api_key_env and not key:
        yield fail(part, f"{endpoint.api_key_env} is not set", "set it to the engine's API key")
        return
    with _client(key) as http:
        try:
            models = _json(http.get(f"{endpoint.base_url}/v1/models"))
            names = [str(model.get("id")) for model in models.get("data") or []]
        except httpx.HTTPStatusError as exc:
            yield fail(part, f"{endpoint.base_url}/v1/models answers {exc.response.status_code}", _HTTP_ADVICE)
            return
        except (httpx.HTTPError, ValueError, TypeError) as exc:
            fact = f"{endpoint.base_url} does not answer ({type(exc).__name__})"
            yield fail(part, fact, "start the inference server, or correct base_url in the topology")
            return
        yield ok(part, f"{endpoint.base_url} answers and serves {', '.join(names) or 'no model'}")
        if wanted and wanted not in names:
            advice = "correct model_served (or inference.model) in the topology, or start the engine with that name"
            yield fail(part, f"it does not serve '{wanted}', which the topology names", advice)
            return
        if not names:
            yield fail(part, "it lists no model", "start the engine with a model")
            return
        yield _token_call(part, http, endpoint, wanted or names[0])


_HTTP_ADVICE = "is base_url that of the engine, without /v1? does it need a key (inference.api_key_env)?"


def _token_call(part: str, http: httpx.Client, endpoint: InferenceEndpoint, model: str) -> Finding:
    """One call of one token, as the proxy makes them."""
    try:
        counts = _SPOKEN[endpoint.engine](http, endpoint.base_url, model)
    except httpx.HTTPStatusError as exc:
        return fail(part, f"a call of one token is answered {exc.response.status_code}", _HTTP_ADVICE)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as exc:
        advice = "see the engine's log; try it by hand with curl"
        return fail(part, f"a call of one token went wrong ({type(exc).__name__})", advice)
    prompt, sampled, logprobs = counts
    if not prompt or not sampled:
        advice = "polarq never guesses tokens: use vLLM 0.14 or newer (return_token_ids), or SGLang's /generate"
        return fail(part, "it returns no token ids", advice)
    if not logprobs:
        return fail(part, "it returns no log-probabilities", "polarq needs them to train on what was sampled")
    return ok(part, f"returns token ids ({prompt} prompt, {sampled} sampled) and log-probabilities")


def _vllm(http: httpx.Client, base_url: str, model: str) -> tuple[int, int, int]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "ping"}],
        "max_tokens": 1,
        "logprobs": True,
        "return_token_ids": True,
    }
    answer = _json(http.post(f"{base_url}/v1/chat/completions", json=body))
    choice = answer["choices"][0]
    entries = (choice.get("logprobs") or {}).get("content") or []
    finite = [entry for entry in entries if math.isfinite(entry["logprob"])]
    return len(answer.get("prompt_token_ids") or []), len(choice.get("token_ids") or []), len(finite)


def _sglang(http: httpx.Client, base_url: str, model: str) -> tuple[int, int, int]:
    body = {"text": "ping", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    meta = _json(http.post(f"{base_url}/generate", json=body))["meta_info"]
    sampled = meta.get("output_token_logprobs") or []
    finite = [entry for entry in sampled if entry[0] is not None and math.isfinite(entry[0])]
    return int(meta.get("prompt_tokens", 0)), len(sampled), len(finite)


_SPOKEN = {"vllm": _vllm, "sglang": _sglang}


def _client(key: str = "") -> httpx.Client:
    """As the proxy calls: never through an HTTP proxy of the environment."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
    return httpx.Client(timeout=timeout, trust_env=False, headers=headers)


def _json(answer: httpx.Response) -> Answer:
    answer.raise_for_status()
    body = answer.json()
    if not isinstance(body, dict):
        raise TypeError("not a JSON object")
    return body
