"""The other side of every comparison: a plain forward pass over token ids, in float32, with transformers.

It shares nothing with the server but the checkpoint on disk: no cache, no batching, no sampling, no kernels of vLLM's.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ReferenceModel:
    """The tiny model, run without any engine."""

    def __init__(self, model_dir: Path) -> None:
        with warnings.catch_warnings():
            # What these two warn about while they load is theirs, and tests turn warnings into errors.
            warnings.simplefilter("ignore")
            import torch
            import transformers

            transformers.utils.logging.disable_progress_bar()
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._torch: Any = torch
        self._model: Any = model.eval()
        self.end_ids: list[int] = json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"]
        """Every id that ends an answer, the end of a turn first."""

    @property
    def end_of_turn_id(self) -> int:
        return self.end_ids[0]

    def log_probs(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> list[float]:
        """The log-probability (natural logarithm, temperature 1) of each sampled id after everything before it."""
        rows = self.distributions(prompt_ids, sampled_ids)
        return [float(row[token_id]) for row, token_id in zip(rows, sampled_ids, strict=True)]

    def distributions(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Any:
        """A float32 tensor [len(sampled_ids), vocabulary]: log-softmax at each position that predicts a sampled id."""
        ids = self._torch.tensor([[*prompt_ids, *sampled_ids]])
        with self._torch.inference_mode():
            logits = self._model(ids, use_cache=False).logits[0].float()
        return logits[len(prompt_ids) - 1 : -1].log_softmax(-1)


class Forward:
    """Log-probabilities held against a forward pass, as far as there is a model to run it with."""

    def __init__(self, model: ReferenceModel | None, tolerance: float) -> None:
        self._model = model
        self.tolerance = tolerance
        self.left_out = 0

    @property
    def end_ids(self) -> list[int] | None:
        """Every id that ends an answer; None: not known."""
        return None if self._model is None else self._model.end_ids

    def difference(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], logprobs: Sequence[float | None]
    ) -> float:
        """The largest one; 0 without a model."""
        if self._model is None:
            self.left_out += 1
            return 0.0
        return largest_difference(logprobs, self._model.log_probs(prompt_ids, sampled_ids))


def largest_difference(left: Sequence[float | None], right: Sequence[float]) -> float:
    """Largest absolute difference, position by position; a missing value or another length is an error."""
    if not right:
        raise ValueError("nothing to compare")
    if None in left:
        raise ValueError("a log-probability is missing")
    return max(abs(a - b) for a, b in zip(left, right, strict=True) if a is not None)
