"""Pictures in a request: the scripted model sees none of them, and the ledger says which ones came."""

from __future__ import annotations

import base64
import hashlib

from polarq.testing.inference import Turn
from polarq.testing.inference.images import images_of
from tests.testing.inference.asking import scripted
from tests.testing.inference.conftest import Serve

PNG = b"\x89PNG\r\n\x1a\nnot really"


def part(data: str, kind: str = "image/png") -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def sums(*data: bytes) -> tuple[str, ...]:
    return tuple(hashlib.sha256(one).hexdigest() for one in data)


async def test_the_ledger_has_the_pictures_of_each_call(serve: Serve) -> None:
    client = await serve(scripted(Turn(content="A picture."), Turn(content="None.")))
    encoded = base64.b64encode(PNG).decode()
    shown = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part(encoded)]}]
    said = {"role": "assistant", "content": "A picture."}
    result = {"role": "tool", "tool_call_id": "c", "content": [part(base64.b64encode(b"two").decode(), "image/webp")]}
    await client.chat(messages=shown)
    await client.chat(messages=[*shown, said, result])
    await client.chat(messages=[{"role": "user", "content": "no picture"}])
    assert [call.images for call in client.ledger] == [sums(PNG), sums(PNG, b"two"), ()]
    assert (await client.get("/scripted/ledger"))["calls"][0]["images"] == list(sums(PNG))


def test_what_is_no_base64_is_known_by_its_address() -> None:
    url = "https://example.org/a.png"
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, part("%%")]}]
    assert images_of(messages) == sums(url.encode(), b"data:image/png;base64,%%")
