"""The node's inference servers: what each one is, whether it answers, and which one a session's calls go to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from polarq.registry import plugin
from polarq.topology import InferenceEndpoint, Node
from polarq_proxy.call import Answer, ModelCall
from polarq_proxy.engines.base import Engine, EngineFacts, TokensIn
from polarq_proxy.exact.check import check
from polarq_proxy.exact.engine import EngineRenderer
from polarq_proxy.exact.known_models import known_bridge
from polarq_proxy.exact.suffix import Suffixes
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.gather import Gatherer
from polarq_proxy.jsons import encode
from polarq_proxy.sse import EventTooLarge, SseParser
from polarq_proxy.upstream import Upstream
from polarq_proxy.versions import UNREAD, PolicyVersions

log = logging.getLogger("polarq.proxy")

QUICK_TIMEOUT_S = 5.0
"""For questions that sample nothing."""
PROBE_TIMEOUT_S = 60.0
"""For one sampled token: a server that just started may compile first."""
MEETING_S = 15.0
"""How long a call waits for the first look at a server."""
HEALTHY_INTERVAL_S = 10.0
UNANSWERED_LOOKS = 3
"""One alone may be this process' own doing, which was asleep meanwhile."""
RETRY_INTERVALS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
PROBE_SESSION = "polarq-probe.0"
PROBE_EVENT_BYTES = 1 << 20
_NEARLY_0 = 0.01
_NO_ANSWER = frozenset({FaultKind.TIMED_OUT, FaultKind.ENGINE_DOWN})
_PROBE_HEADERS = {"X-Session-ID": PROBE_SESSION}
_MISSING_SOMETHING = frozenset({400, 422})
"""The statuses with which a route refuses an empty body."""


@dataclass(slots=True)
class EndpointState:
    """What was last seen of an inference server. None: not known yet."""

    reachable: bool | None = None
    gives_ids: bool | None = None
    problem: str = ""
    version: str = ""
    served: tuple[str, ...] = ()
    max_context: int | None = None
    logprobs_mode: str = ""
    """What its log-probabilities were found to be; blank: not found out."""


class Waiting(Protocol):
    """A call that is at a server."""

    heard_at: float
    """When something of its answer came last, by the monotonic clock."""
    given_up: bool
    """It was ended because the server answers nothing."""


class Endpoint:
    """One inference server with its client, its limit and its state."""

    def __init__(
        self,
        spec: InferenceEndpoint,
        engine: Engine,
        api_key: str | None,
        model: str,
        *,
        exact: bool = False,
        refuse_forged: bool = False,
        processes: int = 1,
    ) -> None:
        self.spec = spec
        self._api_key = api_key
        self.suffixes: Suffixes | None = None
        """Continues prompts as ids; None: the engine renders, because the node wants it so or must (`exact_off`)."""
        self.exact_off = ""
        self._exact = exact
        self._refuse_forged = refuse_forged
        self.engine = engine
        self.upstream = Upstream(spec, api_key)
        self.configured_model = spec.model or model
        self.state = EndpointState()
        self.gate = asyncio.Semaphore(max(1, spec.max_concurrency // processes))
        self.in_flight = 0
        self.waiting: dict[asyncio.Timeout, Waiting] = {}
        """Calls that are at the server, by the scopes in which they are."""
        self.sessions = 0
        self.versions = PolicyVersions(self._policy_version)
        self.features = engine.features()
        self.tokens_in: TokensIn | None = None
        """Its routes for ids, where they are open: a cut call goes on there; None: it is sampled anew."""
        self.gives_versions = False
        """Its answers themselves say which policy version sampled them."""
        self._weights_route = engine.weights_path is not None
        self._answered_at = time.monotonic()
        """When it answered a quick question last, by the monotonic clock."""
        self._unanswered = 0
        """Looks since then."""
        self._said = ""
        """What the log was told of it last."""
        self._wake = asyncio.Event()
        self._met = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.upstream.start()
        self._watch = asyncio.create_task(self._watching())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self.upstream.close()

    @property
    def model(self) -> str:
        """The name to ask it for: configured, else the first it serves, else blank."""
        return self.configured_model or (self.state.served[0] if self.state.served else "")

    @property
    def load(self) -> float:
        return (self.in_flight + self.sessions) / self.spec.weight

    @property
    def asks_versions(self) -> bool:
        """Whether policy versions must be read around each call."""
        return self._weights_route and not self.gives_versions

    def without_key(self, fault: CallFault) -> CallFault:
        """The same fault. Servers repeat the key that they were shown, and a fault's words go into sandboxes."""
        if self._api_key and self._api_key in fault.message:
            fault.message = fault.message.replace(self._api_key, "***")
        return fault

    async def met(self) -> None:
        """Waits until it was looked at once, however that went: until then nobody knows how to speak to it."""
        if not self._met.is_set() and self._watch is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(MEETING_S):
                    await self._met.wait()

    def unreachable(self, problem: str) -> None:
        """A call could not reach it: look again soon."""
        if self.state.reachable is not False:
            log.warning("%s", problem)
        self.state.reachable, self.state.problem = False, problem
        self._wake.set()

    def cannot_continue(self, problem: str) -> None:
        """Its routes for ids turned out to be closed."""
        log.warning("%s; cut calls are sampled anew from now on", problem)
        self.tokens_in = None

    def note_ids(self, given: bool) -> None:
        """Real answers tell more than the probe did."""
        if not given and self.state.gives_ids is not False:
            log.warning("%s gave no token ids: its calls are recorded and cannot be trained on", self.upstream.where)
            # A node without ids takes no rollouts, so that no call would ever show that there are some again.
            self._wake.set()
        self.state.gives_ids = given

    async def ensure_model(self) -> str:
        """The model's name, asked from the server if need be. Raises `CallFault`."""
        if not self.model:
            await self._ask_facts()
        if not self.model:
            raise CallFault(FaultKind.MISCONFIGURED, f"{self.upstream.where} serves no model")
        return self.model

    def report(self) -> dict[str, Any]:
        state = self.state
        return {
            "engine": self.engine.name,
            "url": self.spec.base_url,
            "reachable": state.reachable,
            "ids": state.gives_ids,
            "model": self.model,
            "served": list(state.served),
            "version": state.version,
            "max_model_len": state.max_context,
            "problem": state.problem,
            "said": self.in_words() if state.reachable else "",
            "context": "exact" if self.suffixes is not None else "observe",
            "exact_off": self.exact_off,
            "streams_ids": self.features.streams_ids,
            "token_in": self.features.token_in,
            "continues": self.tokens_in is not None,
            "versions": self.features.versions_in_answer or self._weights_route,
            "in_flight": self.in_flight,
            "sessions": self.sessions,
        }

    async def _watching(self) -> None:
        failures = 0
        while True:
            try:
                if self.state.reachable and self.state.gives_ids:
                    await self._look(self.engine.health_path)
                else:
                    await self._examine()
                failures = 0
            except CallFault as fault:
                failures += 1
                if self.state.problem != fault.message:
                    log.warning("%s", fault.message)
                self.state.reachable, self.state.problem = fault.kind is FaultKind.MISCONFIGURED, fault.message
            self._met.set()
            wait_s = (
                HEALTHY_INTERVAL_S if not failures else RETRY_INTERVALS_S[min(failures, len(RETRY_INTERVALS_S)) - 1]
            )
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _look(self, path: str) -> Any:
        """What it says at once at `path`; any answer is one. Raises `CallFault`."""
        try:
            said = await self.upstream.get_json(path, QUICK_TIMEOUT_S)
        except CallFault as fault:
            if fault.kind not in _NO_ANSWER:
                self._answered()
                raise
            self._unanswered += 1
            unanswered_s = time.monotonic() - self._answered_at
            if self._unanswered >= UNANSWERED_LOOKS and unanswered_s >= self.spec.unanswered_s:
                self._give_up()
            raise
        self._answered()
        return said

    def _answered(self) -> None:
        self._answered_at, self._unanswered = time.monotonic(), 0

    def _give_up(self) -> None:
        """Ends the calls that nobody will answer: to a harness they look as if the model thought, until the agent's
        time is over."""
        for scope, call in list(self.waiting.items()):
            if call.heard_at <= self._answered_at and not scope.expired():
                call.given_up = True
                scope.reschedule(asyncio.get_running_loop().time())

    async def _examine(self) -> None:
        """Finds out what it is, samples one token to see what it gives, and says so in one line."""
        state = self.state
        facts = await self._ask_facts()
        self.engine = self.engine.configured(facts)
        self.features = self.engine.features()
        self._weights_route, self.gives_versions = self.engine.weights_path is not None, False
        if state.served and self.model not in state.served:
            text = f"{self.upstream.where} does not serve '{self.model}' (it serves {', '.join(state.served)})"
            raise CallFault(FaultKind.MISCONFIGURED, f"{text}: set inference.model in the topology")
        answer = await self._sampled(_hello(), None)
        state.gives_ids = bool(answer.prompt_ids) and all(choice.ids and choice.logprobs for choice in answer.choices)
        if state.gives_ids and self.features.streams_ids and not await self._streams_ids():
            self.features = replace(self.features, streams_ids=False)
        if state.gives_ids:
            state.logprobs_mode = await self._found_logprobs_mode(answer)
        state.problem = self._problem(answer)
        self.tokens_in = await self._opened_tokens_in()
        await self._meet_exactly()
        state.reachable = True
        words = self.in_words()
        if words != self._said:
            log.log(logging.WARNING if state.problem else logging.INFO, "%s", words)
            self._said = words

    def in_words(self) -> str:
        """What this server can give and what not, in one line."""
        state, features = self.state, self.features
        versions = features.versions_in_answer or self._weights_route
        exact = "on" if self.suffixes is not None else "off" if self._exact else "not wanted"
        parts = [
            f"{self.engine.name} {state.version or '(version unknown)'}",
            f"model {self.model}",
            f"context {state.max_context or 'unknown'} tokens",
            f"gives token ids: {'yes' if state.gives_ids else 'NO'}",
            f"streams them: {'yes' if features.streams_ids else 'no, answers are asked for whole'}",
            f"takes prompts as ids: {'yes' if features.token_in else 'no'}",
            f"goes on with cut calls: {'yes' if self.tokens_in is not None else 'no, they are sampled anew'}",
            f"says its policy version: {'yes' if versions else 'no'}",
            f"log-probabilities: {self.logprobs_mode({})}",
            f"exact mode: {exact}",
        ]
        return f"{self.upstream.where}: {', '.join(parts)}" + (f". {state.problem}" if state.problem else "")

    def logprobs_mode(self, body: Mapping[str, Any]) -> str:
        """What the log-probabilities of a request's answer mean."""
        said = self.engine.logprobs_mode(body)
        return self.state.logprobs_mode or said if said == "unknown" else said

    async def _found_logprobs_mode(self, hello: Answer) -> str:
        """Samples one token that a bias forces and that the model would not have chosen: a raw log-probability does
        not see the bias, one that is taken after it is nearly 0, and one above 0 is a logit. Blank: it does not show.
        """
        if self.engine.logprobs_mode({}) != "unknown" or not hello.prompt_ids:
            return ""
        forced = hello.prompt_ids[0]
        call = _hello()
        call.options["logit_bias"] = {str(forced): 100}
        try:
            [choice] = (await self._sampled(call, None)).choices
            value = choice.logprobs[0]["logprob"] if choice.logprobs and choice.ids == [forced] else None
        except (CallFault, ValueError, LookupError, TypeError):
            return ""  # a server that takes no bias says nothing about the rest
        if not isinstance(value, float):
            return ""
        return "logits" if value > _NEARLY_0 else "processed_logprobs" if value > -_NEARLY_0 else "raw_logprobs"

    async def _streams_ids(self) -> bool:
        """Samples one streamed token, to see whether its id and log-probability come too. Raises `CallFault`."""
        request = self.engine.request(_hello(), await self.ensure_model(), stream=True)
        gatherer = Gatherer(1)
        parser = SseParser(PROBE_EVENT_BYTES)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                async with self.upstream.post(request.path, encode(request.body), _PROBE_HEADERS) as response:
                    if response.status != 200 or not response.is_stream:
                        return False  # this version refuses to stream what polarq asks for
                    async for chunk in response.chunks():
                        for event in parser.feed(chunk):
                            gatherer.add(self.engine.read_event(event))
                        if gatherer.done:
                            break
        except TimeoutError:
            raise CallFault(FaultKind.TIMED_OUT, f"{self.upstream.where} streamed no token in time") from None
        except EventTooLarge as exc:
            raise CallFault(FaultKind.ENGINE_FAULT, f"{self.upstream.where}: {exc}") from exc
        answer = gatherer.answer()
        return bool(answer.prompt_ids) and all(choice.ids and choice.logprobs for choice in answer.choices)

    async def _opened_tokens_in(self) -> TokensIn | None:
        """Asks each route with nothing: where it is open it says what is missing. Raises `CallFault`."""
        tokens_in = self.engine.tokens_in() if self.features.token_in else None
        for route in tokens_in.routes if tokens_in is not None else ():
            try:
                async with asyncio.timeout(QUICK_TIMEOUT_S):
                    async with self.upstream.post(route, b"{}", _PROBE_HEADERS) as response:
                        await response.read()
            except TimeoutError:
                raise CallFault(FaultKind.TIMED_OUT, f"{self.upstream.where} did not answer {route}") from None
            if response.status not in _MISSING_SOMETHING:
                return None
        return tokens_in

    async def _meet_exactly(self) -> None:
        """Exact mode, if the node wants it and the engine can be trusted with it."""
        self.suffixes, self.exact_off = None, ""
        if not self._exact:
            return
        render = EngineRenderer(self)
        if self.state.gives_ids:
            self.exact_off = await check(render, self._sampled) or ""
        else:
            self.exact_off = "exact mode is off: the engine gives no token ids"
        if self.exact_off:
            log.warning("%s: %s", self.upstream.where, self.exact_off)
            return
        self.suffixes = Suffixes(
            render,
            known_bridge(self.spec.tokenizer, self.model),
            max_context=lambda: self.state.max_context,
            refuse_forged=self._refuse_forged,
        )

    def _problem(self, answer: Answer) -> str:
        if answer.model and answer.model != self.model:
            return f"asked for '{self.model}', it answered as '{answer.model}': nothing of it can be trained on"
        if not self.state.gives_ids:
            return "its answers hold no token ids or no log-probabilities, so nothing can be trained on: upgrade it"
        if self.state.logprobs_mode == "logits":
            return "it gives logits for log-probabilities: start it with --logprobs-mode raw_logprobs"
        return ""

    async def _ask_facts(self) -> EngineFacts:
        version = None
        if self.engine.version_path is not None:
            version = await self._look(self.engine.version_path)
        facts = self.engine.read_facts(version, await self._look(self.engine.models_path))
        self.state.version, self.state.served = facts.version, tuple(facts.models)
        self.state.max_context = facts.models.get(self.model)
        return facts

    async def _sampled(self, call: ModelCall, prompt_ids: list[int] | None) -> Answer:
        """An answer that belongs to no rollout. Raises `CallFault`."""
        request = self.engine.request(call, await self.ensure_model(), stream=False, prompt_ids=prompt_ids)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                async with self.upstream.post(request.path, encode(request.body), _PROBE_HEADERS) as response:
                    data = await response.read()
        except TimeoutError:
            raise CallFault(FaultKind.TIMED_OUT, f"{self.upstream.where} sampled no token in time") from None
        if response.status != 200:
            raise self.engine.fault(response.status, response.headers, data)
        return self.engine.read(data)

    async def _policy_version(self) -> str | None:
        path = self.engine.weights_path
        if path is None:
            return None
        try:
            data = await self.upstream.get_json(path, QUICK_TIMEOUT_S)
        except CallFault:
            return UNREAD
        version = self.engine.read_weights(data)
        self._weights_route = version is not None
        return version


def _hello() -> ModelCall:
    return ModelCall([{"role": "user", "content": "Hello."}], None, {"max_tokens": 1, "temperature": 1.0}, "")


class Fleet:
    """All endpoints of the node."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = list(endpoints)

    @classmethod
    def of(cls, node: Node, env: Mapping[str, str]) -> Fleet:
        """From the topology. `env` is where `api_key_env` looks. Raises `UnknownPlugin`."""
        return cls(
            [
                Endpoint(
                    spec,
                    plugin("engines", spec.engine)(),
                    env.get(spec.api_key_env) if spec.api_key_env else None,
                    node.model_served,
                    exact=node.proxy.context == "exact",
                    refuse_forged=node.proxy.refuse_forged,
                    processes=node.proxy.processes,
                )
                for spec in node.endpoints
            ]
        )

    async def start(self) -> None:
        for endpoint in self.endpoints:
            await endpoint.start()

    async def close(self) -> None:
        for endpoint in self.endpoints:
            await endpoint.close()

    def choose(self, current: Endpoint | None, tried: Collection[Endpoint] = ()) -> Endpoint:
        """A session stays where it is (its prefixes are cached there) while that server answers; else the least
        loaded one that does; else, when none does, the least loaded one. Those `tried` come last."""
        answering = current is not None and (current.state.reachable is not False or len(self.endpoints) == 1)
        if current is not None and answering and current not in tried:
            return current
        return min(
            self.endpoints,
            key=lambda endpoint: (endpoint in tried, endpoint.state.reachable is False, endpoint.load),
        )

    def models(self) -> dict[str, int | None]:
        """Model names that harnesses may see, with their context length."""
        return {endpoint.model: endpoint.state.max_context for endpoint in self.endpoints if endpoint.model}
