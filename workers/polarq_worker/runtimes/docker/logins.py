"""Registry logins, from a file in the form of Docker's config.json. Nothing of it is ever printed."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from polarq.errors import ImageDenied

HUB = "https://index.docker.io/v1/"


def registry_of(image: str) -> str:
    """The registry's name in such a file. An image without one comes from the hub."""
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else HUB


def login(image: str, file: str | None) -> dict[str, str] | None:
    """What the daemon shall tell the image's registry; None: nothing. `file` None: the worker's own user's, if it is
    there. Raises `ImageDenied` where a login is named that cannot be used."""
    path = Path(file) if file else Path.home() / ".docker/config.json"
    try:
        config: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        if file:
            raise ImageDenied(f"runtimes.docker.registry_auth: there is no file {path} on this node") from None
        return None
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is no JSON"
        raise ImageDenied(f"the file of registry logins {path} cannot be read: {reason}") from None
    registry = registry_of(image)
    entries = config.get("auths", {}) if isinstance(config, dict) else {}
    spellings = [registry, f"https://{registry}", f"https://{registry}/v1/", f"https://{registry}/v2/"]
    entry = next((entries[spelling] for spelling in spellings if isinstance(entries.get(spelling), dict)), None)
    if entry and entry.get("identitytoken"):
        return {"identitytoken": str(entry["identitytoken"]), "serveraddress": registry}
    if entry and entry.get("auth"):
        return _decoded(str(entry["auth"]), registry, path)
    if registry in config.get("credHelpers", {}) or (entry is not None and config.get("credsStore")):
        text = f"{path} keeps the login for {registry} in a credential helper, which polarq does not run"
        raise ImageDenied(f"{text}; give a file with 'auths' (runtimes.docker.registry_auth)")
    return None


def _decoded(auth: str, registry: str, path: Path) -> dict[str, str]:
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise ImageDenied(f"the login for {registry} in {path} is no base64 of user:password")
    return {"username": user, "password": password.rstrip("\0"), "serveraddress": registry}
