"""The cluster's only machine: gives an allocation its environment and a container, and reports
its end.

The environment is that of a real container and nothing else: variables of the process that runs
the double do not leak into trials (a leaked DET_MASTER or PYTHONPATH would hide mistakes), except
what a test passes as `env`. HOME is private, so cached logins stay apart.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .container import SCRIPTS, Container
from .records import Allocation, LogLine, Task, World, now
from .retention import storage_directory
from .schema import environment_variables

# All doubles of a machine share /tmp/tensorboard, hence one lock for all of them.
_LOCK_FILE = Path(tempfile.gettempdir(), f"master_double.{os.getuid()}.lock")


@dataclass
class Job:
    """Everything needed to run an allocation."""

    task: Task
    allocation: Allocation
    config: dict[str, Any]
    variables: dict[str, str]
    on_exit: Callable[[Allocation], None]
    arguments: list[str] = field(default_factory=list)


class Agent:
    def __init__(
        self,
        world: World,
        root: Path,
        python: str,
        isolation: str,
        env: dict[str, str],
        on_log: Callable[[Task, str], None],
    ) -> None:
        self.isolation = isolation
        self.master_url = ""
        self._world = world
        self._root = root
        self._python = python
        self._env = env
        self._on_log = on_log
        self._containers: dict[str, Container] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def launch(self, job: Job) -> None:
        thread = threading.Thread(target=self._live, args=(job,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def kill(self, allocation: Allocation) -> None:
        """The caller has noted in the allocation why; here it only ends."""
        with self._world.changed:
            container = self._containers.get(allocation.id)
            if container is not None:
                container.kill()
            self._world.changed.notify_all()

    def close(self) -> None:
        with self._world.changed:
            self._closed = True
            for container in self._containers.values():
                container.kill()
            self._world.changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=10)

    def _live(self, job: Job) -> None:
        allocation = job.allocation
        code, reason = self._run(job)
        with self._world.changed:
            self._containers.pop(allocation.id, None)
            allocation.state = "TERMINATED"
            allocation.end_time = now()
            allocation.exit_code = code
            allocation.exit_reason = reason
            if not self._closed:
                job.on_exit(allocation)
            self._world.changed.notify_all()

    def _run(self, job: Job) -> tuple[int | None, str | None]:
        allocation, changed = job.allocation, self._world.changed
        with changed:
            if self._unwanted(allocation):
                return None, "allocation killed before its container started"
            missing = self._missing_paths(job)
            if missing:
                text = f"container failed to start: bind source path does not exist: {missing}"
                self._log(job, "stderr", text)
                return None, text
            container = self._start(job)
            self._containers[allocation.id] = container
            allocation.state = "RUNNING"
            changed.notify_all()
        code = container.wait()
        shutil.rmtree(f"/tmp/tensorboard-{allocation.id}-0", ignore_errors=True)
        if code == 0:
            return 0, None
        return code, f"container failed with non-zero exit code: {code} (exit code {code})"

    def _unwanted(self, allocation: Allocation) -> bool:
        return self._closed or allocation.killed or allocation.agent_lost

    @staticmethod
    def _missing_paths(job: Job) -> str:
        wanted = []
        for mount in job.config.get("bind_mounts") or []:
            wanted += [mount["host_path"], mount["container_path"]]
        if job.task.kind == "TRIAL":
            storage = job.config["checkpoint_storage"]
            wanted.append(storage.get("host_path") or storage["container_path"])
        # Relative container paths are below the working directory, where Docker creates them.
        return ", ".join(p for p in wanted if p.startswith("/") and not os.path.exists(p))

    def _start(self, job: Job) -> Container:
        storage = ""
        if job.task.kind == "TRIAL":
            settings = job.config["checkpoint_storage"]
            storage_directory(job.config).mkdir(parents=True, exist_ok=True)
            storage = settings.get("host_path") or ""
        script = SCRIPTS / f"{job.task.kind.lower()}.sh"
        return Container(
            root=self._root / job.allocation.id,
            storage=storage,
            isolation=self.isolation,
            command=["bash", str(script), str(_LOCK_FILE), *job.arguments],
            env=self._environment(job),
            on_line=lambda stream, text: self._log(job, stream, text),
        )

    def _environment(self, job: Job) -> dict[str, str]:
        task, allocation = job.task, job.allocation
        interpreter_first = os.pathsep.join([os.path.dirname(self._python), os.environ.get("PATH", os.defpath)])
        return {
            "PATH": interpreter_first,
            "HOME": str(self._root / allocation.id / "home"),
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            **self._env,
            **environment_variables(job.config, allocation.slots),
            "DET_MASTER": self.master_url,
            "DET_CLUSTER_ID": "master-double",
            "DET_AGENT_ID": "agent-1",
            "DET_SLOT_IDS": json.dumps(list(range(allocation.slots))),
            "DET_TASK_ID": task.id,
            "DET_TASK_TYPE": task.kind,
            "DET_ALLOCATION_ID": allocation.id,
            "DET_SESSION_TOKEN": allocation.token,
            "DET_USER": task.user,
            "DET_USER_TOKEN": self._world.new_user_token(task.user),
            "DET_RESOURCES_TYPE": "docker-container",
            "DET_RESOURCES_ID": allocation.resources_id,
            "DET_CONTAINER_ID": allocation.container_id,
            **job.variables,
        }

    def _log(self, job: Job, stream: str, text: str) -> None:
        task, allocation = job.task, job.allocation
        with self._world.changed:
            line = LogLine(len(task.logs) + 1, now(), stream, text, allocation.id, allocation.container_id)
            task.logs.append(line)
            self._on_log(task, text)
            self._world.changed.notify_all()
