"""The deployment in one strict, frozen file. Polar's topology loads as it is; polarq's keys stand beside them.

Every value has one place, a type, a unit in its name, a default and a sentence (its `description`), from which
`polarq config reference` is made.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from polarq.contracts.base import ID_PATTERN, Contract
from polarq.contracts.completion import SideKind
from polarq.contracts.specs import NetworkPolicy, RuntimeSpec
from polarq.errors import InvalidTopology
from polarq.topology.addresses import one_machine, overlap, unix_path
from polarq.topology.artifacts import ArtifactsSection
from polarq.topology.redis_address import Sentinels
from polarq.topology.runtimes import RuntimesSection

Port = Annotated[int, Field(ge=1, le=65535)]
NodeId = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
NonEmpty = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]

RESERVED_QUEUES = frozenset({"polarq", "celery"})
"""Queue names that cannot be node ids: the first is where foreign clients submit, the second Celery's default."""


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"'{value}' is not an http or https address")
    return value.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(_http_url)]


def _inside(mistakes: Mapping[tuple[str | int, ...], str]) -> PydanticCustomError:
    """Mistakes of what lies inside a value, each at its way in; the file's lines are found by it."""
    told = {way: f"{'.'.join(map(str, way))}: {message}" for way, message in mistakes.items()}
    return PydanticCustomError("wrong_inside", "{text}", {"text": "; ".join(told.values()), "keys": told})


_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
"""The loopback address that is listened on with hosts that mean every address of their family."""


def _reachable(host: str, port: int) -> str:
    host = _EVERYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class RedisSection(Contract):
    """Where the ledger, the payloads and the Celery queues live."""

    url: str | None = Field(
        None,
        description="redis://, rediss:// (TLS) or sentinel://[user:password@]HOST:PORT,HOST:PORT/DB?master=NAME "
        "(whichever server the Sentinels name; sentinels:// for TLS). POLARQ_REDIS_URL wins over it; neither: "
        "redis://127.0.0.1:6379/0.",
    )
    broker_url: str | None = Field(
        None, description="A second Redis for the Celery queues alone; default: the same as url."
    )
    payload_url: str | None = Field(
        None,
        description="A Redis for committed results alone, which are what is large; default: the same as url.",
    )
    wait_replicas: int = Field(
        0,
        ge=0,
        description="Replicas that must have a submission, a commit or a captured model call before it counts (WAIT), "
        "so that no failover to one of them forgets it. Fewer than there are: one that is down must not hold all up.",
    )
    tls_ca: NonEmpty | None = Field(
        None,
        description="File with the certificates of who vouches for Redis, for rediss:// addresses that name none "
        "themselves (?ssl_ca_certs=FILE); blank: the system's.",
    )
    prefix: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.{}-]{1,64}$")] = Field(
        "polarq", description="First part of every key."
    )
    memory_budget: float | None = Field(
        None,
        gt=0,
        description="Memory that each Redis may use: bytes, or up to 1 a share of its maxmemory; blank: all of it. "
        "At 80 % of it there is a warning, at 95 % new tasks are refused; results are still taken.",
    )

    @field_validator("url", "broker_url", "payload_url")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            Sentinels.parse(value)
        return value


class RolloutSection(Contract):
    """The HTTP shim (Polar's rollout server)."""

    host: NonEmpty = Field("0.0.0.0", description="Address the shim listens on.")
    port: Port = Field(8080, description="Port the shim listens on.")
    public_url: str = Field("", description="Address clients use; blank: derived from host and port.")
    save_dir: NonEmpty | None = Field(
        None, description="Folder where each ended session is also written as JSON, as Polar does."
    )
    dispatch_poll_interval_seconds: float = Field(
        1.0, gt=0, description="Accepted from Polar's files; polarq waits on events."
    )
    callback_grace_seconds: float = Field(
        120.0, ge=0, description="Accepted from Polar's files; polarq has leases instead."
    )
    http_max_connections: int = Field(1024, gt=0, description="Accepted from Polar's files.")
    http_max_keepalive_connections: int = Field(256, ge=0, description="Accepted from Polar's files.")
    cleanup_max_concurrency: int = Field(128, gt=0, description="Accepted from Polar's files.")
    cleanup_max_attempts: int = Field(3, ge=1, le=10, description="Accepted from Polar's files.")
    cleanup_retry_backoff_seconds: float = Field(0.1, ge=0, description="Accepted from Polar's files.")

    @model_validator(mode="after")
    def _connection_limits(self) -> Self:
        for name in ("http_max_keepalive_connections", "cleanup_max_concurrency"):
            if getattr(self, name) > self.http_max_connections:
                raise ValueError(f"{name} is more than http_max_connections")
        return self

    @property
    def url(self) -> str:
        return _http_url(self.public_url) if self.public_url.strip() else _reachable(self.host, self.port)


class InferenceEndpoint(Contract):
    """One inference server."""

    engine: Literal["vllm", "sglang"] = Field("sglang", description="Which engine's token API the proxy speaks.")
    base_url: HttpUrl = Field("http://127.0.0.1:8000", description="Address of the engine's HTTP server, without /v1.")
    scheduler: Literal["none", "thunderagent"] = Field(
        "none", description="Accepted from Polar's files; only none is supported."
    )
    model: str = Field(
        "",
        description="Model name to ask the engine for; blank: the node's model_served, else the engine's only model.",
    )
    tokenizer: str = Field(
        "",
        description="Folder or public name of the model's tokenizer, for the renderers package in exact mode; "
        "blank: the engine's own template is used.",
    )
    image_token_id: int | None = Field(
        None,
        ge=0,
        description="Id that the model's processor repeats for a picture (`image_token_id` of its config.json); with "
        "it, rows say which ids stand for which picture.",
    )
    api_key_env: str | None = Field(
        None, description="Name of the environment variable that holds the engine's API key."
    )
    max_concurrency: int = Field(256, gt=0, description="Model calls in flight to this endpoint at most.")
    timeout_s: float = Field(900.0, gt=0, description="Longest a single model call may take, in seconds.")
    unanswered_s: float = Field(
        60.0,
        gt=0,
        description="Seconds in which the server answers nothing, health checks included, until calls that wait for it "
        "fail, and are asked of another one where there is one.",
    )
    weight: float = Field(1.0, gt=0, description="Share of new rollouts this endpoint takes when there are several.")

    @field_validator("scheduler")
    @classmethod
    def _supported(cls, value: str) -> str:
        if value != "none":
            raise ValueError(f"scheduler '{value}' is not supported by polarq")
        return value


class ProxySection(Contract):
    """The node's proxy between harnesses and inference."""

    mode: Literal["embedded", "external"] = Field(
        "embedded", description="embedded: the worker starts and watches it; external: you run `polarq proxy` yourself."
    )
    max_body_bytes: int = Field(
        64 * 1024 * 1024, gt=0, description="Largest request body of a harness, after decompression, in bytes."
    )
    body_idle_s: float = Field(
        60.0, gt=0, description="Seconds without a byte after which a request whose body is not whole is given up."
    )
    keepalive_s: float = Field(10.0, gt=0, description="Seconds between keep-alive comments on a stream that waits.")
    stream_upstream: bool = Field(
        True, description="Stream from the engine when the harness streams; else replay one answer."
    )
    unix_socket: Annotated[str, AfterValidator(unix_path)] = Field(
        "", description="Path of a Unix socket that the proxy also listens on, for sandboxes without a network."
    )
    processes: int = Field(
        1, ge=1, le=64, description="Proxy processes behind the one address; each rollout stays in one of them."
    )
    admin_host: NonEmpty = Field("127.0.0.1", description="Address of the operator's side: metrics and full health.")
    admin_port: Port | None = Field(
        None, description="Port of the operator's side; it needs POLARQ_TOKEN. Blank: there is none."
    )
    side_traffic: dict[str, str] = Field(
        {},
        description="Per kind of side traffic: train (as a step of the task), or the alias of a model_pool entry. "
        f"Kinds: {', '.join(SideKind)}.",
    )
    context: Literal["observe", "exact"] = Field(
        "observe",
        description="observe: the engine renders every prompt. exact: from its second turn on, a conversation's prompt "
        "is sent as the ids that were sampled and what is new.",
    )
    refuse_forged: bool = Field(
        False, description="In exact mode, let the engine render a turn whose messages' text makes control tokens."
    )
    retry_grace_s: float = Field(
        3.0,
        ge=0,
        description="Seconds that a call goes on after its harness hung up, so that a repeat is not sampled again.",
    )
    pause_hold_s: float = Field(
        120.0, ge=0, description="Seconds that a call waits while inference is paused, before it gets 503."
    )

    @field_validator("side_traffic")
    @classmethod
    def _kinds_exist(cls, treated: dict[str, str]) -> dict[str, str]:
        kinds = list(SideKind)
        unknown: dict[tuple[str | int, ...], str] = {
            (kind,): f"there is no such kind of side traffic; the kinds are {', '.join(kinds)}"
            for kind in treated
            if kind not in kinds
        }
        if unknown:
            raise _inside(unknown)
        return treated

    @model_validator(mode="after")
    def _admin_ports_exist(self) -> Self:
        ports = self.admin_ports
        if ports and ports[-1] > 65535:
            message = f"{self.processes} processes need the ports {ports[0]} to {ports[-1]}, and 65535 is the last one"
            raise _inside({("admin_port",): message})
        return self

    @property
    def admin_ports(self) -> range:
        """Ports of the operator's side: one per process."""
        return range(0) if self.admin_port is None else range(self.admin_port, self.admin_port + self.processes)


class CompletionPersistence(Contract):
    """Polar's section; polarq always persists each call before the reply."""

    enabled: bool = Field(True, description="Accepted from Polar's files; polarq always records.")
    max_field_bytes: int = Field(
        1024 * 1024, gt=0, description="Accepted from Polar's files; polarq never truncates a record."
    )
    queue_size: int = Field(1024, gt=0, description="Accepted from Polar's files.")
    write_workers: int = Field(8, gt=0, le=64, description="Accepted from Polar's files.")
    batch_size: int = Field(16, gt=0, le=1024, description="Accepted from Polar's files.")
    write_max_attempts: int = Field(3, gt=0, le=10, description="Accepted from Polar's files.")
    retry_backoff_seconds: float = Field(0.1, ge=0, le=60, description="Accepted from Polar's files.")


class PoolModel(Contract):
    """A frozen model beside the policy. A harness asks for it by its alias; nothing of it is ever trained on."""

    alias: Annotated[str, StringConstraints(pattern=r"^pool/\S+$")] = Field(
        description="The model name by which it is asked for."
    )
    model: NonEmpty = Field(description="What its server calls it.")
    base_url: HttpUrl = Field(description="Address of an OpenAI-compatible server, with or without /v1.")
    api_key_env: str | None = Field(
        None, description="Name of the environment variable on the node that holds its key; no sandbox sees it."
    )
    max_concurrency: int = Field(32, gt=0, description="Model calls in flight to it at most.")
    max_active_episodes: int | None = Field(None, gt=0, description="Accepted from Polar's files.")


class Node(Contract):
    """One gateway node: a Celery worker on a host, and its proxy."""

    id: NodeId = Field(
        default_factory=lambda: socket.gethostname() or "node0", description="Node id and name of its queue."
    )
    host: NonEmpty = Field(
        "0.0.0.0",
        description="Address the node's proxy listens on (0.0.0.0 is narrowed to loopback for local sandboxes).",
    )
    port: Port = Field(8081, description="Port the node's proxy listens on.")
    public_url: str = Field(
        "", description="Address at which sandboxes reach the proxy; blank: derived from host and port."
    )
    model_served: str = Field("", description="Model name the engine serves; blank: asked from the engine.")
    inference: InferenceEndpoint | list[InferenceEndpoint] = Field(
        InferenceEndpoint(), description="One endpoint or a list of them."
    )
    max_init_workers: int = Field(4, gt=0, le=4096, description="Sandboxes prepared at once.")
    max_run_workers: int = Field(2, gt=0, le=4096, description="Harnesses running at once.")
    max_postrun_workers: int = Field(4, gt=0, le=4096, description="Rollouts built and scored at once.")
    ready_buffer: int | None = Field(
        None, ge=0, le=4096, description="Prepared sandboxes that may wait for a run slot; blank: max_run_workers."
    )
    min_free_disk_mb: int = Field(
        256,
        ge=0,
        description="With less room than this in its state folder a node takes nothing new until there is more; 0: it "
        "takes all, and what does not fit fails.",
    )
    default_runtime: RuntimeSpec | None = Field(None, description="Runtime of tasks that name none.")
    runtimes: RuntimesSection = Field(RuntimesSection(), description="The node's sandboxes.")
    model_pool: list[PoolModel] = Field([], description="Frozen models beside the policy, asked for by alias.")
    labels: dict[str, str] = Field({}, description="What placement can select nodes by.")
    proxy: ProxySection = Field(ProxySection(), description="The node's proxy.")

    @field_validator("id")
    @classmethod
    def _not_reserved(cls, value: str) -> str:
        if value in RESERVED_QUEUES:
            raise ValueError(f"'{value}' is reserved; name the node differently")
        return value

    @field_validator("model_pool")
    @classmethod
    def _unique_aliases(cls, pool: list[PoolModel]) -> list[PoolModel]:
        aliases = [model.alias for model in pool]
        twice: dict[tuple[str | int, ...], str] = {
            (at, "alias"): f"'{alias}' is given twice in the node's model_pool; name one of them differently"
            for at, alias in enumerate(aliases)
            if alias in aliases[:at]
        }
        if twice:
            raise _inside(twice)
        return pool

    @field_validator("proxy")
    @classmethod
    def _proxy_fits_the_node(cls, proxy: ProxySection, info: ValidationInfo) -> ProxySection:
        # What is missing from info.data has a mistake of its own.
        wrong: dict[tuple[str | int, ...], str] = {}
        if "model_pool" in info.data:
            aliases = [model.alias for model in info.data["model_pool"]]
            has = f"has {', '.join(aliases)}" if aliases else "is empty"
            for kind, treated in proxy.side_traffic.items():
                if treated != "train" and treated not in aliases:
                    wrong["side_traffic", kind] = (
                        f"'{treated}' is neither train nor an alias in model_pool, which {has}"
                    )
        host, port = info.data.get("host"), info.data.get("port")
        if host is not None and port in proxy.admin_ports and overlap(host, proxy.admin_host):
            ports = proxy.admin_ports
            taken = f"{ports[0]} is" if len(ports) == 1 else f"{ports[0]} to {ports[-1]} (one per process) hold"
            wrong["admin_port",] = f"{taken} the node's own port {port}; choose another"
        if wrong:
            raise _inside(wrong)
        return proxy

    @field_validator("inference", mode="before")
    @classmethod
    def _at_least_one(cls, value: Any) -> Any:
        if isinstance(value, list) and not value:
            raise ValueError("an empty list; give at least one endpoint")
        return value

    @property
    def endpoints(self) -> list[InferenceEndpoint]:
        return self.inference if isinstance(self.inference, list) else [self.inference]

    @property
    def listens_on(self) -> dict[tuple[str, ...], list[tuple[str, int]]]:
        """(host, port) of all its TCP sockets, by the key that says so."""
        admin = [(self.proxy.admin_host, port) for port in self.proxy.admin_ports]
        return {("port",): [(self.host, self.port)], ("proxy", "admin_port"): admin}

    @property
    def ready_places(self) -> int:
        return self.max_run_workers if self.ready_buffer is None else self.ready_buffer

    @property
    def capacity(self) -> int:
        """Rollouts this node holds at once, over all stages."""
        return self.max_init_workers + self.ready_places + self.max_run_workers + self.max_postrun_workers

    @property
    def proxy_url(self) -> str:
        """Address of the proxy as sandboxes on this host see it."""
        if not self.public_url.strip():
            return _reachable(self.host, self.port)
        url = _http_url(self.public_url)
        here = _EVERYWHERE.get(self.host, self.host)
        parts = urlsplit(url)
        if (parts.scheme, parts.hostname) != ("http", "localhost") or here not in _EVERYWHERE.values():
            return url
        # The name may lead to the other family's address first, where nobody listens, or somebody else does.
        return f"{_reachable(here, parts.port or 80)}{parts.path}"


def _collisions(other: Node, node: Node) -> dict[tuple[str, ...], str]:
    """What `node` cannot listen on because `other` does, by the key that says so. Only what the file proves: nodes
    that listen everywhere have a machine each, for all that it says."""
    if not one_machine(other.host, node.host):
        return {}
    found: dict[tuple[str, ...], str] = {}
    theirs = [address for addresses in other.listens_on.values() for address in addresses]
    for key, ours in node.listens_on.items():
        for host, port in ours:
            if any(port == taken and overlap(host, there) for there, taken in theirs):
                text = f"node '{other.id}' listens on {host}:{port} too; choose another port for one of them"
                found.setdefault(key, text)
    if node.proxy.unix_socket and node.proxy.unix_socket == other.proxy.unix_socket:
        found["proxy", "unix_socket"] = f"node '{other.id}' has the same one; choose another path for one of them"
    return found


class GatewaySection(Contract):
    """The nodes."""

    heartbeat_interval_seconds: float = Field(5.0, gt=0, description="Seconds between a node's heartbeats.")
    lease_s: float = Field(18.0, gt=1, description="Seconds a claimed rollout stays owned without renewal.")
    reap_interval_s: float = Field(
        2.0,
        gt=0,
        description="Seconds between two looks for what a lost node left behind; one worker at a time does it.",
    )
    ring_again_s: float = Field(
        10.0, gt=0, description="Seconds a rollout waits before its message, if it is in no queue, is sent again."
    )
    max_attempts: int = Field(
        3,
        ge=1,
        description="Losses of its worker by the same crash that are held against a rollout until it fails. One that "
        "had company counts for a part; four times as many losses of whatever kind fail it too.",
    )
    drain_grace_s: float = Field(
        600.0,
        ge=0,
        description="Seconds a stopping worker lets its rollouts run before it gives them back to the queue.",
    )
    rollout_server_url: HttpUrl | None = Field(
        None, description="Accepted from Polar's files; polarq's nodes meet in Redis."
    )
    nodes: list[Node] = Field(
        [Node(id="node0", inference=InferenceEndpoint(engine="vllm"))], min_length=1, description="The nodes."
    )
    completion_persistence: CompletionPersistence = Field(CompletionPersistence(), description="Polar's section.")

    @field_validator("nodes")
    @classmethod
    def _unique(cls, nodes: list[Node]) -> list[Node]:
        ids = [node.id for node in nodes]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise ValueError(f"node id '{twice[0]}' is given twice")
        return nodes

    @field_validator("nodes")
    @classmethod
    def _fit_beside_each_other(cls, nodes: list[Node]) -> list[Node]:
        wrong: dict[tuple[str | int, ...], str] = {}
        for at, node in enumerate(nodes):
            for other in nodes[:at]:
                for key, text in _collisions(other, node).items():
                    wrong.setdefault((at, *key), text)
        if wrong:
            raise _inside(wrong)
        return nodes


class SecuritySection(Contract):
    """What tasks are allowed to do to a node."""

    allowed_modules: list[str] = Field(
        [], description="Python modules (and what is below them) that a task's import_path may name."
    )
    allowed_mounts: list[str] = Field([], description="Host folders that a task may mount; subfolders included.")
    allowed_images: list[str] = Field(["*"], description="Image names tasks may use, with * as wildcard.")
    upload_roots: list[str] = Field(
        ["*"], description="Host folders from which a task may upload into its sandbox; * for any."
    )
    default_network_policy: NetworkPolicy = Field(
        NetworkPolicy.PROXY_ONLY,
        description="What sandboxes of tasks that say nothing reach: none, proxy-only, allowlist or full; where a "
        "backend cannot cut them off (local without bubblewrap), the record says full.",
    )
    allowed_network_policies: list[NetworkPolicy] = Field(
        list(NetworkPolicy), description="Network policies that a task may ask for."
    )
    allowed_networks: list[str] = Field(
        ["bridge", "host", "none"], description="Networks that a task may name (runtime.network), with * as wildcard."
    )
    max_gpus: int | None = Field(None, ge=0, description="GPUs that one sandbox may ask for; blank: not limited.")
    callback_hosts: list[str] = Field(
        ["127.0.0.1", "localhost", "::1"],
        description="Hosts that callback_url may name: host (ports 80, 443; on loopback any), host:port, or host:*.",
    )
    judge_hosts: list[str] = Field(
        ["127.0.0.1", "localhost", "::1"],
        description="Hosts that an evaluator's judge_base_url or teacher_base_url may name, spelt as in "
        "callback_hosts.",
    )
    judge_key_envs: list[str] = Field(
        ["JUDGE_API_KEY"],
        description="Environment variables of a node whose value a task may have sent to its judge or teacher, as the "
        "key.",
    )


class RetentionSection(Contract):
    """How long things are kept."""

    result_s: float = Field(
        7 * 24 * 3600.0, gt=0, description="Seconds a finished task and its trajectories stay in Redis."
    )
    events: int = Field(100_000, gt=0, description="Events kept, about.")
    archive: NonEmpty | None = Field(
        None,
        description="Folder, or fsspec address (s3://..., needs polarq[archive]), where results are written as JSON "
        "before they are deleted or expire; blank: nowhere.",
    )
    archive_zstd: bool = Field(False, description="Compress the archive's files with zstd (their names end in .zst).")
    lost_nodes_s: float = Field(
        7 * 24 * 3600.0, gt=0, description="Seconds the record and the flags of a node that is gone are kept."
    )


class BudgetsSection(Contract):
    """Limits on what tasks may ask for."""

    max_samples: int = Field(1024, ge=1, le=4096, description="Most rollouts in one task.")
    max_timeout_s: float = Field(24 * 3600.0, gt=0, description="Longest timeout_seconds of a task.")
    inline_result_bytes: int = Field(
        256 * 1024, ge=0, description="Trajectories up to this many bytes are inline in Celery's own result."
    )


class RunShare(Contract):
    """What one training run (`run_id`) may take of the fleet."""

    weight: float = Field(1.0, gt=0, le=1000, description="Its share of the nodes beside other runs that wait.")
    max_in_flight: int | None = Field(None, ge=1, description="Rollouts of it that run at once; blank: no limit.")
    max_queued: int | None = Field(None, ge=1, description="Rollouts of it that wait at once; blank: no limit.")


class LimitsSection(Contract):
    """Back-pressure, and how runs share the nodes. A submit that does not fit is refused and records nothing."""

    max_queued: int | None = Field(None, ge=1, description="Rollouts that wait at once, of all runs; blank: no limit.")
    retry_after_s: float = Field(5.0, gt=0, le=3600, description="Seconds after which a refused submit may try again.")
    priority_head_start_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="Seconds of waiting that one point of dispatch_priority is worth: what waited longer goes first.",
    )
    runs: dict[NodeId, RunShare] = Field(
        {},
        description="Per run_id: weight (its share of the nodes beside other runs, 1 where not given), max_in_flight "
        "and max_queued (rollouts of it; blank: no limit).",
    )

    def of_run(self, run_id: str) -> RunShare:
        return self.runs.get(run_id, RunShare())


class Topology(Contract):
    """A whole deployment."""

    redis: RedisSection = Field(RedisSection(), description="Redis.")
    rollout: RolloutSection = Field(RolloutSection(), description="The HTTP shim.")
    gateway: GatewaySection = Field(GatewaySection(), description="The nodes.")
    security: SecuritySection = Field(SecuritySection(), description="What tasks may do.")
    retention: RetentionSection = Field(RetentionSection(), description="What is kept.")
    artifacts: ArtifactsSection = Field(ArtifactsSection(), description="Files that come back from sandboxes.")
    budgets: BudgetsSection = Field(BudgetsSection(), description="Limits on tasks.")
    limits: LimitsSection = Field(
        LimitsSection(),
        description="Back-pressure and fair shares; workers publish them, and they hold for every client "
        "(polarq limits).",
    )

    def node(self, node_id: str) -> Node | None:
        return next((node for node in self.gateway.nodes if node.id == node_id), None)

    def resolve(self, node_id: str) -> Node:
        """The node of that id. A topology with one node is a fleet's template: any id takes its settings.

        Raises `InvalidTopology` for an id that a topology of several nodes does not list.
        """
        found = self.node(node_id)
        if found is not None:
            return found
        if len(self.gateway.nodes) > 1:
            listed = ", ".join(node.id for node in self.gateway.nodes)
            raise InvalidTopology("topology", [f"there is no node '{node_id}' (nodes: {listed})"])
        return self.gateway.nodes[0].model_copy(update={"id": node_id})
