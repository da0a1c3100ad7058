"""A package registry of the test's own on this machine's loopback: for npm and for pip, with a login."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "npm-login-4711"
PASSWORD = "pip-login-4712"
PROGRAM = "#!/usr/bin/env node\nconsole.log('pocket {version}', process.argv.slice(2).join(' '))\n"
MODULE = "import sys\n\ndef main():\n    print('pocket', *sys.argv[1:])\n"


@contextmanager
def registry(*versions: str) -> Iterator[int]:
    """Serves package `pocket-agent` with a program `pocket`; its port. npm: /npm/, pip: /simple/."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            port, path = int(self.connection.getsockname()[1]), self.path
            given = self.headers.get("Authorization", "")
            if path.startswith("/npm/"):
                body = None if given != f"Bearer {TOKEN}" else _npm(path.removeprefix("/npm/"), versions, port)
            else:
                login = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
                body = None if given != f"Basic {login}" else _pip(path, versions)
            self.send_response(401 if body is None else 200)
            self.send_header("Content-Type", "application/json" if path.startswith("/npm/") else "text/html")
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _npm(path: str, versions: tuple[str, ...], port: int) -> bytes:
    if path.endswith(".tgz"):
        return _tarball(path.removesuffix(".tgz").rpartition("-")[2])
    told = {}
    for version in versions:
        data = _tarball(version)
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
        address = f"http://127.0.0.1:{port}/npm/pocket-agent/-/pocket-agent-{version}.tgz"
        told[version] = {
            **_package(version),
            "dist": {"tarball": address, "integrity": integrity},
        }
    return json.dumps({"name": "pocket-agent", "dist-tags": {"latest": versions[-1]}, "versions": told}).encode()


def _package(version: str) -> dict[str, object]:
    return {"name": "pocket-agent", "version": version, "bin": {"pocket": "pocket.js"}}


def _tarball(version: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=0) as tar:
        files = {"package.json": json.dumps(_package(version)), "pocket.js": PROGRAM.replace("{version}", version)}
        for name, text in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size, info.mode = len(text.encode()), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    # The header of gzip has the time in it, and what was promised must be what is served.
    whole = bytearray(out.getvalue())
    whole[4:8] = b"\0\0\0\0"
    return bytes(whole)


def _pip(path: str, versions: tuple[str, ...]) -> bytes | None:
    if path.rstrip("/") == "/simple/pocket-agent":
        return "".join(f'<a href="/files/{_wheel_name(one)}">{_wheel_name(one)}</a>' for one in versions).encode()
    if path.startswith("/files/"):
        return _wheel(path.split("-")[1])
    return None


def _wheel_name(version: str) -> str:
    return f"pocket_agent-{version}-py3-none-any.whl"


def _wheel(version: str) -> bytes:
    folder, out = f"pocket_agent-{version}.dist-info", io.BytesIO()
    files = {
        "pocket_agent.py": MODULE,
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: pocket-agent\nVersion: {version}\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{folder}/entry_points.txt": "[console_scripts]\npocket = pocket_agent:main\n",
        f"{folder}/RECORD": "",
    }
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()
