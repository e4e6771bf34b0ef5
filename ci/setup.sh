# shellcheck shell=bash
# Sourced by the commands beside it. `set_up` makes .venv fit for this checkout; ROOT and BIN say where things are.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
BIN=$VENV/bin
STAMP=$VENV/set-up.stamp
UNFINISHED=$VENV/set-up.unfinished
WAIT_S=1800

say() { printf 'set-up: %s\n' "$*" >&2; }

fail() { # STEP REMEDY
    printf 'set-up: FAILED at: %s\nset-up: what to do: %s\n' "$1" "$2" >&2
    exit 3
}

attempt() { # STEP REMEDY COMMAND...: quiet unless it fails
    local step=$1 remedy=$2
    shift 2
    if ! "$@" </dev/null >"$LOG" 2>&1; then
        printf 'set-up: the last lines of %s:\n' "$LOG" >&2
        tail -n 20 "$LOG" | sed 's/^/    /' >&2
        fail "$step" "$remedy"
    fi
}

# The interpreter that was asked for; else the one that .venv has; else python3.
interpreter() {
    if [[ -z ${PYTHON:-} && -x $BIN/python ]]; then printf '%s' "$BIN/python"; else printf '%s' "${PYTHON:-python3}"; fi
}

# What .venv was made from; it is fit as long as this is what the stamp says. The folder is part of it, since neither
# a virtual environment nor an editable install survives a move.
state() {
    printf '%s\n' "$ROOT"
    "$(interpreter)" --version 2>&1
    (cd "$ROOT" && sha256sum pyproject.toml ci/constraints.txt)
}

# An interrupted set-up leaves its mark: what it installed may be half a package that looks whole.
is_set_up() { [[ ! -e $UNFINISHED && -f $STAMP && $(<"$STAMP") == "$(state)" ]]; }

set_up() {
    is_set_up && return
    # The lock is on a folder of the checkout: .venv itself may be made anew, and a file would have to be ignored.
    exec {lock}<"$ROOT/ci"
    if ! flock -n "$lock"; then
        say "another command is setting up; waiting for it, at most $WAIT_S s"
        flock -w "$WAIT_S" "$lock" || fail "waiting for another set-up" "end that command, then run this one again"
    fi
    if ! is_set_up; then
        LOG=$(mktemp "${TMPDIR:-/tmp}/set-up.XXXXXX.log")
        is_usable || make_environment
        install_packages
        rm -f "$LOG"
    fi
    exec {lock}<&-
}

# Whether .venv can be installed into: whole, and of the Python that was asked for.
is_usable() {
    local like=${PYTHON:-$BIN/python}
    [[ ! -e $UNFINISHED ]] && "$BIN/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
        && [[ $("$BIN/python" --version) == "$("$like" --version 2>&1)" ]]
}

make_environment() {
    local python=${PYTHON:-python3} version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2], int(sys.version_info >= (3, 10)))') \
        || fail "looking for Python" "$python does not run; set PYTHON to a Python of 3.10 or newer"
    [[ $version == *" 1" ]] \
        || fail "looking for Python" "$python is Python ${version% *}; set PYTHON to one of 3.10 or newer"
    say "making .venv with Python ${version% *}"
    rm -rf "$VENV"
    mkdir "$VENV"
    touch "$UNFINISHED"
    attempt "python -m venv" "install Python's venv module (on Debian: apt-get install python3-venv), or set PYTHON" \
        "$python" -m venv "$VENV"
}

install_packages() {
    local made_from remedy="see the lines above: what cannot be found or does not fit is pinned in ci/constraints.txt or \
asked for in pyproject.toml; else check network and disk; then run this command again"
    made_from=$(state)
    say "installing what pyproject.toml and ci/constraints.txt ask for: minutes the first time"
    touch "$UNFINISHED"
    rm -f "$STAMP"
    # An editable install without a setup.py needs pip 21.3; early releases of Python 3.10 bring an older one.
    attempt "pip install pip" "$remedy" "$BIN/python" -m pip install 'pip>=21.3'
    attempt "pip install" "$remedy" "$BIN/python" -m pip install -c "$ROOT/ci/constraints.txt" -e "${ROOT}[dev]"
    printf '%s\n' "$made_from" >"$STAMP"
    rm "$UNFINISHED"
}
