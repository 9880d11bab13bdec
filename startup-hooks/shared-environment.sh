# Sourced before every stage and shell: puts the GPU environment of the shared file system first on PATH.
#
# It installs nothing: the instance's own disk is wiped at the end and filling it takes the node down, and compute
# nodes cannot reach a package index. Make the environment once, on the login node (README, "On the cluster").
# Determined sources hooks under `set -e`, so a plain `exit` ends the task with the line before it as the reason.

if [ ! -d "${SHARED_FOLDER:-}" ]; then
    echo "startup hook: the shared folder '${SHARED_FOLDER:-unset}' is not mounted; check bind_mounts" >&2
    exit 1
fi
if [ ! -x "${SHARED_VENV:-}/bin/python" ]; then
    echo "startup hook: no environment at '${SHARED_VENV:-unset}'; make it as the README says" >&2
    exit 1
fi

# Packages on PYTHONPATH would shadow the environment's torch.
unset PYTHONPATH
export VIRTUAL_ENV="$SHARED_VENV"
export PATH="$SHARED_VENV/bin:$PATH"
export DET_PYTHON_EXECUTABLE="$SHARED_VENV/bin/python"
export PYTHONUNBUFFERED=1

if ! "$DET_PYTHON_EXECUTABLE" -c 'import determined' 2>/dev/null; then
    echo "startup hook: '$SHARED_VENV' cannot import determined, which starts the task; install requirements-gpu.txt" >&2
    exit 1
fi

# Compiled kernels outlive the instance; nothing is ever fetched.
export XDG_CACHE_HOME="$SHARED_FOLDER/.cache"
export TRITON_CACHE_DIR="$XDG_CACHE_HOME/triton" TORCHINDUCTOR_CACHE_DIR="$XDG_CACHE_HOME/inductor"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRL_EXPERIMENTAL_SILENCE=1

# One thread a core of this container, shared out among the trial's processes, of which each slot has one: processes that
# fight for cores were 40 times slower. At most 8: with one for every core of a big node small operations were 13 times
# slower.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc)
    if read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max && [ "$quota" != max ] && [ "$quota" -lt $((cores * period)) ]; then
        cores=$((quota / period))
    fi
    commas=$(printf %s "${DET_SLOT_IDS:-[]}" | tr -cd ,)
    threads=$((cores / (${#commas} + 1)))
    if [ "$threads" -gt 8 ]; then threads=8; fi
    if [ "$threads" -lt 1 ]; then threads=1; fi
    export OMP_NUM_THREADS=$threads
fi
