"""TLS in front of a Redis, and certificates for it."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """A self-signed one for 127.0.0.1, which vouches for itself."""

    cert: Path
    key: Path

    @classmethod
    def made(cls, folder: Path, name: str = "redis") -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
        signed = (
            x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        made = cls(folder / f"{name}.crt", folder / f"{name}.key")
        made.cert.write_bytes(signed.public_bytes(Encoding.PEM))
        made.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return made


@contextmanager
def tls_front(certificate: Certificate, redis_port: int) -> Iterator[int]:
    """A port that leads to a Redis by TLS only. Not every server is built with it (the one that comes as a package is
    not), so TLS ends in front of it, as it does behind a load balancer. The server may go and come back."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.cert, certificate.key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tls")
    thread.start()
    try:
        listening = asyncio.run_coroutine_threadsafe(_listening(context, redis_port), loop).result()
        yield listening.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_closed(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _listening(context: ssl.SSLContext, redis_port: int) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind, ahead = await asyncio.open_connection("127.0.0.1", redis_port)
        except ConnectionError:
            writer.close()
            return
        await asyncio.gather(_passed_on(reader, ahead), _passed_on(behind, writer))

    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)


async def _passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _closed() -> None:
    """Ends what is still being passed on."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def either_front(certificate: Certificate, port: int) -> Iterator[int]:
    """A port that leads to a server by TLS or without, as the client begins: clients speak TLS, and servers that were
    built without it can still reach each other there."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.cert, certificate.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=_lead, args=(listener.accept()[0], context, port), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _lead(client: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with suppress(OSError), client, socket.create_connection(("127.0.0.1", port)) as server:
        if client.recv(1, socket.MSG_PEEK) != _HANDSHAKE:
            _pass_on(client, server)
            return
        with context.wrap_socket(client, server_side=True) as talking:
            _pass_on(talking, server)


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    while True:
        unread = isinstance(one, ssl.SSLSocket) and one.pending()
        for ready in [one] if unread else select.select([one, other], [], [])[0]:
            data = ready.recv(65536)
            if not data:
                return
            (other if ready is one else one).sendall(data)


_HANDSHAKE = b"\x16"
