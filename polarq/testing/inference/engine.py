"""The scripted engine: turns a request into prompt ids, samples and running generations."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from polarq.testing.inference import faults
from polarq.testing.inference.acting import ApiError
from polarq.testing.inference.calls import CallLedger, SampledCall
from polarq.testing.inference.generation import Gate, Generation
from polarq.testing.inference.images import expanded, images_of
from polarq.testing.inference.options import ServerOptions
from polarq.testing.inference.rendering import CannotRender, render
from polarq.testing.inference.requests import ChatRequest, SamplingRequest, TokenizeRequest
from polarq.testing.inference.sampling import Limits, sample
from polarq.testing.inference.selection import NoSuchScript, Selected, Selector, session_of
from polarq.testing.inference.tokenizer import load_tokenizer

START_TOKEN = "<|endoftext|>"
"""What a template with a start token begins with, and what the tokenizer puts before plain text."""
LARGE_CHARS = 64 * 1024
"""Longer texts are encoded in a thread, so that the server goes on answering others."""


@dataclass(frozen=True)
class Asker:
    """Who asks: the request's id, its session, the script that the model's name chooses, and what tells two requests
    apart."""

    request_id: str
    session_id: str | None
    suffix: str | None
    digest: str = ""
    user: str | None = None
    images: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """The state behind one server."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.tokenizer = load_tokenizer()
        self.selector = Selector(options.scenario)
        self.ledger = CallLedger(options.ledger_limit)
        self.gate = Gate()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._drift_seed = options.scenario.drift_seed if options.drift_seed is None else options.drift_seed

    # Asking

    def authorise(self, headers: Mapping[str, str]) -> None:
        """Raises `ApiError` when there is a key and this is not it."""
        key = self.options.api_key
        given = headers.get("Authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "Unauthorized", "AuthenticationError")

    async def asker(self, request: web.Request, body: SamplingRequest, prefix: str) -> Asker:
        """Raises `ApiError` for a model that is not served; SGLang takes any name."""
        name, _, suffix = (body.model or self.options.served_model_name).partition(":")
        served = self.options.served_model_name
        if name != served and self.options.engine == "vllm":
            message = f"The model `{body.model}` does not exist. Valid aliases: {served}."
            raise ApiError(404, message, "NotFoundError", "model")
        request_id = f"{prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex[:16]}"
        digest = hashlib.sha256(await request.read()).hexdigest()
        images = images_of(body.messages) if isinstance(body, ChatRequest) else ()
        session = session_of(request.headers, body.session_id)
        return Asker(request_id, session, suffix or None, digest, body.user, images, body.sampling)

    async def admit(self) -> None:
        """While the engine is paused, new requests queue (`keep`) or are refused, as vLLM 0.33 does it."""
        if self.gate.paused in ("abort", "wait"):
            raise ApiError(503, "The engine is paused; try again after it is resumed.", "ServiceUnavailableError")
        await self.gate.frozen()

    # Prompts

    async def prompt_of(self, body: ChatRequest) -> tuple[list[int], str | None]:
        """(prompt ids, rendered text). Raises `ApiError`."""
        side_door = body.kv_transfer_params.prompt_token_ids if body.kv_transfer_params else None
        if side_door is not None and self.options.token_in and self.options.since(0, 27):
            return self.checked(side_door), None
        text = self.rendered(body)
        if self.tokenizer.fewest(text) >= self.options.max_model_len:
            raise self._prompt_too_long()
        return await self.prompt_ids(text), text

    def rendered(self, body: ChatRequest | TokenizeRequest) -> str:
        if body.add_generation_prompt and body.continue_final_message:
            message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            raise ApiError(400, message, "BadRequestError")
        if not body.messages:
            raise ApiError(400, "at least one message is needed", "BadRequestError", "messages")
        try:
            text = render(
                body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                keep_thinking=self.options.keep_thinking,
                template_kwargs=body.chat_template_kwargs,
            )
        except CannotRender as exc:
            raise ApiError(400, str(exc), "BadRequestError", "messages") from None
        return START_TOKEN + text if self.options.start_token else text

    async def prompt_ids(self, text: str) -> list[int]:
        """What the model is given of a rendered text."""
        return expanded(await self.encoded(text), self.tokenizer.image_token_id)

    async def encoded_plain(self, text: str) -> list[int]:
        """The ids of a text that no template wrote: the tokenizer adds its start token, whatever the text holds."""
        return await self.encoded(START_TOKEN + text if self.options.start_token else text)

    async def encoded(self, text: str) -> list[int]:
        try:
            if len(text) < LARGE_CHARS:
                return self.tokenizer.encode(text)
            return await asyncio.to_thread(self.tokenizer.encode_aside, text)
        except UnicodeEncodeError as exc:
            raise ApiError(400, f"the prompt is not valid Unicode text: {exc}", "BadRequestError") from None

    def checked(self, ids: Sequence[Any]) -> list[int]:
        if not ids or not all(self.tokenizer.contains(token_id) for token_id in ids):
            top = self.tokenizer.vocabulary_size - 1
            raise ApiError(400, f"token ids must be whole numbers from 0 to {top}, at least one", "BadRequestError")
        return list(ids)

    def room(self, prompt_ids: Sequence[int], wanted: int | None) -> int:
        """How many tokens may be sampled. Raises `ApiError` where vLLM refuses instead of clamping."""
        limit, used = self.options.max_model_len, len(prompt_ids)
        if wanted is not None and wanted > limit:
            message = (
                f"max_tokens={wanted} cannot be greater than max_model_len={limit}. Please request fewer output "
                f"tokens. (parameter=max_tokens, value={wanted})"
            )
            raise ApiError(400, message, "BadRequestError", "max_tokens")
        if used >= limit:
            raise self._prompt_too_long()
        if wanted is not None and used + wanted > limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested {wanted} output "
                f"tokens and your prompt contains at least {used} input tokens, for a total of at least "
                f"{used + wanted} tokens. Please reduce the length of the input prompt or the number of requested "
                f"output tokens. (parameter=input_tokens, value={used})"
            )
            raise ApiError(400, message, "BadRequestError", "input_tokens")
        return wanted if wanted is not None else limit - used

    def _prompt_too_long(self) -> ApiError:
        """vLLM stops counting one past its limit."""
        limit = self.options.max_model_len
        message = (
            f"This model's maximum context length is {limit} tokens. However, your prompt contains at least "
            f"{limit + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
            f"length of the input prompt. (parameter=input_tokens, value={limit + 1})"
        )
        return ApiError(400, message, "BadRequestError", "input_tokens")

    # Sampling

    def selected(self, asker: Asker, messages: Sequence[Mapping[str, Any]], choice: int) -> Selected:
        try:
            return self.selector.select(messages, suffix=asker.suffix, session_id=asker.session_id, choice=choice)
        except NoSuchScript as exc:
            raise ApiError(400, str(exc), "BadRequestError") from None

    def selected_for_ids(self, asker: Asker, prompt_ids: Sequence[int], choice: int) -> Selected:
        """The turn for a prompt that is no list of messages."""
        try:
            return self.selector.select_for_prompt(
                self.tokenizer.decode(prompt_ids),
                _earlier_answers(self.tokenizer.assistant_opening, list(prompt_ids)),
                suffix=asker.suffix,
                session_id=asker.session_id,
                choice=choice,
            )
        except NoSuchScript as exc:
            raise ApiError(400, str(exc), "BadRequestError") from None

    def prompt_logprobs(self, body: SamplingRequest) -> int | None:
        """How many to give for each id of the prompt. Raises `ApiError`."""
        if body.prompt_logprobs and body.stream:
            message = "`prompt_logprobs` are not available when `stream=True`."
            raise ApiError(400, message, "BadRequestError", "prompt_logprobs")
        return body.prompt_logprobs

    def limits(self, body: SamplingRequest, max_tokens: int) -> Limits:
        return Limits(
            max_tokens=max_tokens,
            stop=body.stops,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            include_stop=body.include_stop_str_in_output,
        )

    def start(
        self,
        asker: Asker,
        selected: Selected,
        prompt_ids: Sequence[int],
        limits: Limits,
        *,
        choice: int,
        thinking: bool = True,
        fault: faults.Fault | None = None,
    ) -> Generation:
        """Begins one choice; it is in the ledger from now on and must be closed."""
        text = selected.text(thinking=thinking)
        chosen = sample(self.tokenizer, prompt_ids, text, limits, drift_seed=self._drift_seed)
        if isinstance(fault, faults.Abort):
            chosen = chosen.cut(fault.after_tokens, "abort")
        call = SampledCall(
            request_id=asker.request_id,
            choice_index=choice,
            session_id=asker.session_id,
            conversation=selected.conversation,
            script=selected.script.name,
            turn_index=selected.turn_index,
            prompt_ids=tuple(prompt_ids),
            request_digest=asker.digest,
            user=asker.user,
            images=asker.images,
            sampling=dict(asker.sampling),
        )
        self.prompt_tokens += len(prompt_ids)
        delay_s, rate = self._pace(selected)
        return Generation(self.gate, self.ledger, call, chosen, delay_s=delay_s, tokens_per_s=rate)

    def _pace(self, selected: Selected) -> tuple[float, float | None]:
        """The most specific pace that anybody gives: turn, script, scenario, server."""
        turn, script, scenario = selected.turn, selected.script, self.options.scenario
        delays = (turn.delay_s, script.delay_s, scenario.delay_s)
        rates = (turn.tokens_per_s, script.tokens_per_s, scenario.tokens_per_s, self.options.tokens_per_s)
        delay_s = next(delay for delay in delays if delay is not None)
        return delay_s, next((rate for rate in rates if rate is not None), None)

    @contextmanager
    def answering(self, generations: Sequence[Generation]) -> Iterator[None]:
        """Ends the records of a request's choices, whatever happens to it; the list may still grow inside."""
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            self._close(generations, delivered=False, hung_up=True)
            raise
        except BaseException:
            self._close(generations, delivered=False)
            raise
        self._close(generations, delivered=True)

    def _close(self, generations: Sequence[Generation], *, delivered: bool, hung_up: bool = False) -> None:
        for generation in generations:
            generation.close()
            generation.call.hung_up = hung_up
            generation.call.delivered = delivered and generation.call.finish_reason is not None
            self.generation_tokens += generation.count
        self.ledger.changed()


def _earlier_answers(opening: list[int], prompt_ids: list[int]) -> int:
    """How many assistant turns of the chat template the prompt holds, the one being opened not counted."""
    size = len(opening)
    found = sum(
        prompt_ids[at] == opening[0] and prompt_ids[at : at + size] == opening
        for at in range(len(prompt_ids) - size + 1)
    )
    return found - (prompt_ids[-size:] == opening)


ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)
