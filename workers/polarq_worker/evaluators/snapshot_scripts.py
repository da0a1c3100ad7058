"""What a repository of polarq's own is asked inside a sandbox: scripts for its shell, and which files steer tests.

Each begins with `SETUP`, in the folder. Variables: SNAPSHOT, where the record is; BASE and INDEX, the recorded tree and
index; JUDGING, the repository in which `COMPARE` looked, or blank; STEERING, and for `OUTSIDE` TOP, ABOVE and KEEP.
"""

from __future__ import annotations

NO_GIT = 80
NO_REPOSITORY = 81
"""Exit codes: there is no git; what was recorded is gone or damaged."""
RUNNER_FILES = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"})
SHARED_CONFIGS = frozenset({"setup.cfg", "tox.ini", "pyproject.toml"})
"""Files with a section for pytest among others, which it reads from any folder on the way to a test."""
START_UP_MODULES = ("sitecustomize", "usercustomize")
"""What every Python imports as it starts, from wherever its path leads."""
RUNNER_MODULES = ("pytest", "_pytest", "pluggy", "iniconfig")
"""What would be imported from the root in the test runner's place."""
MODULE_FORMS = ("{}.py", "{}.pyc", "{}.*so", "{}/__init__.py", "{}/__init__.pyc", "{}/__init__.*so")
"""Where Python finds a module: as source, byte code or machine code, alone or as a package."""
ENTRY_POINTS = ("*.dist-info/entry_points.txt", "*.egg-info/entry_points.txt")
"""In the root, where `python -m pytest` looks for plug-ins."""
STEERING = " ".join(
    [f":(glob)**/{name}" for name in sorted(RUNNER_FILES | SHARED_CONFIGS)]
    + [f":(glob)**/{form.format(name)}" for name in START_UP_MODULES for form in MODULE_FORMS]
    + [f":(glob){form.format(name)}" for name in RUNNER_MODULES for form in MODULE_FORMS]
    + [f":(glob){path}" for path in ENTRY_POINTS]
)
PLAIN_GIT = {
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.hooksPath",
    "GIT_CONFIG_VALUE_0": "/dev/null",
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
}
"""For a script that has tests checked out: git starts nothing of the repository's, and takes no object for another."""
QUIET_SHELL = {"BASH_ENV": "", "ENV": ""}
"""Our own scripts print what we read: an image's shell start-up noise must not be in it."""

SETUP = """
set -euf
[ -z "${JUDGING:-}" ] || [ -f "$JUDGING/HEAD" ] || exit 81
export GIT_DIR="${JUDGING:-$SNAPSHOT}" GIT_WORK_TREE="$(pwd -P)" GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_NO_REPLACE_OBJECTS=1
unset GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_NAMESPACE GIT_COMMON_DIR || true
new_repository() {
    # As git init would, which with its settings is four programs: a verdict on a small folder takes as long as these.
    mkdir -p "$GIT_DIR/info" "$GIT_DIR/objects/info" "$GIT_DIR/objects/pack" "$GIT_DIR/refs/heads"
    echo 'ref: refs/heads/main' > "$GIT_DIR/HEAD"
    printf '%s\\n' '[core]' 'repositoryFormatVersion = 0' 'bare = false' 'fileMode = true' 'compression = 1' \
        '[gc]' 'auto = 0' > "$GIT_DIR/config"
    # Bytes as they are: no line ends, filters or keywords of the folder's own .gitattributes.
    echo '* -text -filter -ident -working-tree-encoding' > "$GIT_DIR/info/attributes"
}
record() {
    # 1: there are files that cannot be read; more: nothing was recorded.
    git add -A --ignore-errors . >/dev/null 2>"$GIT_DIR/add.stderr" || [ $? = 1 ] || return 1
    # What steers a test runner does so whatever .gitignore says of it.
    {
        git ls-files -z -o -i --exclude-standard -- $STEERING
        # In folders that are looked at: there are thousands in an environment that is ignored as a whole.
        git ls-files -z -o -i --exclude-standard --directory -- ':(glob)**/__init__.py' | sed -z '/\\/$/d'
    } | xargs -0 -r git --literal-pathspecs add -f --ignore-errors -- >/dev/null 2>>"$GIT_DIR/add.stderr" || true
}
"""
OUTSIDE = """
folder="$(pwd -P)"
told() {
    if [ -e "$1" ] || [ -L "$1" ]; then
        printf '%s %s\\0' "$(git hash-object $KEEP --no-filters -- "$1" 2>/dev/null || echo unreadable)" "$1"
    fi
}
for file in config config.worktree info/attributes info/grafts; do told "$folder/.git/$file"; done
set +f
for file in "$folder"/.git/hooks/*; do told "$file"; done
set -f
[ "$TOP" = / ] || case "$folder/" in "$TOP"/*) ;; *) exit ;; esac
while [ "$folder" != / ] && [ "$folder" != "$TOP" ]; do
    folder="$(dirname "$folder")"
    for name in $ABOVE; do told "${folder%/}/$name"; done
done
"""
PUT_BACK_OUTSIDE = """
while IFS= read -r -d "" line; do
    file="${line#* }"
    chmod u+w "$(dirname "$file")" 2>/dev/null || true
    mkdir -p "$(dirname "$file")"
    rm -rf -- "$file"
    if [ "${line%% *}" != none ]; then
        git --git-dir="$SNAPSHOT" cat-file blob "${line%% *}" > "$file" 2>/dev/null || exit 81
        [ "$(git hash-object --no-filters -- "$file")" = "${line%% *}" ] || exit 81
        case "$file" in */hooks/*) chmod a+x "$file" ;; esac
    fi
done
"""
TAKE = (
    """
command -v git >/dev/null || exit 80
repo="$(pwd -P)"
case "$SNAPSHOT/" in "$repo"/*) SNAPSHOT="$(mktemp -d "${TMPDIR:-/tmp}/polarq.XXXXXX")/snapshot" ;; esac
mkdir -p "$(dirname "$SNAPSHOT")"
theirs() { env -u GIT_DIR -u GIT_WORK_TREE GIT_CEILING_DIRECTORIES="$(dirname "$repo")" \
    git -c safe.directory='*' "$@" 2>/dev/null || true; }
head="$(theirs rev-parse -q --verify 'HEAD^{commit}')"
objects="$(theirs rev-parse --git-path objects)"
exclude="$(theirs rev-parse --git-path info/exclude)"
export GIT_DIR="$SNAPSHOT"
new_repository
if [ -n "$exclude" ] && [ -f "$exclude" ]; then cat "$exclude" > "$SNAPSHOT/info/exclude"; fi
printf '%s\\n' "$OURS" >> "$SNAPSHOT/info/exclude"
if [ -n "$head" ]; then
    # By link where that costs nothing, so that the objects outlive the agent's repository; by reference in any case.
    if [ "$(stat -f -c %T "$SNAPSHOT")" != overlayfs ]; then
        cp -al "$objects/." "$SNAPSHOT/objects" 2>/dev/null || true
    fi
    # Another evaluator's record, of another folder, may be there already.
    (cd "$objects" && pwd -P) >> "$SNAPSHOT/objects/info/alternates"
    # Files that are tracked count even where .gitignore names them.
    git read-tree "$head"
fi
record || { tail -n 1 "$GIT_DIR/add.stderr" >&2; exit 1; }
tree="$(git write-tree)"
index="$(git hash-object --stdin < "$GIT_DIR/index")"
printf '%s\\0%s\\0%s\\0%s\\0%s\\0' "$repo" "$SNAPSHOT" "$head" "$tree" "$index"
KEEP=-w
"""
    + OUTSIDE
)
COMPARE = """
theirs="$SNAPSHOT/objects"
[ -d "$theirs" ] && command -v git >/dev/null || exit 81
chmod u+rwx "$(dirname "$SNAPSHOT")" 2>/dev/null || true
set +f; rm -rf -- "$SNAPSHOT".judging.*; set -f
spoilt() {
    # A full disk is not the agent's doing.
    head -c 65536 /dev/zero > "$SNAPSHOT.judging.probe"
    exit 81
}
GIT_DIR="$(mktemp -d "$SNAPSHOT.judging.XXXXXX")" || spoilt
new_repository
cat "$SNAPSHOT/info/exclude" > "$GIT_DIR/info/exclude" 2>/dev/null || true
# Objects by what is in them: index-pack gives each the id that it ought to have.
take_over() {
    sort -u > "$GIT_DIR/wanted"
    git cat-file --batch-check < "$GIT_DIR/wanted" | sed -n 's/ missing$//p' > "$GIT_DIR/missing"
    [ -s "$GIT_DIR/missing" ] || return 0
    GIT_ALTERNATE_OBJECT_DIRECTORIES="$theirs" git pack-objects -q --stdout < "$GIT_DIR/missing" |
        git index-pack --stdin >/dev/null
    [ -z "$(git cat-file --batch-check < "$GIT_DIR/missing" | sed -n '/ missing$/p')" ]
}
{ echo "$BASE"; GIT_ALTERNATE_OBJECT_DIRECTORIES="$theirs" git ls-tree -r -d "$BASE"; } 2>/dev/null |
    sed -n -e '1p' -e 's/^[0-9]* tree \\([0-9a-f]*\\)[[:space:]].*/\\1/p' | take_over 2>/dev/null || spoilt
git read-tree "$BASE" 2>/dev/null || spoilt
# With what it says of files, those that are as they were need not be read.
if [ "$(git hash-object --stdin < "$SNAPSHOT/index" 2>/dev/null || true)" = "$INDEX" ]; then
    cp -p "$SNAPSHOT/index" "$GIT_DIR/index"
fi
# Nobody keeps his work from being looked at; what was there before him keeps its mode in another sandbox only.
find . -name .git -prune -o -type d ! -perm -700 -exec chmod u+rwx {} \\; 2>/dev/null || true
find . -name .git -prune -o -type f ! -perm -400 -exec chmod u+r {} + 2>/dev/null || true
GIT_ALTERNATE_OBJECT_DIRECTORIES="$theirs" record || spoilt
# A pipe and its like are to git as if they were what they stand in the place of.
{ find . -name .git -prune -o ! -type d ! -type f ! -type l -print0 2>/dev/null || true; } |
    git update-index -z --force-remove --stdin
git diff-index --cached --raw --no-renames "$BASE" > "$GIT_DIR/raw"
{
    sed -n 's/^:1[02]0[0-9]* [0-9]* \\([0-9a-f]*\\) .*/\\1/p' "$GIT_DIR/raw"
    sed -n 's/^:[0-9]* 1[02]0[0-9]* [0-9a-f]* \\([0-9a-f]*\\) .*/\\1/p' "$GIT_DIR/raw"
} | take_over 2>/dev/null || spoilt
printf '%s\\0' "$GIT_DIR"
git diff-index --cached --raw -z --no-renames "$BASE"
"""
PATCH = """
export GIT_INDEX_FILE="$GIT_DIR/patch.index"
git read-tree "$BASE"
git update-index -z --index-info
git diff --binary --cached --full-index --no-renames --no-ext-diff --no-textconv --no-color "$BASE" \
    > "$GIT_DIR/patch.diff"
"""
RESTORE = """
export GIT_INDEX_FILE="$GIT_DIR/restore.index"
git read-tree "$BASE"
git checkout-index -f -q -z --stdin
"""
DROP_BYTE_CODE = """
export GIT_INDEX_FILE="$GIT_DIR/restore.index"
git read-tree "$BASE"
find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf -- {} +
git ls-files -z -- ':(glob)**/__pycache__/**' | git checkout-index -f -q -z --stdin
"""
