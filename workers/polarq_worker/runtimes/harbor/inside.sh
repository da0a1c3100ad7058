# What a Harbor environment's plain exec does not give, done inside the sandbox: both streams apart and bounded, an own
# limit of time, and the end of a command with all that descends from it.
#
#   bash inside.sh run FOLDER TOKEN TIMEOUT_MS HALF CWD   runs the command that lies in FOLDER (script or argv, env, stdin)
#   bash inside.sh kill TOKEN                             kills a command from outside
#
# `run` answers lines: `polarq KIND CODE`, then `out SIZE HEAD TAIL` and `err SIZE HEAD TAIL` in base64 (`-`: nothing),
# and `kept FOLDER`, where both lie whole. FOLDER holds `argv` or `script`, `env` (NAME=VALUE, each ended by NUL), `stdin`.
export LC_ALL=C
# The process namespace that a kernel starts with.
MACHINE=pid:[4026531836]

# Every process of a command: what descends from it, and what has its token. In a container also what lost its parent since
# it began and has no command's token: a daemon that emptied its environment. Not where process 1 is a whole machine's,
# which starts things of its own.
processes_of() {
  local token=$1 begun=$2 root=$3 stat pid line parent ours others
  local -A parents=() starts=() chosen=()
  ours=$(grep -slzaxF "POLARQ_COMMAND=$token" /proc/[0-9]*/environ)
  others=all
  [ "$(readlink /proc/self/ns/pid)" = "$MACHINE" ] || others=$(grep -slza '^POLARQ_\(COMMAND\|RUNNER\)=' /proc/[0-9]*/environ)
  for stat in /proc/[0-9]*/stat; do
    { read -r line <"$stat"; } 2>/dev/null || continue
    pid=${line%% *}
    line=${line##*) }
    set -- $line
    [ "$1" = Z ] && continue
    parents[$pid]=$2
    starts[$pid]=${20}
  done
  for pid in "${!parents[@]}"; do
    [ "$pid" = $$ ] || [ "$pid" = "$BASHPID" ] || [ "$pid" = 1 ] && continue
    parent=$pid
    while [ -n "$parent" ] && [ "$parent" -gt 1 ]; do
      [ "$parent" = "$root" ] && { chosen[$pid]=1; break; }
      parent=${parents[$parent]:-}
    done
    case $'\n'$ours$'\n' in *$'\n'"/proc/$pid/environ"$'\n'*) chosen[$pid]=1 ;; esac
    [ "$others" = all ] || [ "${parents[$pid]}" -gt 1 ] || [ "${starts[$pid]}" -lt "$begun" ] && continue
    case $'\n'$others$'\n' in *$'\n'"/proc/$pid/environ"$'\n'*) ;; *) chosen[$pid]=1 ;; esac
  done
  printf '%s\n' "${!chosen[@]}"
}

kill_command() {
  local token=$1 begun=$2 root=$3 found stopped round
  for round in {1..200}; do
    stopped=
    while found=$(processes_of "$token" "$begun" "$root"); [ "$found" != "$stopped" ]; do
      kill -STOP $found 2>/dev/null
      stopped=$found
    done
    [ -n "$found" ] || return 0
    kill -KILL $found 2>/dev/null
    pause 0.02
  done
  return 1
}

pause() { read -r -t "$1" <&9; }

part() {
  local file=$1 half=$2 size head=- tail=-
  size=$(stat -c %s "$file")
  if [ "$size" -gt 0 ]; then
    if [ "$size" -le $((2 * half)) ]; then
      head=$(base64 -w 0 "$file")
    else
      head=$(head -c "$half" "$file" | base64 -w 0)
      tail=$(tail -c "$half" "$file" | base64 -w 0)
    fi
  fi
  printf '%s %s %s\n' "$size" "$head" "$tail"
}

run() {
  local folder=$1 token=$2 timeout_ms=$3 half=$4 cwd=$5
  local kept kind code child state begun pair pace=1 argv=(bash -o pipefail "$folder/script")
  export POLARQ_RUNNER=$token
  kept=$(mktemp -d "${0%/*}/kept.XXXXXXXX") || { printf 'polarq lost 0\n'; return; }
  exec 9<> <(:)
  if ! cd -- "$cwd" 2>/dev/null; then
    printf 'polarq no-folder 0\nkept %s\n' "$kept"
    return
  fi
  [ ! -e "$folder/argv" ] || mapfile -d '' -t argv <"$folder/argv"
  (
    unset POLARQ_RUNNER LC_ALL
    while IFS= read -r -d '' pair; do export "${pair%%=*}=${pair#*=}" 2>/dev/null; done <"$folder/env"
    type -P -- "${argv[0]}" >/dev/null
  ) || { printf 'polarq no-program 0\nkept %s\n' "$kept"; return; }
  (
    unset POLARQ_RUNNER LC_ALL
    while IFS= read -r -d '' pair; do export "${pair%%=*}=${pair#*=}" 2>/dev/null; done <"$folder/env"
    export POLARQ_COMMAND=$token
    exec 9<&-
    exec setsid -- "${argv[@]}"
  ) <"$folder/stdin" >"$kept/out" 2>"$kept/err" &
  child=$!
  read -r state <"/proc/$child/stat" 2>/dev/null
  set -- ${state##*) }
  begun=${20:-0}
  printf '%s %s\n' "$begun" "$child" >"${0%/*}/begun.$token"
  kind=
  while [ -z "$kind" ]; do
    state=$(jobs -l %% 2>/dev/null)
    case $state in
      *" $child Running "*) ;;
      *)
        wait "$child"
        code=$?
        # A job that a signal ended is struck off the list at once; one that exited, with whatever code, is not.
        kind=exited
        case $state in
          *" $child Exit "* | *" $child Done "*) ;;
          *) [ "$code" -le 128 ] || kind=signalled code=$((code - 128)) ;;
        esac
        break
        ;;
    esac
    if [ "$timeout_ms" -le 0 ]; then
      kind=timed-out code=0
      kill_command "$token" "$begun" "$child" || code=1
      break
    fi
    # Short commands are seen ending at once, long ones cost nothing.
    [ "$pace" -le "$timeout_ms" ] || pace=$timeout_ms
    printf -v state '%d.%03d' $((pace / 1000)) $((pace % 1000))
    pause "$state"
    timeout_ms=$((timeout_ms - pace))
    pace=$((pace < 100 ? pace * 2 : 100))
  done
  rm -f "${0%/*}/begun.$token"
  printf 'polarq %s %s\nout %s\nerr %s\nkept %s\n' "$kind" "$code" "$(part "$kept/out" "$half")" \
    "$(part "$kept/err" "$half")" "$kept"
}

case $1 in
  run) run "${@:2}" ;;
  kill)
    export POLARQ_RUNNER=$2
    exec 9<> <(:)
    read -r begun child <"${0%/*}/begun.$2" && kill_command "$2" "$begun" "$child"
    ;;
esac
