"""A door for a backend that cannot enter its sandboxes' network: a Unix socket in a folder that is mounted in, and a
small program in the sandbox that listens on loopback and leads there. The sandbox needs python3 or perl."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.base import Runtime

START_S = 60.0
BACKLOG = 1024
SCRIPT = """
if command -v python3 >/dev/null; then exec python3 -c "$POLARQ_PYTHON" "$POLARQ_PORT" "$POLARQ_SOCKET"; fi
if command -v perl >/dev/null; then exec perl -e "$POLARQ_PERL" "$POLARQ_PORT" "$POLARQ_SOCKET"; fi
echo "there is neither python3 nor perl in it: install one, or set network_policy 'full'" >&2; exit 127
"""
PYTHON = """
import asyncio, os, sys

async def copy(reader, writer, both):
    try:
        while True:
            data = await reader.read(65536)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        for one in both:
            one.close()

async def came(reader, writer):
    try:
        there, back = await asyncio.open_unix_connection(sys.argv[2])
    except OSError:
        writer.close()
        return
    both = (writer, back)
    await asyncio.gather(copy(reader, back, both), copy(there, writer, both))
    for one in both:
        one.close()

async def main():
    server = await asyncio.start_server(came, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.write(told, b"1")
    os.close(told)
    await asyncio.Event().wait()

asked, told = os.pipe()
if os.fork():
    os.close(told)
    sys.exit(0 if os.read(asked, 1) else 1)
os.setsid()
os.close(asked)
asyncio.new_event_loop().run_until_complete(main())
"""
PERL = r"""
use strict; use IO::Socket::INET; use IO::Socket::UNIX; use POSIX 'setsid';
my ($port, $path) = @ARGV;
my $door = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => $port, Listen => 1024, ReuseAddr => 1)
    or die "cannot listen on port $port: $!\n";
exit 0 if fork;
setsid; open STDIN, '<', '/dev/null'; open STDOUT, '>', '/dev/null'; open STDERR, '>', '/dev/null';
$SIG{CHLD} = 'IGNORE';
sub copy {
    my ($from, $to) = @_; my $data;
    while (sysread($from, $data, 65536)) {
        my $done = 0;
        while ($done < length $data) { $done += syswrite($to, $data, length($data) - $done, $done) or exit; }
    }
    shutdown($to, 1);
}
while (1) {
    my $client = $door->accept or next;
    next if fork;
    close $door;
    my $there = IO::Socket::UNIX->new(Peer => $path) or exit;
    if (fork) { copy($client, $there); } else { copy($there, $client); }
    exit;
}
"""


async def forwarded_door(
    runtime: Runtime, folder: Path, inside: str, port: int, *, user: str | None = None
) -> socket.socket:
    """What connects to 127.0.0.1:`port` in the sandbox is accepted by the socket that is answered. `folder` is seen in
    the sandbox as `inside`; `user` runs the program there. Raises `RuntimeFault`."""
    name = f"{port}.sock"
    try:
        listener = await asyncio.to_thread(_listener, folder, name)
    except OSError as exc:
        raise RuntimeFault(f"no socket can be made in {folder}: {exc.strerror or exc}") from exc
    env = {
        "POLARQ_PORT": str(port),
        "POLARQ_SOCKET": f"{inside}/{name}",
        "POLARQ_PYTHON": PYTHON,
        "POLARQ_PERL": PERL,
    }
    try:
        started = await runtime.exec(SCRIPT, cwd="/", env=env, user=user, timeout_s=START_S)
        if not started.ok:
            raise RuntimeFault(f"port {port} of the sandbox's own network cannot be led out of it: {started.why}")
    except BaseException:
        listener.close()
        raise
    return listener


def _listener(folder: Path, name: str) -> socket.socket:
    """Bound through the open folder: its own path may be longer than a socket's may be."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        here = f"/proc/self/fd/{handle}/{name}"
        Path(here).unlink(missing_ok=True)
        opened.bind(here)
        # Who may come is decided by who sees the folder: the sandbox, whatever users it has.
        Path(here).chmod(0o666)
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except BaseException:
        opened.close()
        raise
    finally:
        os.close(handle)
    return opened
