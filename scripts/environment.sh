# Sourced by the other scripts: changes to the repository's root, sets $python to an interpreter that can run
# megajax and puts its tools first on the PATH. Makes .venv, and installs again when pyproject.toml or
# constraints.txt changed.
#   PYTHON          make .venv from this interpreter
#   MEGAJAX_PYTHON  use this interpreter as it is (a container's, say); nothing is installed

fail() {
    echo "$1" >&2
    exit 1
}

can_make_environment() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Prints the first Python >= 3.12 that can make environments: the version that the pins were tested with
# first, then those of pyenv, whose shims fail for versions that are not switched on.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ] && ! can_make_environment "$PYTHON"; then
        echo "PYTHON=$PYTHON is not a Python >= 3.12 with venv and pip: looking for another one." >&2
    fi
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3.14 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python "$HOME"/.pyenv/versions/*/bin/python; do
        if can_make_environment "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "No Python >= 3.12 with venv and pip on the PATH or under pyenv: install one, or set PYTHON to it."
}

# Prints the extras that this machine needs: CUDA 13 wants driver 580, CUDA 12 runs with older ones. The extra dev has
# jax's plugin for CUDA 13, which cannot stand beside the one for CUDA 12.
find_extras() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=""
    case "${driver%%.*}" in
        "" | *[!0-9]*) echo "dev" ;;
        *) if [ "${driver%%.*}" -ge 580 ]; then echo "dev,cuda13"; else echo "tools,cuda12"; fi ;;
    esac
}

make_environment() {
    local python extras stamp log=.venv/install.log
    extras=$(find_extras)
    stamp="$extras $(cat pyproject.toml constraints.txt | cksum)"
    if .venv/bin/python -c "" 2>/dev/null && [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if ! can_make_environment .venv/bin/python; then
        python=$(find_python)
        "$python" -m venv --clear .venv || fail "$python could not make .venv: set PYTHON to another Python >= 3.12."
    fi
    echo "Installing megajax and what it needs into .venv (some minutes the first time)." >&2
    .venv/bin/python -m pip install --editable ".[$extras]" --constraint constraints.txt >"$log" 2>&1 ||
        fail "Installing into .venv failed: $(grep -i '^error' "$log" | head -n 1) (see $log)"
    echo "$stamp" >.venv/stamp
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -n "${MEGAJAX_PYTHON:-}" ]; then
    python=$(command -v "$MEGAJAX_PYTHON") ||
        fail "MEGAJAX_PYTHON=$MEGAJAX_PYTHON is no program: set it to a Python >= 3.12 that has what megajax needs."
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
else
    make_environment
    python=$PWD/.venv/bin/python
fi
export PATH="${python%/*}:$PATH"
