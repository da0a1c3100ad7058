"""Gemini: `models/M:generateContent`, `:streamGenerateContent` and `:countTokens`, under any of the API's paths.

Arguments of a function call that are no JSON object are shown as `{"__unparsed_arguments__": TEXT}`, because `args`
must be an object; given back, they are the text again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from polarq_proxy.call import Answer, ModelCall
from polarq_proxy.dialects.base import (
    Dialect,
    NativeRequest,
    Operation,
    Reply,
    ReplyHead,
    Route,
    ServedModel,
    StreamWriter,
    retry_headers,
)
from polarq_proxy.dialects.google_answer import GoogleArray, GoogleEvents, error_body, status_code, whole_body
from polarq_proxy.dialects.google_request import call_of
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import NotJson, decode, encode

_MODEL = r"(?:(?:.+?/)?(?:models|tunedModels|endpoints)/)?(?P<model>.+)"
"""`models/M`, `tunedModels/M`, `publishers/google/models/M`, `projects/P/locations/L/publishers/google/models/M`.
A client that takes a name with a slash in it for a whole resource name sends that name alone."""
_HEADERS = ("x-goog-api-key", "x-goog-api-client")
_OPERATION = re.compile(r"(?:^|/)(?:models|tunedModels|endpoints)/[^/].*:[A-Za-z]+$")


class GoogleGenerateDialect(Dialect):
    name: ClassVar[str] = "google_generate"
    routes: ClassVar[Sequence[Route]] = (
        Route("POST", _MODEL + r":(?P<method>generateContent|streamGenerateContent)", Operation.GENERATE),
        Route("POST", _MODEL + r":(?P<method>countTokens)", Operation.COUNT_TOKENS),
    )

    def claims(self, request: NativeRequest) -> bool:
        if any(request.headers.get(name) for name in _HEADERS) or _OPERATION.search(request.path):
            return True
        return any(part.startswith(("v1beta", "v1alpha")) for part in (request.version, *request.path.split("/")))

    def parse(self, request: NativeRequest, match: re.Match[str]) -> ModelCall:
        try:
            body = decode(request.body)
            return call_of(
                body,
                model=match["model"],
                stream=match["method"] == "streamGenerateContent",
                sse=request.query.get("alt") == "sse",
            )
        except NotJson as exc:
            raise CallFault(FaultKind.BAD_REQUEST, f"the request body is not JSON: {exc}") from None
        except RecursionError:
            raise CallFault(FaultKind.BAD_REQUEST, "the request body is nested too deeply") from None

    def render(self, call: ModelCall, answer: Answer, head: ReplyHead) -> Reply:
        return Reply(encode(whole_body(call, answer, head)))

    def writer(self, call: ModelCall, head: ReplyHead) -> StreamWriter:
        return GoogleEvents(call, head) if call.native.sse else GoogleArray(call, head)

    def fault(self, fault: CallFault) -> Reply:
        return Reply(encode(error_body(fault)), status_code(fault), retry_headers(fault))

    def counted(self, call: ModelCall, tokens: int) -> Reply:
        return Reply(encode({"totalTokens": tokens}))

    def models(self, models: Sequence[ServedModel]) -> Reply:
        return Reply(encode({"models": [_model(model) for model in models]}))

    def model(self, model: ServedModel) -> Reply:
        return Reply(encode(_model(model)))


def _model(model: ServedModel) -> dict[str, object]:
    shown: dict[str, object] = {
        "name": f"models/{model.name}",
        "version": "1",
        "displayName": model.name,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
    if model.max_context is not None:
        shown |= {"inputTokenLimit": model.max_context, "outputTokenLimit": model.max_context}
    return shown
