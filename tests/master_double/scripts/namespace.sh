# Runs first in a container's own mount namespace: puts the fixed paths of a container in place.
# Arguments: root, checkpoint directory or "", working directory, then the command.
set -e
mount --bind "$1" /run/determined
if [ -n "$2" ]; then
    mount --bind "$2" /determined_shared_fs
fi
cd "$3"
shift 3
exec "$@"
