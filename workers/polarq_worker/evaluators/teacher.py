"""A teacher's log-probabilities of tokens that a student sampled, from an engine's scoring of prompts.

vLLM scores a prompt on `/v1/completions` with `prompt_logprobs`: an entry for each position, by token id, the first one
null. SGLang does on `/generate` with `return_logprob`: pairs of value and id from `logprob_start_len` on, the first one
without a value. Both are of the unscaled distribution, as a student's are at temperature 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarq.errors import EvaluatorFault
from polarq_worker.evaluators.asking import MAX_ANSWER_BYTES, Asking
from polarq_worker.evaluators.base import EngineAddress

BYTES_PER_ID = 512
"""What an answer may have for each id that it scores: vLLM writes about 100, with the id's text among them."""
MISSING = -9999.0
"""What vLLM writes for a probability of 0, and for one that it does not know."""


class TooLong(Exception):
    """The teacher's context does not hold the tokens; the text says how long they are."""


@dataclass(frozen=True)
class Message:
    """A user's message as ids, and what it stands in front of."""

    ids: list[int]
    opening: list[int]
    """What opens an answer, as the template writes it."""


class Teacher(ABC):
    """One engine, for one evaluation. Its methods raise `EvaluatorFault`."""

    def __init__(self, address: EngineAddress, ask: Asking) -> None:
        self._base = address.base_url.rstrip("/").removesuffix("/v1")
        self._ask = ask
        self._model = address.model
        self._context: int | None = None

    async def look(self) -> None:
        """Finds the model and how much it reads; called first."""
        listed = (await self._ask(f"{self._base}/v1/models")).get("data")
        items = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        served = {item["id"]: item.get("max_model_len") for item in items if isinstance(item.get("id"), str)}
        if not self._model and len(served) == 1:
            self._model = next(iter(served))
        if self._model not in served:
            wanted = f"not '{self._model}'" if self._model else "and none is named (teacher_model)"
            raise EvaluatorFault(f"the teacher's server serves {', '.join(served) or 'no model'}, {wanted}")
        context = served[self._model]
        self._context = context if isinstance(context, int) else None

    @property
    def model(self) -> str:
        return self._model

    async def message(self, text: str) -> Message:
        """The ids that a user's message adds to a conversation, by what the template makes of one with and without."""
        # The texts end differently, so that nothing of them counts to what follows.
        first = {"role": "user", "content": "1" if text.endswith("0") else "0"}
        without = await self._rendered([first])
        with_it = await self._rendered([first, {"role": "user", "content": text}])
        at = next((i for i, (a, b) in enumerate(zip(without, with_it, strict=False)) if a != b), len(without))
        added = len(with_it) - len(without)
        if added <= 0 or with_it[at + added :] != without[at:]:
            raise EvaluatorFault(
                "the teacher's template adds no message of a user's without changing what is beside it"
            )
        ids, opening = with_it[at : at + added], without[at:]
        if at and ids[-1] == without[at - 1]:
            # Both messages begin alike, and what they begin with is part of what opens the answer.
            ids, opening = [ids[-1], *ids[:-1]], [ids[-1], *opening]
        return Message(ids, opening)

    async def score(self, ids: Sequence[int], wanted: Sequence[int]) -> list[float]:
        """The log-probability of the id at each of the `wanted` positions (ascending, from 1 on) after all before it.
        Raises `TooLong`."""
        if self._context is not None and len(ids) >= self._context:
            raise TooLong(f"{len(ids)} tokens; the teacher reads {self._context}, and has to sample one more")
        found = await self._scored(ids, wanted[0])
        wrong = [at for at in wanted if not _is_known(found.get(at))]
        if wrong:
            raise EvaluatorFault(f"the teacher gave no log-probability for token {ids[wrong[0]]} at {wrong[0]}")
        return [found[at] for at in wanted]

    async def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        answer = await self._ask(f"{self._base}/tokenize", {"model": self._model, "messages": messages})
        ids = answer.get("tokens")
        if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
            raise EvaluatorFault("the teacher's server renders no messages (/tokenize; SGLang has it since 0.5.12)")
        return ids

    async def _answer(self, route: str, ids: Sequence[int], body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request that scores `ids`; it is as long as they are many."""
        return await self._ask(f"{self._base}{route}", body, most_bytes=MAX_ANSWER_BYTES + BYTES_PER_ID * len(ids))

    @abstractmethod
    async def _scored(self, ids: Sequence[int], first: int) -> dict[int, Any]:
        """position -> log-probability of the id there, for those from `first` on."""


class VllmTeacher(Teacher):
    async def _scored(self, ids: Sequence[int], first: int) -> dict[int, Any]:
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        choices = (await self._answer("/v1/completions", ids, body)).get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            choice = {}
        entries, read = choice.get("prompt_logprobs"), choice.get("prompt_token_ids")
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise EvaluatorFault("the teacher's server scores no prompts (prompt_logprobs of /v1/completions)")
        if read is not None and read != list(ids):
            raise EvaluatorFault("the teacher's server read other tokens than it was sent")
        return {at: _of(entries[at], ids[at]) for at in range(first, len(ids))}


class SglangTeacher(Teacher):
    async def _scored(self, ids: Sequence[int], first: int) -> dict[int, Any]:
        start = first - 1
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
        }
        meta = (await self._answer("/generate", ids, body)).get("meta_info")
        entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
        if not isinstance(entries, list) or len(entries) != len(ids) - start:
            raise EvaluatorFault("the teacher's server scores no prompts (input_token_logprobs of /generate)")
        if not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
            raise EvaluatorFault("the teacher's server gave entries of input_token_logprobs that are no pairs")
        # It writes 0 for the last id of the vocabulary.
        if any(entry[1] not in (token_id, 0) for entry, token_id in zip(entries, ids[start:], strict=True)):
            raise EvaluatorFault("the teacher's server read other tokens than it was sent")
        return {start + at: entry[0] for at, entry in enumerate(entries)}


TEACHERS: dict[str, type[Teacher]] = {"vllm": VllmTeacher, "sglang": SglangTeacher}


def with_message(prompt_ids: Sequence[int], message: Message) -> list[int]:
    """The prompt with the message before the answer that it opens. Raises `EvaluatorFault` where it opens none."""
    size = len(message.opening)
    for at in range(len(prompt_ids) - size, -1, -1):
        if list(prompt_ids[at : at + size]) == message.opening:
            return [*prompt_ids[:at], *message.ids, *prompt_ids[at:]]
    raise EvaluatorFault("a prompt opens no answer as the teacher's template does: is it the student's model?")


def _of(entry: Any, token_id: int) -> Any:
    found = entry.get(str(token_id)) if isinstance(entry, dict) else None
    return found.get("logprob") if isinstance(found, dict) else None


def _is_known(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > MISSING
