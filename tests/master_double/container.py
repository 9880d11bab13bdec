"""A container, played by a process of this machine.

Two ways give each process its own /run/determined, where the harness keeps what it knows about its
task, and its own /determined_shared_fs, the checkpoint storage:

* `namespace`: private mount and PID namespaces (`unshare`, needs root). Closest to a container:
  the paths are the real ones for every program, and a kill takes every process started inside.
  The two mount points are created once, empty, on the machine.
* `shim`: nothing is mounted; a `sitecustomize` module moves the paths inside the harness. Needs no
  rights, but reaches only Python programs that keep the PYTHONPATH they are given, and a kill only
  the process group.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
MOUNT_POINTS = (Path("/run/determined"), Path("/determined_shared_fs"))
_UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# How long the output of processes that outlived their container is still awaited.
_DRAIN_SECONDS = 5.0


@functools.cache
def best_isolation() -> str:
    """`namespace` where it works, otherwise `shim`."""
    probe = [*_UNSHARE, "mount", "--bind", *map(str, MOUNT_POINTS)]
    try:
        for point in MOUNT_POINTS:
            point.mkdir(parents=True, exist_ok=True)
        subprocess.run(probe, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "shim"
    return "namespace"


class Container:
    """Starts `command` in its own root; `wait` gives the exit code as a container reports it."""

    def __init__(
        self,
        root: Path,
        storage: str,
        isolation: str,
        command: list[str],
        env: dict[str, str],
        on_line: Callable[[str, str], None],
    ) -> None:
        for directory in ("info", "workdir", "train/model", "train/logs", "home"):
            (root / directory).mkdir(parents=True, exist_ok=True)
        if isolation == "namespace":
            script = str(SCRIPTS / "namespace.sh")
            workdir = "/run/determined/workdir"
            command = [*_UNSHARE, "bash", script, str(root), storage, workdir, *command]
        else:
            env = {
                **env,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPTS / "shim"), env.get("PYTHONPATH")])),
                "MASTER_DOUBLE_ROOT": str(root),
                "MASTER_DOUBLE_STORAGE": storage,
            }
        self._root = root
        self._lock = threading.Lock()
        self._reaped = False
        self._on_line = on_line
        self._process = subprocess.Popen(
            command,
            cwd=root / "workdir",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()

    def kill(self) -> None:
        """SIGKILL to everything, as when a container is removed; nobody gets to clean up."""
        with self._lock:
            # Once reaped, the number may belong to somebody else's process group.
            if not self._reaped:
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        # Wait without reaping, so that the end of the first process can be made the end of the
        # others while the group's number is still ours.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        with self._lock:
            code = self._process.wait()
            self._reaped = True
        for reader in self._readers:
            reader.join(_DRAIN_SECONDS)
        shutil.rmtree(self._root, ignore_errors=True)
        return code if code >= 0 else 128 - code

    def _read(self, name: str) -> None:
        with getattr(self._process, name) as stream:
            for line in stream:
                self._on_line(name, line.decode(errors="replace").rstrip("\r\n"))
