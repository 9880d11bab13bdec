# The life of a command's container: context, hook, then one argument through sh, several as they are.
lock="$1"
shift
set -e
export DET_PYTHON_EXECUTABLE="${DET_PYTHON_EXECUTABLE:-python3}"
flock "$lock" "$DET_PYTHON_EXECUTABLE" -m determined.exec.prep_container \
    --download_context_directory --resources --proxy
set -x
test -f startup-hook.sh && source startup-hook.sh
set +x
if [ "$#" -eq 1 ]; then
    exec /bin/sh -c "$1"
fi
exec "$@"
