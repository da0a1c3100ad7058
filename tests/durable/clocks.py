"""Wall clocks of real processes that are wrong, and that are set while the processes run.

A small library in front of libc adds a number of seconds, read from a shared file at each call, to what it says of the
wall clock. Every other clock stays as it is, as on a host whose time somebody sets. Python, its extensions and the
Redis server all ask libc.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

from polarq.testing.redis import ServerBinary, find_server
from tests.needs import not_here

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead_s;

__attribute__((constructor)) static void find_clock(void) {
    const char *path = getenv("WRONG_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *shared = mmap(0, sizeof *ahead_s, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (shared != MAP_FAILED) ahead_s = shared;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, clock, at);
    if (!failed && ahead_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *ahead_s;
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class WrongClock:
    """The wall clock of whatever is started with `before` in front of its command, in the zone `zone`."""

    def __init__(self, folder: Path, name: str, *, ahead_s: int = 0, zone: str = "UTC") -> None:
        self.zone = zone
        self._library = _library(folder)
        self._file = folder / f"{name}.clock"
        self._file.write_bytes(struct.pack("q", ahead_s))

    def set(self, ahead_s: int) -> None:
        """From the next look on, it is this far before the true time; negative: behind it."""
        handle = os.open(self._file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(handle, struct.pack("q", ahead_s), 0)
        finally:
            os.close(handle)

    @property
    def ahead_s(self) -> int:
        number: int = struct.unpack("q", self._file.read_bytes())[0]
        return number

    @property
    def before(self) -> list[str]:
        return ["env", f"LD_PRELOAD={self._library}", f"WRONG_CLOCK={self._file}", f"TZ={self.zone}"]

    def redis_binary(self, folder: Path) -> ServerBinary:
        """A Redis server under this clock."""
        script = folder / "redis-by-this-clock"
        script.write_text(f'#!/bin/sh\nexec {" ".join(self.before)} {find_server()[0].path} "$@"\n', encoding="utf-8")
        script.chmod(0o700)
        return ServerBinary(script, "a clock of its own")


def _library(folder: Path) -> Path:
    """Made once in each folder."""
    library = folder / "wrong_clock.so"
    if library.exists():
        return library
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        not_here("a clock that is wrong needs a C compiler (cc)")
    command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return library
