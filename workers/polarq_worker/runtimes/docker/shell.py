"""What runs in a container beside the task's own programs: small scripts for any POSIX sh, with what sh has in it.

A command is started as `docker-init -s -- sh -c RUN ...`. docker-init (mounted by the daemon, `HostConfig.Init`; Podman
has another one) is a subreaper there: whatever descends from the command stays below it, in whatever session, so that
KILL finds it. The shell tells how things go by records in the streams themselves, each written at once and behind all
that the command wrote: \\001, the command's token, a space, a line.

Whatever else runs in the container sees command lines, and of its own user's processes the environment and the open
files. So the token is in neither: the shell reads it from its input, and nothing that it starts inherits it. What that
cannot keep out: a process that may trace others of its own user, and root in the container, who can put another sh in
the place of this one. A verifier that is to be believed then has a fresh sandbox.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

RUN_DIR = "/polar/run"
"""Scripts and input of commands; writable for every user of the container, like /tmp."""
SCRIPT = "POLARQ_SCRIPT"
SHELL = "POLARQ_SHELL"
"""RUN itself comes in the environment, and is taken out of it: no `pkill -f` of a task's shall meet a word of it."""
START = """[ ! -x /sbin/docker-init ] || exec /sbin/docker-init -s -- /bin/sh -c "$0" "$@"
exec /run/podman-init -- /bin/sh -c "$0" "$@"
"""
MAIN = "while read -r _; do :; done; exec sleep 2147483647"
"""The container's main process: its input never ends."""

RUN = r"""set +a
unset POLARQ_SHELL q_t q_f q_s
read -r q_t q_f q_s
q_w=$1 q_m=$2 q_i=$3
shift 3
say() { printf '\001%s %s\n' "$q_t" "$*"; }
counter() {
  q_n=0
  for q_g in $2; do
    [ -r "$q_g" ] || continue
    while read -r q_a q_b; do [ "$q_a" = "$1" ] && q_n=$q_b; done <"$q_g"
    break
  done
}
counters() {
  counter oom_kill '/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control'
  q_o=$q_n
  counter max '/sys/fs/cgroup/pids.events /sys/fs/cgroup/pids/pids.events'
  q_p=$q_n
}
refuse() {
  say N "$1" >&2
  rm -f "$q_f.sh" "$q_f.in"
  exit 0
}
unset CDPATH
if ! cd "$q_w" 2>/dev/null; then
  [ -d "$q_w" ] && refuse closed
  refuse folder
fi
unset OLDPWD
if [ "$q_i" = in ]; then exec <"$q_f.in"; rm -f "$q_f.in"; else exec </dev/null; fi
if [ "$q_m" = env ]; then
  (umask 077; printf '%s' "$POLARQ_SCRIPT" >"$q_f.sh") 2>/dev/null || refuse script
  unset POLARQ_SCRIPT
fi
if [ "$q_m" != argv ]; then
  for q_b in "$(command -v bash)" /bin/bash /usr/bin/bash; do
    [ -x "$q_b" ] && break
    q_b=
  done
  if [ -n "$q_b" ]; then set -- "$q_b" -o pipefail "$q_f.sh"
  elif (set -o pipefail) 2>/dev/null; then set -- /bin/sh -o pipefail "$q_f.sh"
  else refuse shell
  fi
fi
counters
say S "$PPID" "$q_o" "$q_p" >&2
exec 3>&2 2>"$q_s"
(exec 2>&3 3>&-; trap 'say F >&2' EXIT; exec "$@")
q_c=$?
exec 2>&3 3>&-
q_h=E
[ "$q_c" -gt 128 ] && [ -s "$q_s" ] && q_h=K
counters
say E
say "$q_h" "$q_c" "$q_o" "$q_p" >&2
rm -f "$q_s" "$q_f.sh"
q_n=1
while { q_k=; read -r q_k <"/proc/$PPID/task/$PPID/children"; } 2>/dev/null; [ -n "$q_k" ] && [ "$q_k" != "$$" ]; do
  sleep "$q_n" || exit 0
  [ "$q_n" -ge 16 ] || q_n=$((q_n * 2))
done
"""
"""folder, `argv`, `env` or `file` (where the script is), `in` or `-`, then an argv; its input is `Secrets.line`.

Records: on stderr `S <pid of docker-init> <oom kills> <times that the process limit was hit>`, or `N <why>` when it
cannot be, and `F` when it could not be executed; at the end on stdout `E`, and on stderr `E` or `K` with the exit code
and both counters. K: a signal ended it, for the shell had something to say then, which goes into a file of its own
(shells say nothing of INT and PIPE, bash nothing of TERM: those look like an exit code of 128 and more). Then it waits
for whatever the command left behind, which may go on using both streams.
"""

KILL = r"""r=$1
read -r q_t q_f q_s
tree() {
  all= level=$r
  if [ -z "$r" ]; then
    k=
    read -r k </proc/1/task/1/children
    set -- $k
    [ "$#" -gt 0 ] && shift
    level=$* all=$*
  fi
  while [ -n "$level" ]; do
    next=
    for q in $level; do
      for c in "/proc/$q/task/"*/children; do
        k=
        read -r k <"$c"
        next="$next $k"
      done
    done
    set -- $next
    level=$*
    all="$all $level"
  done
  set -- $all
  all=$*
}
i=0 before=
while [ "$i" -lt 200 ]; do
  tree 2>/dev/null
  [ -n "$all" ] || break
  if [ "$all" != "$before" ]; then kill -STOP $all 2>/dev/null; else kill -KILL $all 2>/dev/null; fi
  before=$all
  i=$((i + 1))
  [ "$i" -lt 4 ] || sleep 0.05 2>/dev/null || sleep 1
done
rm -f "$q_s" "$q_f.sh" "$q_f.in"
[ -n "$all" ] && echo "left $all" || echo "gone $q_t"
"""
"""pid of a command's docker-init, or blank; its input is `Secrets.line`. Kills what is below the process (blank: what
lost its own and came to be below the container's first, beside the main one): stopped first, so that it can neither
fork nor flee, then again until none is left."""

NAMES = r"""cd "$1" && for f in * .[!.]* ..?*; do
  if [ -e "$f" ] || [ -L "$f" ]; then printf '%s\0' "$f"; fi
done"""
"""The names in a folder, each with a NUL behind it."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """What one of our shells is told on its input. Nobody can make a file of these names before it does."""

    token: str
    stem: str
    """Of the files that its script and its command's input are in."""
    says: str
    """A file for what it says itself."""

    @classmethod
    def new(cls) -> Secrets:
        return cls(secrets.token_hex(16), f"{RUN_DIR}/{secrets.token_hex(16)}", f"{RUN_DIR}/{secrets.token_hex(16)}")

    @property
    def line(self) -> bytes:
        return f"{self.token} {self.stem} {self.says}\n".encode()


def run(*, cwd: str, argv: list[str], script: bool, in_file: bool, has_input: bool) -> list[str]:
    """The command line of a command. `in_file`: its script was uploaded, else it is in its environment."""
    mode = ("file" if in_file else "env") if script else "argv"
    head = ["/bin/sh", "-c", START, f'eval "${SHELL}"', "polarq"]
    return [*head, cwd, mode, "in" if has_input else "-", *argv]


def kill(pid: str) -> list[str]:
    return ["/bin/sh", "-c", KILL, "polarq", pid]
