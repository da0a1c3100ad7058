"""What runs in a container beside the task's own programs: small scripts for any POSIX sh, with what sh has in it.

A command is started as `docker-init -s -- sh -c RUN ...`. docker-init (mounted by the daemon, `HostConfig.Init`) is a
subreaper there: whatever descends from the command stays below it, in whatever session, so that KILL finds it. The
shell tells how things go by records in the streams themselves, each written at once and behind all that the command
wrote: \\001, the command's token, a space, a line.
"""

from __future__ import annotations

INIT = "/sbin/docker-init"
RUN_DIR = "/polar/run"
"""Scripts and input of commands; writable for every user of the container, like /tmp."""
SCRIPT = "POLARQ_SCRIPT"
MAIN = "while read -r _; do :; done; exec sleep 2147483647"
"""The container's main process: its input never ends."""

RUN = r"""t=$1 f=$2 w=$3 m=$4 i=$5
shift 5
say() { printf '\001%s %s\n' "$t" "$*"; }
counter() {
  n=0
  for g in $2; do
    [ -r "$g" ] || continue
    while read -r a b; do [ "$a" = "$1" ] && n=$b; done <"$g"
    break
  done
}
counters() {
  counter oom_kill '/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control'
  o=$n
  counter max '/sys/fs/cgroup/pids.events /sys/fs/cgroup/pids/pids.events'
  p=$n
}
refuse() {
  say N "$1" >&2
  rm -f "$f.sh" "$f.in"
  exit 0
}
unset CDPATH
if ! cd "$w" 2>/dev/null; then
  [ -d "$w" ] && refuse closed
  refuse folder
fi
unset OLDPWD
if [ "$i" = in ]; then exec <"$f.in"; rm -f "$f.in"; else exec </dev/null; fi
if [ "$m" = env ]; then
  (umask 077; printf '%s' "$POLARQ_SCRIPT" >"$f.sh") 2>/dev/null || refuse script
  unset POLARQ_SCRIPT
fi
if [ "$m" != argv ]; then
  for b in "$(command -v bash)" /bin/bash /usr/bin/bash; do
    [ -x "$b" ] && break
    b=
  done
  if [ -n "$b" ]; then set -- "$b" -o pipefail "$f.sh"
  elif (set -o pipefail) 2>/dev/null; then set -- /bin/sh -o pipefail "$f.sh"
  else refuse shell
  fi
fi
counters
say S "$PPID" "$o" "$p" >&2
exec 3>&2 2>"$f.how"
(trap 'echo F >"$f.how"' EXIT; exec "$@" 2>&3 3>&-)
c=$?
exec 2>&3 3>&-
h=
[ -s "$f.how" ] && read -r h <"$f.how"
case $h in '') h=E ;; F) ;; *) h=K ;; esac
counters
say E
say "$h" "$c" "$o" "$p" >&2
rm -f "$f.how" "$f.sh"
n=1
while { k=; read -r k <"/proc/$PPID/task/$PPID/children"; } 2>/dev/null; [ -n "$k" ] && [ "$k" != "$$" ]; do
  sleep "$n" || exit 0
  [ "$n" -ge 16 ] || n=$((n * 2))
done
"""
"""token, stem of its files, folder, `argv`, `env` or `file` (where the script is), `in` or `-`, then an argv.

Records: on stderr `S <pid of docker-init> <oom kills> <times that the process limit was hit>`, or `N <why>` when it
cannot be; at the end on stdout `E`, and on stderr `E`, `K` or `F` with the exit code and both counters. K: a signal
ended it, for the shell had something to say then, which goes into a file of its own (shells say nothing of INT and
PIPE, bash nothing of TERM: those look like an exit code of 128 and more). F: it could not be executed. Then it waits
for whatever the command left behind, which may go on using both streams.
"""

KILL = r"""r=$1
tree() {
  all= level=$r
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
rm -f "$2.how" "$2.sh" "$2.in"
[ -n "$all" ] && echo "left $all" || echo gone
"""
"""pid of a command's docker-init, stem of its files. Kills what is below the process: stopped first, so that it can
neither fork nor flee, then again until none is left."""

NAMES = r"""cd "$1" && for f in * .[!.]* ..?*; do
  if [ -e "$f" ] || [ -L "$f" ]; then printf '%s\0' "$f"; fi
done"""
"""The names in a folder, each with a NUL behind it."""


def run(token: str, *, cwd: str, argv: list[str], script: bool, in_file: bool, has_input: bool) -> list[str]:
    """The command line of a command. `in_file`: its script was uploaded, else it is in its environment."""
    mode = ("file" if in_file else "env") if script else "argv"
    head = [INIT, "-s", "--", "/bin/sh", "-c", RUN, "polarq"]
    return [*head, token, stem(token), cwd, mode, "in" if has_input else "-", *argv]


def kill(pid: str, token: str) -> list[str]:
    return ["/bin/sh", "-c", KILL, "polarq", pid, stem(token)]


def stem(token: str) -> str:
    return f"{RUN_DIR}/{token}"
