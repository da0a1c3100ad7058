"""What a task's network policy comes to on a node, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from polarq.contracts.specs import NetworkPolicy, RuntimeSpec
from polarq.contracts.task import Task
from polarq.errors import InvalidTask, RuntimeFault
from polarq.settings import Settings
from polarq.topology import Node, Topology
from polarq.topology.runtimes import RuntimesSection
from polarq_worker.harnesses.environment import harness_env, sandbox_env, step_env
from polarq_worker.network.model_door import ProxyAddress
from polarq_worker.network.policy import enforced, own_services, proxy_address
from polarq_worker.network.way_out import WayOut, over
from polarq_worker.runtimes.base import Host, SandboxLayout
from polarq_worker.runtimes.local import LocalRuntime

LAYOUT = SandboxLayout.below("/polar/session")
BASE = "http://127.0.0.1:28080/s/grant"


class Cutting(LocalRuntime):
    """A backend that can cut sandboxes off."""

    @classmethod
    def keeps_offline(cls, host: Host) -> bool:
        return True


class Open(LocalRuntime):
    """One that cannot."""

    @classmethod
    def keeps_offline(cls, host: Host) -> bool:
        return False


def spec(**more: Any) -> RuntimeSpec:
    return RuntimeSpec(backend="local", **more)


@pytest.mark.parametrize(
    ("wish", "policy"),
    [
        ({}, NetworkPolicy.PROXY_ONLY),
        ({"allow_internet": False}, NetworkPolicy.NONE),
        ({"network": "none"}, NetworkPolicy.NONE),
        ({"network": "host"}, NetworkPolicy.FULL),
        ({"network_policy": "none"}, NetworkPolicy.NONE),
        ({"network_policy": "proxy-only", "allow_internet": False}, NetworkPolicy.PROXY_ONLY),
        ({"network_policy": "allowlist", "allowed_hosts": ["pypi.example"]}, NetworkPolicy.ALLOWLIST),
        ({"network_policy": "full"}, NetworkPolicy.FULL),
    ],
)
def test_a_backend_that_can_cut_off_does_what_is_asked(wish: dict[str, Any], policy: NetworkPolicy) -> None:
    assert enforced(spec(**wish), Cutting, Host(), NetworkPolicy.PROXY_ONLY) is policy


@pytest.mark.parametrize(
    ("wish", "key"),
    [
        ({"network_policy": "none"}, "network_policy"),
        ({"network_policy": "proxy-only"}, "network_policy"),
        ({"network_policy": "allowlist", "allowed_hosts": ["a.example"]}, "network_policy"),
        ({"allow_internet": False}, "allow_internet"),
        ({"network": "none"}, "network"),
    ],
)
def test_what_a_task_asks_for_and_its_backend_cannot_give_is_refused(wish: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidTask, match=rf"^runtime: {key}: runtime 'local' cannot cut sandboxes off the network"):
        enforced(spec(**wish), Open, Host(), NetworkPolicy.FULL)


@pytest.mark.parametrize("default", list(NetworkPolicy))
def test_a_default_that_cannot_be_enforced_comes_to_full(default: NetworkPolicy) -> None:
    assert enforced(spec(), Open, Host(), default) is NetworkPolicy.FULL


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "*",
        "*.",
        "https://a.example",
        "a.example/x",
        "a b",
        "127.1",
        "0x7f000001",
        "[::ffff:1.2.3.4]:80",
        "*.10.0.0.1",
        "a:0",
        "a:x",
    ],
)
def test_a_host_that_can_never_be_allowed_is_refused_with_the_task(entry: str) -> None:
    with pytest.raises(ValidationError):
        spec(network_policy="allowlist", allowed_hosts=[entry])


def test_two_doors_need_two_ports() -> None:
    runtimes = {"model_port": 7000, "egress_port": 7000}
    with pytest.raises(ValidationError, match="model_port and egress_port are both 7000"):
        RuntimesSection.model_validate(runtimes)


# --- the environment


def env_of(way_out: WayOut, own: dict[str, str]) -> dict[str, str]:
    agent = {"harness": "mini_swe_agent", "env": {**own, "MINE": "1"}}
    given = {"task_id": "t", "instruction": "x", "runtime": {"backend": "local", "env": own}, "agent": agent}
    task = Task.parse(given)
    harness = harness_env(
        task, rollout_id="t.0", fencing_token=1, base_url=BASE, api_key="k", layout=LAYOUT, way_out=way_out
    )
    evaluator = sandbox_env(task, rollout_id="t.0", layout=LAYOUT, way_out=way_out)
    step = step_env(own, harness, way_out)
    names = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "NO_PROXY"}
    found = [{n: v for n, v in env.items() if n.upper() in names} for env in (harness, evaluator)]
    assert found[0] == found[1]
    assert {n: v for n, v in step.items() if n.upper() in names}.items() <= found[0].items()
    return found[0]


OWN = {
    "HTTP_PROXY": "http://proxy.corp:3128",
    "https_proxy": "http://other.corp:3128",
    "All_Proxy": "socks5://third.corp:1080",
    "ftp_proxy": "http://fourth.corp:3128",
    "NO_PROXY": "npm.example,127.*",
}
LOCAL = "npm.example,127.*,127.0.0.1,::1,localhost"


def test_what_an_image_excepts_from_its_proxy_stays_excepted() -> None:
    image = {"HTTP_PROXY": "http://corp:3128", "no_proxy": "artifacts.internal,127.*", "A": "1"}
    both = over(image, {"NO_PROXY": "mine.example,127.0.0.1", "no_proxy": "mine.example,127.0.0.1", "A": "2"})
    named = "artifacts.internal,127.*,mine.example,127.0.0.1"
    assert both == {"HTTP_PROXY": "http://corp:3128", "NO_PROXY": named, "no_proxy": named, "A": "2"}
    assert over({"NO_PROXY": "x"}, {}) == {"NO_PROXY": "x"}
    assert over({}, {"NO_PROXY": "x"}) == {"NO_PROXY": "x"}


def test_without_any_way_out_no_proxy_is_named_not_even_the_tasks_own() -> None:
    assert env_of(WayOut(cut_off=True), OWN) == {"NO_PROXY": LOCAL, "no_proxy": LOCAL}


def test_the_one_way_out_is_named_in_both_spellings_and_instead_of_the_tasks_own() -> None:
    door = "http://127.0.0.1:28081"
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    both = {name: door for upper in proxies for name in (upper, upper.lower())}
    assert env_of(WayOut(True, door), OWN) == {**both, "NO_PROXY": LOCAL, "no_proxy": LOCAL}


def test_on_the_open_network_a_tasks_own_proxies_stand() -> None:
    assert env_of(WayOut(), OWN) == {**OWN, "NO_PROXY": LOCAL, "no_proxy": LOCAL}


# --- addresses


@pytest.mark.parametrize(
    ("node", "address"),
    [
        ({"host": "0.0.0.0", "port": 8100}, ProxyAddress("127.0.0.1", 8100)),
        ({"host": "::", "port": 8100}, ProxyAddress("::1", 8100)),
        ({"host": "10.0.0.7", "port": 8100}, ProxyAddress("10.0.0.7", 8100)),
        ({"host": "0.0.0.0", "port": 8100, "public_url": "https://gate.example"}, ProxyAddress("127.0.0.1", 8100)),
        ({"proxy": {"unix_socket": "/run/polarq/p.sock"}}, ProxyAddress(path="/run/polarq/p.sock")),
        (
            {"host": "0.0.0.0", "public_url": "http://gate.example:81", "proxy": {"mode": "external"}},
            ProxyAddress("gate.example", 81),
        ),
    ],
)
def test_the_relay_goes_where_the_proxy_really_listens(node: dict[str, Any], address: ProxyAddress) -> None:
    assert proxy_address(Node.model_validate({"id": "n", **node})) == address


@pytest.mark.parametrize(
    ("host", "public_url", "url"),
    [
        ("0.0.0.0", "", "http://127.0.0.1:8100"),
        ("::", "", "http://[::1]:8100"),
        ("::1", "", "http://[::1]:8100"),
        ("127.0.0.1", "http://localhost:8100", "http://127.0.0.1:8100"),
        ("0.0.0.0", "http://LOCALHOST:8100/by/", "http://127.0.0.1:8100/by"),
        ("::", "http://localhost:8100", "http://[::1]:8100"),
        ("127.0.0.1", "https://localhost:8100", "https://localhost:8100"),
        ("localhost", "http://localhost:8100", "http://localhost:8100"),
        ("0.0.0.0", "http://gate.example:8100", "http://gate.example:8100"),
    ],
)
def test_a_base_url_names_an_address_that_is_listened_on(host: str, public_url: str, url: str) -> None:
    # Field case H04. A certificate's name, and a name that is listened on as it resolves, stay.
    assert Node(id="n", host=host, port=8100, public_url=public_url).proxy_url == url


def test_a_proxy_behind_tls_cannot_be_reached_through_a_door() -> None:
    node = {"id": "n", "host": "0.0.0.0", "public_url": "https://gate.example", "proxy": {"mode": "external"}}
    with pytest.raises(RuntimeFault, match=r"proxy\.unix_socket"):
        proxy_address(Node.model_validate(node))


def test_what_the_deployment_itself_talks_to_is_known() -> None:
    nodes = [
        {
            "id": "a",
            "host": "10.0.0.7",
            "port": 8100,
            "inference": {"engine": "vllm", "base_url": "http://Engine.Example:9000"},
            "model_pool": [{"alias": "pool/j", "model": "j", "base_url": "https://judge.example/v1"}],
        }
    ]
    data = {"redis": {"url": "redis://:secret@ledger.example/0"}, "gateway": {"nodes": nodes}}
    own = own_services(Topology.parse(data, what="topology"), Settings.from_env({}))
    ours = {("ledger.example", 6379), ("10.0.0.7", 8100), ("engine.example", 9000), ("judge.example", 443)}
    assert ours <= own


def test_all_sentinels_are_known() -> None:
    settings = Settings.from_env({"POLARQ_REDIS_URL": "sentinel://s1:26379,s2:26380/0?master=m"})
    assert {("s1", 26379), ("s2", 26380)} <= own_services(Topology(), settings)
