"""The scripted engine: turns a request into prompt ids, samples and running generations."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from polarq.testing.inference import faults
from polarq.testing.inference.acting import ApiError
from polarq.testing.inference.calls import CallLedger, SampledCall
from polarq.testing.inference.generation import Gate, Generation
from polarq.testing.inference.options import ServerOptions
from polarq.testing.inference.rendering import CannotRender, render
from polarq.testing.inference.requests import ChatRequest, SamplingRequest, TokenizeRequest
from polarq.testing.inference.sampling import Limits, sample
from polarq.testing.inference.selection import NoSuchScript, Selected, Selector, session_of
from polarq.testing.inference.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Asker:
    """Who asks: the request's id, its session, and the script that the model's name chooses."""

    request_id: str
    session_id: str | None
    suffix: str | None


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
        """As in vLLM the key guards /v1 only. Raises `ApiError`."""
        key = self.options.api_key
        given = headers.get("Authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "Unauthorized", "AuthenticationError")

    def asker(self, request: web.Request, body: SamplingRequest, prefix: str) -> Asker:
        """Raises `ApiError` for a model that is not served."""
        name, _, suffix = (body.model or self.options.served_model_name).partition(":")
        served = self.options.served_model_name
        if name != served:
            message = f"The model `{body.model}` does not exist. Valid aliases: {served}."
            raise ApiError(404, message, "NotFoundError", "model")
        request_id = f"{prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex[:16]}"
        return Asker(request_id, session_of(request.headers, body.session_id), suffix or None)

    async def admit(self) -> None:
        """While the engine is paused, new requests queue (`keep`) or are refused, as vLLM 0.33 does it."""
        if self.gate.paused in ("abort", "wait"):
            raise ApiError(503, "The engine is paused; try again after it is resumed.", "ServiceUnavailableError")
        await self.gate.frozen()

    # Prompts

    def prompt_of(self, body: ChatRequest) -> tuple[list[int], str | None]:
        """(prompt ids, rendered text). Raises `ApiError`."""
        side_door = body.kv_transfer_params.prompt_token_ids if body.kv_transfer_params else None
        if side_door is not None and self.options.token_in:
            return self.checked(side_door), None
        text = self.rendered(body)
        return self.encoded(text), text

    def rendered(self, body: ChatRequest | TokenizeRequest) -> str:
        if body.add_generation_prompt and body.continue_final_message:
            message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            raise ApiError(400, message, "BadRequestError")
        if not body.messages:
            raise ApiError(400, "at least one message is needed", "BadRequestError", "messages")
        try:
            return render(
                body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                keep_thinking=self.options.keep_thinking,
                template_kwargs=body.chat_template_kwargs,
            )
        except CannotRender as exc:
            raise ApiError(400, str(exc), "BadRequestError", "messages") from None

    def encoded(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
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
        start = f"This model's maximum context length is {limit} tokens. However, "
        if used >= limit:
            message = (
                f"{start}your prompt contains at least {limit + 1} input tokens, which exceeds this limit even "
                "without any output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={limit + 1})"
            )
            raise ApiError(400, message, "BadRequestError", "input_tokens")
        if wanted is not None and used + wanted > limit:
            message = (
                f"{start}you requested {wanted} output tokens and your prompt contains at least {used} input tokens, "
                f"for a total of at least {used + wanted} tokens. Please reduce the length of the input prompt or "
                f"the number of requested output tokens. (parameter=input_tokens, value={used})"
            )
            raise ApiError(400, message, "BadRequestError", "input_tokens")
        return wanted if wanted is not None else limit - used

    # Sampling

    def selected(self, asker: Asker, messages: Sequence[Mapping[str, Any]], choice: int) -> Selected:
        try:
            return self.selector.select(messages, suffix=asker.suffix, session_id=asker.session_id, choice=choice)
        except NoSuchScript as exc:
            raise ApiError(400, str(exc), "BadRequestError") from None

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
        text = selected.turn.text(thinking=thinking)
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

    def close(self, generations: Sequence[Generation], *, delivered: bool) -> None:
        """Ends the records of a request's choices, whatever happened to it."""
        for generation in generations:
            generation.close()
            generation.call.delivered = delivered and generation.call.finish_reason is not None
            self.generation_tokens += generation.count
        self.ledger.changed()


ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)
