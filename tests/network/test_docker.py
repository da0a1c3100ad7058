"""Network policies of containers, whole rollouts with a real daemon."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import RolloutState
from polarq.contracts.specs import NetworkPolicy
from polarq.testing.stack import LocalStack
from tests.network.test_rollouts import PROXIES, rollout
from tests.runtimes.docker_rig import IMAGE, daemon_is_here
from tests.worker.conftest import shell_task, write_scenario

pytestmark = [pytest.mark.docker, pytest.mark.slow]

DEAD = "http://127.0.0.1:9"
EXCEPTED = "excepted: npm.example,127.0.0.1,::1,localhost"
"""The image's own, and those of the model."""
NAMED = "polarq-proxied:test"
HARNESS = """
python3 - <<'PY'
import json, os, urllib.error, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
try:
    urllib.request.urlopen("http://example.org/")
except urllib.error.URLError as exc:
    print(exc)
PY
echo "proxies: $(env | grep -i '_proxy=' | grep -vi '^no_proxy=' | cut -d= -f1 | sort | tr '\\n' ' ')"
echo "interfaces: $(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | tr '\\n' ' ')"
echo "excepted: $no_proxy"
"""


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """One whose own variables name a proxy that is not there."""
    daemon_is_here()

    def docker(*words: str) -> str:
        return subprocess.run(
            ["docker", *words], check=True, capture_output=True, text=True, timeout=120
        ).stdout.strip()

    made = docker("create", IMAGE, "true")
    change = f"ENV HTTP_PROXY={DEAD} HTTPS_PROXY={DEAD} http_proxy={DEAD} ALL_PROXY={DEAD} NO_PROXY=npm.example"
    docker("commit", "--change", change, made, NAMED)
    docker("rm", made)
    yield NAMED
    docker("rmi", "--force", NAMED)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home: Path = tmp_path_factory.mktemp("docker")
    with LocalStack(home, scenario=str(write_scenario(home))) as made:
        yield made


def seen(stack: LocalStack, name: str, image: str, **runtime: Any) -> tuple[list[str], NetworkPolicy, list[str]]:
    result = rollout(
        stack, shell_task(name, HARNESS, runtime={"backend": "docker", "image": image, **runtime}, timeout_seconds=200)
    )
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert result.harness is not None
    assert result.sandbox is not None
    lines = [line.strip() for line in result.harness.steps[0].stdout_tail.splitlines()]
    return lines, result.sandbox.network, [one.target for one in result.sandbox.denied]


def test_a_container_finds_the_model_and_is_refused_everybody_else(stack: LocalStack, image: str) -> None:
    lines, network, denied = seen(stack, "default", image)
    assert lines[0] == "First answer."
    assert "403" in lines[1]
    assert lines[2:] == [f"proxies: {PROXIES}", "interfaces: lo", EXCEPTED]
    assert (network, denied) == (NetworkPolicy.PROXY_ONLY, ["example.org:80"])


def test_a_container_with_policy_none_has_nobody_to_ask_not_even_whom_its_image_names(
    stack: LocalStack, image: str
) -> None:
    lines, network, denied = seen(stack, "none", image, network_policy="none")
    assert lines[0] == "First answer."
    assert lines[2:] == ["proxies:", "interfaces: lo", EXCEPTED]
    assert (network, denied) == (NetworkPolicy.NONE, [])
