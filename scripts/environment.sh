# Sourced by the other scripts, as `source environment.sh train` or `... dev`: changes to the repository's root, sets
# $python to an interpreter that can run megajax (dev: also its tests and tools) and puts its programs first on the
# PATH. Makes .venv, and installs again if pyproject.toml or constraints.txt changed.
#   PYTHON          make .venv from this interpreter
#   MEGAJAX_PYTHON  use this interpreter unchanged (for example a container's); nothing is installed

fail() {
    echo "$1" >&2
    exit 1
}

can_make_environment() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Prints the first Python >= 3.12 that can make environments. 3.12, the tested version, comes first; pyenv's versions
# come last, by path, because its shims fail for inactive versions.
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

# Prints jax's extra for this machine's GPUs, if it has any: CUDA 13 needs driver 580, CUDA 12 runs with older ones.
find_cuda() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=""
    case "${driver%%.*}" in
        "" | *[!0-9]*) ;;
        *) if [ "${driver%%.*}" -ge 580 ]; then echo "cuda13"; else echo "cuda12"; fi ;;
    esac
}

# Installs for a purpose, `train` or `dev`. .venv/stamp has a line per installed purpose; it is written last, so that an
# interrupted installation is repeated.
make_environment() {
    local purpose=$1 cuda extras python sum log=.venv/install.log
    cuda=$(find_cuda)
    sum="$cuda $(cat pyproject.toml constraints.txt | cksum)"
    if .venv/bin/python -c "" 2>/dev/null && grep -qxF "$purpose $sum" .venv/stamp 2>/dev/null; then
        return
    fi
    extras=$cuda
    if [ "$purpose" = dev ]; then
        # The extra dev has jax's plugin for CUDA 13, which conflicts with the one for CUDA 12.
        if [ "$cuda" = cuda12 ]; then extras="tools,cuda12"; else extras="dev${cuda:+,$cuda}"; fi
    fi
    if ! can_make_environment .venv/bin/python; then
        python=$(find_python)
        "$python" -m venv --clear .venv || fail "$python could not make .venv: set PYTHON to another Python >= 3.12."
    fi
    echo "Installing megajax and its packages into .venv (a minute or more the first time)." >&2
    rm -f .venv/stamp
    .venv/bin/python -m pip install --no-compile --editable ".${extras:+[$extras]}" --constraint constraints.txt \
        >"$log" 2>&1 || fail "Installing into .venv failed: $(grep -i '^error' "$log" | head -n 1) (see $log)"
    # Compile on all cores, pip would use one. Some packages have templates that are not Python. What few programs import
    # is compiled then: it is half of the code.
    .venv/bin/python -m compileall -q -j 0 -x '/(tests?|pip|scipy|mlflow|databricks|debugpy|wandb)/' .venv/lib \
        >/dev/null 2>&1 || true
    echo "train $sum" >.venv/stamp
    if [ "$purpose" = dev ]; then echo "dev $sum" >>.venv/stamp; fi
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -n "${MEGAJAX_PYTHON:-}" ]; then
    python=$(command -v "$MEGAJAX_PYTHON") ||
        fail "MEGAJAX_PYTHON=$MEGAJAX_PYTHON is not a program: set it to a Python >= 3.12 with megajax's packages."
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
else
    make_environment "$1"
    python=$PWD/.venv/bin/python
fi
export PATH="${python%/*}:$PATH"
