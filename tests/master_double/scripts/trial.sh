# The life of a trial's container, in the order of the real one, minus the pip install.
# Everything runs under errexit, the hook too; the hook is sourced, so it can change the PATH and
# with it the python3 of the steps after it.
set -e
export DET_PYTHON_EXECUTABLE="${DET_PYTHON_EXECUTABLE:-python3}"
# prep_container replaces the link /tmp/tensorboard, which trials share here: one at a time.
flock "$1" "$DET_PYTHON_EXECUTABLE" -m determined.exec.prep_container \
    --download_context_directory --resources --proxy
set -x
test -f startup-hook.sh && source startup-hook.sh
set +x
"$DET_PYTHON_EXECUTABLE" -m determined.exec.prep_container --rendezvous
exec "$DET_PYTHON_EXECUTABLE" -m determined.exec.launch
