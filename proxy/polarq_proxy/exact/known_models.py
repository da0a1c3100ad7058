"""Rendering by the `renderers` package, where it is installed and knows the model by heart.

Its bridge writes the new messages in the model's own form without asking the engine. What it writes is compared with
the engine's rendering like everything else (see `suffix`), so that a tokenizer or template that is not the server's
shows. Needs `polarq[renderers]`, and `transformers` where the tokenizer is loaded by name.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from polarq.errors import PolarqError
from polarq_proxy.exact.base import CannotContinue, Extension, Missed, rendering_options
from polarq_proxy.exact.meaning import tree_digest
from polarq_proxy.exact.template import remember

log = logging.getLogger("polarq.proxy")


class ModelNotKnown(PolarqError):
    """The package is missing, cannot load the tokenizer, or does not know the model."""


class KnownModelBridge:
    """For one model; shared by all sessions. `tokenizer` is what the package's own loader gives, or anything with its
    `encode`, `decode`, `convert_tokens_to_ids` and end ids, whose `name_or_path` is a model's public name."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._renderers: dict[bytes, Any] = {}
        self._renderer({})

    @classmethod
    def load(cls, tokenizer: str, model: str = "") -> KnownModelBridge:
        """`tokenizer`: a folder or a public name; `model`: the public name, where the folder does not tell it.

        Raises `ModelNotKnown` with one line.
        """
        base = _package("renderers.base")
        try:
            loaded = base.load_tokenizer(tokenizer)
        except Exception as exc:  # whatever a tokenizer's files can make a loader raise
            raise ModelNotKnown(f"the tokenizer '{tokenizer}' cannot be loaded: {_line(exc)}") from exc
        if model and getattr(loaded, "name_or_path", "") not in base.MODEL_RENDERER_MAP:
            loaded.name_or_path = model
        return cls(loaded)

    async def suffix(self, extension: Extension) -> list[int]:
        call, ended = extension.call, extension.ended
        try:
            renderer = self._renderer(rendering_options(call))
            rendered = renderer.bridge_to_next_turn(
                ended.prompt_ids, ended.sampled_ids, list(extension.new), tools=call.tools
            )
        except ModelNotKnown as exc:
            raise CannotContinue(Missed.OPTIONS_DIFFER, str(exc)) from exc
        except Exception as exc:  # another package's code, on messages that no schema bounds
            log.debug("the known renderer failed", exc_info=True)
            raise CannotContinue(Missed.NOT_PROVEN, f"the known renderer failed: {_line(exc)}") from exc
        if rendered is None:
            raise CannotContinue(Missed.NOT_PROVEN, "the known renderer cannot bridge")
        ids = [int(token_id) for token_id in getattr(rendered, "token_ids", rendered)]
        start = [*ended.prompt_ids, *ended.sampled_ids]
        if ids[: len(start)] != start:
            raise CannotContinue(Missed.NOT_PROVEN, "the known renderer rewrites what was sampled")
        return ids[len(start) :]

    def _renderer(self, options: Mapping[str, Any]) -> Any:
        """One for each set of template options. Raises `ModelNotKnown`."""
        options = dict(options)
        key = tree_digest(options)
        if key not in self._renderers:
            remember(self._renderers, key, self._created(options))
        return self._renderers[key]

    def _created(self, options: dict[str, Any]) -> Any:
        kwargs = options.pop("chat_template_kwargs", None)
        if options:
            raise ModelNotKnown(f"the known renderer has no option {', '.join(sorted(options))}")
        base, configs = _package("renderers.base"), _package("renderers.configs")
        name = getattr(self._tokenizer, "name_or_path", "?")
        try:
            # Sampled thinking is never taken out again, whatever comes after it. This is also what makes the package
            # refuse a model that it does not know, instead of going by the tokenizer's template.
            config = configs.AutoRendererConfig(thinking_retention="all")
            return base.create_renderer(self._tokenizer, config, chat_template_kwargs=kwargs)
        except Exception as exc:  # unknown models and refused options come as several kinds
            raise ModelNotKnown(f"renderers does not know the model '{name}': {_line(exc)}") from exc


def known_bridge(tokenizer: str | None, model: str = "") -> KnownModelBridge | None:
    """The bridge for a node's `inference.tokenizer`; None, with one line in the log, where the generic way is used."""
    if not tokenizer:
        return None
    try:
        return KnownModelBridge.load(tokenizer, model)
    except ModelNotKnown as exc:
        log.warning("exact mode goes by the engine's template: %s", exc)
        return None


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ModelNotKnown(f"{exc} (pip install 'polarq[renderers]')") from exc


def _line(exc: BaseException) -> str:
    text = str(exc).strip()
    return text.splitlines()[0][:300] if text else type(exc).__name__
