"""A registry with one image, as far as a daemon needs it to pull that. On loopback, where no TLS is asked for."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
from collections import Counter
from typing import Any, Self

from aiohttp import web

NAME = "team/small"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
CONFIG = "application/vnd.docker.container.image.v1+json"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Registry:
    """`login`: user:password that it asks for. `gate`: what layers wait for."""

    def __init__(self, tree: bytes, *, login: str = "", gate: asyncio.Event | None = None) -> None:
        self.asked: Counter[str] = Counter()
        self._login = login
        self._gate = gate
        layer = gzip.compress(tree, 1)
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Env": ["PATH=/bin", "OF_IMAGE=1"]},
                "rootfs": {"type": "layers", "diff_ids": [digest(tree)]},
                # Nobody else's image has the same digest.
                "created": "2026-01-01T00:00:00Z",
                "author": hashlib.sha256(str(id(self)).encode()).hexdigest(),
            }
        ).encode()
        self.layer = digest(layer)
        self._blobs = {digest(config): config, self.layer: layer}
        parts: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "size": len(config), "digest": digest(config)},
            "layers": [{"mediaType": LAYER, "size": len(layer), "digest": self.layer}],
        }
        self._manifest = json.dumps(parts).encode()
        self.digest = digest(self._manifest)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/v2/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.host = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._gate is not None:
            self._gate.set()
        await self._runner.cleanup()

    def image(self, tag: str = "1") -> str:
        return f"{self.host}/{NAME}:{tag}"

    async def _serve(self, request: web.Request) -> web.Response:
        tail = request.match_info["tail"]
        expected = f"Basic {base64.b64encode(self._login.encode()).decode()}"
        if self._login and request.headers.get("Authorization") != expected:
            return self._error(401, "UNAUTHORIZED", {"WWW-Authenticate": 'Basic realm="test"'})
        if not tail:
            return web.json_response({})
        name, _, wanted = tail.rpartition("/")
        # Newer daemons look a tag up with HEAD, and get its manifest by digest.
        if request.method == "GET" or wanted == "1":
            self.asked[wanted] += 1
        if name == f"{NAME}/manifests" and wanted in {"1", self.digest}:
            headers = {"Docker-Content-Digest": self.digest}
            return web.Response(body=self._manifest, content_type=MANIFEST, headers=headers)
        if name == f"{NAME}/blobs" and wanted in self._blobs:
            if self._gate is not None and wanted == self.layer:
                await self._gate.wait()
            return web.Response(body=self._blobs[wanted], content_type="application/octet-stream")
        return self._error(404, "MANIFEST_UNKNOWN", {})

    def _error(self, status: int, code: str, headers: dict[str, str]) -> web.Response:
        return web.json_response({"errors": [{"code": code, "message": code.lower()}]}, status=status, headers=headers)
