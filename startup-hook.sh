# Determined sources this file from the root of the uploaded context before every task.
. startup-hooks/shared-environment.sh
