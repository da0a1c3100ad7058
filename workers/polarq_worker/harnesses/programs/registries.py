"""The worker's own settings of package registries, lent to a sandbox while a harness's program is installed in it.

What npm, pip and uv are told on this machine (their variables and files: addresses, logins, certificates, proxies)
holds for installing too. Files of it lie in the sandbox only meanwhile: they are in no snapshot, and no agent sees
them.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from polarq.contracts.sandbox import ExecCategory
from polarq.errors import RuntimeFault
from polarq_worker.runtimes.base import SCRATCH_DIR, Runtime

CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "CURL_CA_BUNDLE")
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
_REMOVE_S = 60.0
_NPM = re.compile(
    r"registry|@[^:/]+:registry|//.+:(_authToken|_auth|username|_password|email|always-auth)"
    r"|strict-ssl|proxy|https-proxy|noproxy|ca|fetch-.*|maxsockets|_auth|_authToken"
)
"""Settings of npm that say where packages come from; others name folders of this machine, or are taste."""
_PIP = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "retries", "no-index")
_UV = re.compile(
    r"UV_(INDEX|DEFAULT_INDEX|INDEX_URL|EXTRA_INDEX_URL|INSECURE_HOST|NATIVE_TLS|SYSTEM_CERTS|HTTP_TIMEOUT"
    r"|PYTHON_INSTALL_MIRROR|PYPY_INSTALL_MIRROR|INDEX_\w+_(USERNAME|PASSWORD))"
)
_VARIABLE = re.compile(r"\$\{([^}]+)\}")


@dataclass(frozen=True)
class Registries:
    """`env` as it is; `files` by name, and the variables that say where each of them lies."""

    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    named_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, env: Mapping[str, str], home: Path) -> Registries:
        """Those of a process with this environment. Blocks; what cannot be read is left out."""
        npm, cafile = _npm(env, home)
        pip = _pip(env, home)
        values = {name: env[name] for name in PROXY_VARIABLES if env.get(name)}
        values |= {f"PIP_{key.replace('-', '_').upper()}": value for key, value in pip.items()}
        values |= _uv(env, pip)
        files: dict[str, bytes] = {}
        named: dict[str, tuple[str, ...]] = {}
        if npm:
            files["npmrc"], named["npmrc"] = npm.encode(), ("NPM_CONFIG_USERCONFIG",)
        uv_file = Path(env.get("UV_CONFIG_FILE") or home / ".config/uv/uv.toml")
        if (text := _read(uv_file)) is not None:
            files["uv.toml"], named["uv.toml"] = text.encode(), ("UV_CONFIG_FILE",)
        ca = next((env[name] for name in CA_VARIABLES if env.get(name)), cafile)
        if ca and (text := _read(Path(ca))) is not None:
            files["ca.pem"], named["ca.pem"] = text.encode(), (*CA_VARIABLES, "NPM_CONFIG_CAFILE")
        return cls(values, files, named)

    @asynccontextmanager
    async def lent(self, runtime: Runtime) -> AsyncIterator[Mapping[str, str]]:
        """The variables for installing, while its files are in the sandbox. Raises `RuntimeFault`."""
        folder = f"{runtime.layout.session_dir}/{SCRATCH_DIR}/registries"
        env = dict(self.env)
        for name, data in self.files.items():
            await runtime.put_bytes(data, f"{folder}/{name}", 0o644)
            env |= dict.fromkeys(self.named_by[name], f"{folder}/{name}")
        yield env
        # Where installing failed, the whole sandbox goes.
        if self.files:
            gone = await runtime.exec(["rm", "-rf", "--", folder], timeout_s=_REMOVE_S, category=ExecCategory.SETUP)
            if not gone.ok:
                raise RuntimeFault(f"settings of package registries cannot be taken out of the sandbox: {gone.why}")


def _npm(env: Mapping[str, str], home: Path) -> tuple[str, str]:
    """(an npmrc, the file of certificates that it named)."""
    program = shutil.which("npm", path=env.get("PATH", os.defpath))
    beside = [Path(program).parent.parent / "etc/npmrc"] if program else []
    named = [Path(env[name]) for name in ("NPM_CONFIG_GLOBALCONFIG", "npm_config_globalconfig") if env.get(name)]
    user = env.get("NPM_CONFIG_USERCONFIG") or env.get("npm_config_userconfig") or home / ".npmrc"
    found = dict(pair for file in [*beside, *named, Path(user)] for pair in _npm_pairs(_read(file) or "", env))
    found |= {
        name.lower().removeprefix("npm_config_").replace("_", "-") if "//" not in name else name[11:]: value
        for name, value in env.items()
        if name.lower().startswith("npm_config_") and value
    }
    kept = {key: value for key, value in found.items() if _NPM.fullmatch(key)}
    return "".join(f"{key}={value}\n" for key, value in kept.items()), found.get("cafile", "")


def _npm_pairs(text: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and key[:1] not in {"#", ";"}:
            value = _VARIABLE.sub(lambda match: env.get(match[1], match[0]), value.strip().strip("\"'"))
            yield key.strip(), value


def _pip(env: Mapping[str, str], home: Path) -> dict[str, str]:
    files = [Path("/etc/pip.conf"), home / ".pip/pip.conf", home / ".config/pip/pip.conf"]
    files += [Path(env["PIP_CONFIG_FILE"])] if env.get("PIP_CONFIG_FILE") else []
    found: dict[str, str] = {}
    for file in files:
        read = configparser.RawConfigParser(strict=False)
        with suppress(configparser.Error):
            read.read_string(_read(file) or "")
        for section in ("global", "install"):
            found |= {key: value for key, value in _section(read, section).items() if key in _PIP}
    for key in _PIP:
        if value := env.get(f"PIP_{key.replace('-', '_').upper()}"):
            found[key] = value
    for key in ("index-url", "extra-index-url"):
        # Folders of this machine are not there.
        if key in found:
            found[key] = " ".join(url for url in found[key].split() if url.startswith(("http://", "https://")))
    return {key: " ".join(value.split()) for key, value in found.items() if value.strip()}


def _section(read: configparser.RawConfigParser, name: str) -> dict[str, str]:
    return dict(read.items(name)) if read.has_section(name) else {}


def _uv(env: Mapping[str, str], pip: Mapping[str, str]) -> dict[str, str]:
    """uv's own words, else pip's."""
    own = {name: value for name, value in env.items() if _UV.fullmatch(name) and value}
    if any("INDEX" in name for name in own):
        return own
    as_pip = {"UV_DEFAULT_INDEX": "index-url", "UV_INDEX": "extra-index-url", "UV_INSECURE_HOST": "trusted-host"}
    return {**{name: pip[key] for name, key in as_pip.items() if key in pip}, **own}


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
