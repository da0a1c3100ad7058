"""Sampling that is no sampling: a scripted text's ids, each with a log-probability that anybody can recompute.

The log-probability of an id depends, like a real model's, on the ids before it and on nothing else. So a trainer's
test can check a whole merged trace with `expected_logprob(ids, position, ids[position])`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from polarq.testing.inference.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "abort"]
LOWEST_LOGPROB = -12.0


def expected_logprob(ids: Sequence[int], position: int, token_id: int) -> float:
    """The log-probability the server gives `token_id` at index `position`, after `ids[:position]`.

    `ids` is the prompt followed by what was sampled; the first sampled id stands at `position == len(prompt_ids)`.
    Always negative, and exactly representable as float32.
    """
    return _logprob(_context(ids[:position]), token_id)


def expected_logprobs(prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> list[float]:
    """`expected_logprob` of every sampled id, in one pass."""
    context = _context(prompt_ids)
    values = []
    for token_id in sampled_ids:
        values.append(_logprob(context, token_id))
        context.update(_packed((token_id,)))
    return values


def top_logprobs(before: Sequence[int], token_id: int, count: int, vocabulary_size: int) -> list[tuple[int, float]]:
    """`count` (id, log-probability) pairs after the ids `before`, the sampled id first and then others, as in vLLM."""
    if count < 1:
        return []
    context = _context(before)
    start = int.from_bytes(context.digest()[:4], "little")
    others = {(start + 1009 * step) % vocabulary_size for step in range(count + 1)} - {token_id}
    ranked = sorted(((other, _logprob(context, other)) for other in others), key=lambda pair: (-pair[1], pair[0]))
    return [(token_id, _logprob(context, token_id)), *ranked][:count]


def _packed(ids: Iterable[int]) -> bytes:
    values = tuple(ids)
    return struct.pack(f"<{len(values)}i", *values)


def _context(ids: Iterable[int]) -> hashlib.blake2b:
    return hashlib.blake2b(_packed(ids), digest_size=16)


def _logprob(context: hashlib.blake2b, token_id: int) -> float:
    after = context.copy()
    after.update(b"?" + _packed((token_id,)))
    share = (int.from_bytes(after.digest()[:8], "little") + 1) / 2**64
    value: float = struct.unpack("<f", struct.pack("<f", LOWEST_LOGPROB * share**3 - 1e-6))[0]
    return value


@dataclass(frozen=True)
class Limits:
    """What ends a sample early. `stop_token_ids` are beyond the end-of-turn id, which always ends it."""

    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False


@dataclass(frozen=True)
class Sample:
    """One sampled answer: ids, their log-probabilities, the text each id adds, and why it ended.

    `token_texts` are the ids' texts as log-probability entries show them; `pieces` are what the reader of the
    answer sees of them: no special token, nothing from a stop string on. All four have the same length.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    token_texts: tuple[str, ...]
    pieces: tuple[str, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def cut(self, count: int, reason: FinishReason) -> Sample:
        """The first `count` tokens, ended for `reason`."""
        if count >= len(self.token_ids) and reason == self.finish_reason:
            return self
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            token_texts=self.token_texts[:count],
            pieces=self.pieces[:count],
            finish_reason=reason,
            stop_reason=None,
        )


def sample(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], text: str, limits: Limits, *, drift_seed: int | None = None
) -> Sample:
    """What the model samples when it says `text` after `prompt_ids`: the text's ids and the end-of-turn id."""
    ids = tokenizer.encode(text) if drift_seed is None else tokenizer.encode_drifted(text, drift_seed)
    ids.append(tokenizer.turn_end_id)
    texts = tokenizer.pieces(ids)
    pieces = ["" if token_id in tokenizer.special_ids else piece for token_id, piece in zip(ids, texts, strict=True)]
    count, reason, stop_reason = _end(ids, pieces, limits, tokenizer.turn_end_id)
    return Sample(
        token_ids=tuple(ids[:count]),
        logprobs=tuple(expected_logprobs(prompt_ids, ids[:count])),
        token_texts=tuple(texts[:count]),
        pieces=tuple(_seen(pieces[:count], stop_reason, include_stop=limits.include_stop)),
        finish_reason=reason,
        stop_reason=stop_reason,
    )


def _end(
    ids: Sequence[int], pieces: Sequence[str], limits: Limits, turn_end_id: int
) -> tuple[int, FinishReason, str | int | None]:
    """(number of tokens, finish reason, stop reason). A stop string ends with the token that completes it."""
    text = ""
    longest = max(map(len, limits.stop), default=0)
    for count, (token_id, piece) in enumerate(zip(ids, pieces, strict=True), start=1):
        if token_id == turn_end_id:
            return count, "stop", None
        if token_id in limits.stop_token_ids:
            return count, "stop", token_id
        text += piece
        window = text[-(longest + len(piece)) :]
        found = [(window.find(stop), stop) for stop in limits.stop if stop in window]
        if found:
            return count, "stop", min(found)[1]
        if count >= limits.max_tokens:
            return count, "length", None
    raise AssertionError("a sample always holds the end-of-turn id")


def _seen(pieces: list[str], stop_reason: str | int | None, *, include_stop: bool) -> list[str]:
    """The pieces without what follows (or makes up) the stop; a stop token is never shown."""
    if isinstance(stop_reason, int):
        return [*pieces[:-1], ""]
    if stop_reason is None:
        return pieces
    text = "".join(pieces)
    end = text.index(stop_reason) + (len(stop_reason) if include_stop else 0)
    seen = []
    for piece in pieces:
        seen.append(piece[:end])
        end -= len(seen[-1])
    return seen
