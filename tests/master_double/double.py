"""`MasterDouble`: the object that tests hold."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from . import routes_access, routes_container, routes_jobs, routes_models
from .agent import Agent
from .container import best_isolation
from .faults import Faults
from .records import Command, Experiment, Model, Project, Trial, World
from .rules import Rules
from .schema import (
    ConfigError,
    check_experiment,
    complete_experiment,
    constant_hyperparameters,
    grid_points,
    replace_paths,
)
from .server import Server


class MasterDouble:
    """A running master; leaving the `with` block kills its containers and deletes its files.

    Arguments:
        version: what the master claims to be; before 0.38 progress is a bare number.
        python: interpreter whose directory comes first on the PATH of containers. Its harness is
            the one trials use, so it decides the harness version inside.
        path_map: replaces path prefixes in every string of submitted configurations, so that
            shipped files with the cluster's absolute paths run on this machine.
        env: further environment variables of every container.
        workspaces: names of workspaces and of their projects.
        users: names and passwords.
        resource_pools: the pools a configuration must name; None accepts any, even none.
        preemption_timeout: seconds until a container that ignores the signal is killed.
        collection_delay: seconds from an experiment's end to the collection of its checkpoints.
        isolation: "namespace", "shim" or "auto", see `container.py`.
        directory: where everything is kept; a temporary directory without it.
    """

    def __init__(
        self,
        *,
        version: str = "0.35.0",
        host: str = "127.0.0.1",
        port: int = 0,
        python: str = sys.executable,
        path_map: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        workspaces: Mapping[str, Sequence[str]] | None = None,
        users: Mapping[str, str] | None = None,
        resource_pools: Sequence[str] | None = None,
        preemption_timeout: float = 3600.0,
        collection_delay: float = 0.5,
        isolation: str = "auto",
        directory: str | Path | None = None,
    ) -> None:
        self.version = version
        self.legacy = tuple(int(part) for part in version.split(".")[:2]) < (0, 38)
        self.path_map = dict(path_map or {})
        self.users = dict(users or {"determined": "", "admin": ""})
        self.resource_pools = resource_pools
        self.faults = Faults()
        # (method, path, status) of everything answered, oldest first.
        self.requests: list[tuple[str, str, int]] = []
        # Errors of the double itself, which clients saw as status 500.
        self.internal_errors: list[Exception] = []
        self.closed = False
        self._temporary = directory is None
        self.directory = Path(directory or tempfile.mkdtemp(prefix="master_double."))
        self.checkpoint_directory = self.directory / "checkpoints"
        self.checkpoint_directory.mkdir(parents=True, exist_ok=True)

        self.world = World()
        for name, projects in {"Uncategorized": ["Uncategorized"], **(workspaces or {})}.items():
            workspace = self.world.add_workspace(name)
            for project in projects:
                self.world.add_project(workspace, project)

        self.rules = Rules(self.world, preemption_timeout, collection_delay)
        self.agent = Agent(
            self.world,
            self.directory / "containers",
            python,
            best_isolation() if isolation == "auto" else isolation,
            dict(env or {}),
            self.rules.log_written,
        )
        self.rules.agent = self.agent
        tables = [m.routes for m in (routes_access, routes_jobs, routes_models, routes_container)]
        self._server = Server(self, host, port, tables)
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self.agent.master_url = self.url
        # The interval only bounds how long a close takes.
        serving = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        serving.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        with self.world.changed:
            self.closed = True
            self.faults.closed.set()
            self.world.changed.notify_all()
        self.agent.close()
        self._server.shutdown()
        self._server.server_close()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    # ---- looking

    @property
    def experiments(self) -> dict[int, Experiment]:
        return self.world.experiments

    @property
    def trials(self) -> dict[int, Trial]:
        return self.world.trials

    @property
    def commands(self) -> dict[str, Command]:
        return self.world.commands

    @property
    def models(self) -> dict[int, Model]:
        return self.world.models

    def wait_until(self, condition: Callable[[], Any], timeout: float = 120.0) -> None:
        """Returns once `condition` holds; it is asked again after every change."""
        with self.world.changed:
            if not self.world.changed.wait_for(condition, timeout):
                raise TimeoutError(f"condition still false after {timeout} s")

    # ---- troubling

    def lose_agent(self, trial_id: int) -> None:
        """The machine vanishes under the trial, which does not count as a restart."""
        with self.world.changed:
            self.rules.lose_agent(self.trials[trial_id])

    # ---- submitting; expects the lock to be held

    def create_experiment(
        self,
        config_text: str,
        config: dict[str, Any],
        files: list[dict[str, Any]],
        user: str,
        *,
        project_id: int,
        activate: bool,
    ) -> Experiment:
        if not isinstance(config, dict):
            raise ConfigError("invalid experiment configuration: not a mapping")
        try:
            check_experiment(config)
        except ConfigError as error:
            raise ConfigError(f"invalid experiment configuration: {error}") from error
        project = self._project_of(config, project_id)
        identity = len(self.experiments) + 1
        default_storage = {"type": "shared_fs", "host_path": str(self.checkpoint_directory)}
        full = complete_experiment(config, f"Experiment {identity}", default_storage, identity)
        full = replace_paths(full, self.path_map)
        self.check_resource_pool(full)
        experiment = Experiment(identity, user, project, config_text, full, files)
        searcher, hyperparameters = full["searcher"], full["hyperparameters"]
        if searcher["name"] == "grid":
            experiment.points = grid_points(hyperparameters)
        elif searcher["name"] == "single":
            experiment.points = [constant_hyperparameters(hyperparameters)]
        else:
            raise ConfigError(f"searcher {searcher['name']} is not imitated")
        self.experiments[identity] = experiment
        for _ in range(min(searcher.get("max_concurrent_trials") or 16, len(experiment.points))):
            self.rules.create_trial(experiment)
        if activate:
            self.rules.activate(experiment)
        self.world.changed.notify_all()
        return experiment

    def _project_of(self, config: dict[str, Any], project_id: int) -> Project:
        # Project 1 is the default one; only another one overrules the configuration.
        if project_id > 1:
            if project_id not in self.world.projects:
                raise ConfigError(f"project {project_id} not found")
            return self.world.projects[project_id]
        if not config.get("workspace"):
            return self.world.projects[1]
        for project in self.world.projects.values():
            names = (project.workspace.name, project.name)
            if names == (config["workspace"], config["project"]):
                return project
        raise ConfigError(f"workspace {config['workspace']!r} has no project {config['project']!r}, or does not exist")

    def check_resource_pool(self, config: dict[str, Any]) -> None:
        pool = config["resources"]["resource_pool"]
        if self.resource_pools is not None and pool not in self.resource_pools:
            raise ConfigError(f"resource pool {pool!r} does not exist or is not available")
