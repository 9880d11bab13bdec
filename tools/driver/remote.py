"""The cluster as the driver sees it: a dozen questions to Determined's SDK (0.35.0 and 0.38.1).

Where the SDK's objects leave something out (configuration as submitted, restarts, allocations, notes of a model
version), the same answers are read with the SDK's own bindings. ``GetMaster`` is not asked: 0.38.1 cannot read what
a 0.35 master answers; ``/info`` tells the version to both.

``determined`` is imported when a master is first wanted, so that help and refusals stay instant.
"""

import getpass
import io
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import yaml

from recipe.errors import Refused
from recipe.files import write_bytes, write_lines
from tools.driver.patience import NO_LOGIN, PATIENCE, Away, Patience, first_line, in_one_line, passing, timed
from tools.driver.records import Cluster, Experiment, Policy, Registered, Segment, Stored

ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")


@dataclass(frozen=True)
class Report:
    """Metrics that a trial reported; ``run`` counts the trial's runs between pauses, losses and restarts."""

    group: str
    run: int
    steps: int
    metrics: dict


@dataclass(frozen=True)
class Labelled:
    """An experiment found by its label."""

    id: int
    name: str
    state: str


@dataclass(frozen=True)
class View:
    """One look at an experiment. ``metrics`` has the last value of every number that it reported."""

    state: str
    steps: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class TrialView:
    """One look at a trial of a search. ``metrics`` as in :class:`View`."""

    id: int
    hyperparameters: dict
    state: str
    steps: int
    restarts: int
    metrics: dict[str, float]


@contextmanager
def _without_prompt(address: str) -> Iterator[None]:
    """Determined asks on the terminal when no token is valid any more; a driver nobody watches would hang there."""

    def refuse(*_, **__):
        raise Refused(NO_LOGIN.format(address))

    asked, getpass.getpass = getpass.getpass, refuse
    try:
        yield
    finally:
        getpass.getpass = asked


def connect(
    recorded: str | None = None,
    say: Callable[[str], None] = partial(print, file=sys.stderr),
    sleep: Callable[[float], None] = time.sleep,
    limit: float = PATIENCE,
) -> "Master":
    """Log in by Determined's own means: DET_MASTER (else the ``recorded`` address), the user's cached login, DET_USER.

    ``say`` shows a line to the user, when the master is waited for, and ``limit`` says for how many seconds at most.

    Raises:
        Refused: no such package, no master, or no valid login.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the package warns of its own old names
            import determined
            from determined.common import api
            from determined.common.api import errors
            from determined.experimental.client import Determined
    except ModuleNotFoundError:
        raise Refused("determined is not installed here; install it, or use run --local") from None
    named = os.environ.get("DET_MASTER") or os.environ.get("DET_MASTER_ADDR")
    try:
        address = api.canonicalize_master_url(named or recorded or api.get_default_master_url())
    except ValueError as error:
        raise Refused(f"DET_MASTER is no address: {error}") from None
    patience = Patience(address, say, sleep, limit)
    with _without_prompt(address), timed():
        about = patience.asked(lambda: _about(address), found=False)
        try:
            client = patience.asked(lambda: Determined(master=address), known=(errors.CorruptTokenCacheException,))
        except errors.CorruptTokenCacheException:
            raise Refused(NO_LOGIN.format(address)) from None
    cluster = Cluster(about["cluster_id"], address, about["version"], determined.__version__)
    return Master(client, cluster, say, sleep, limit)


def _about(address: str) -> dict:
    """What a master tells of itself to anybody."""
    from determined.common import api
    from determined.common.api import certs

    about = api.UnauthSession(master=address, cert=certs.default_load(address)).get("info").json()
    if not isinstance(about, dict) or not all(isinstance(about.get(key), str) for key in ("cluster_id", "version")):
        raise Away("an answer of another form")
    return about


class Master:
    """A logged-in master. Questions are asked again while it does not answer; a submission never is."""

    def __init__(
        self,
        client,
        cluster: Cluster,
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        limit: float = PATIENCE,
    ):
        self._client, self._session = client, client._session
        self._asked = Patience(cluster.address, say, sleep, limit).asked
        self.cluster = cluster

    def page(self, experiment: int) -> str:
        """Address of an experiment's page in the web interface."""
        return f"{self.cluster.address}/det/experiments/{experiment}"

    def project(self, workspace: str, name: str) -> int:
        """Id of a project, which is made where it is missing; the workspace must be there."""

        def found_or_made() -> int:
            spaces = {space.name: space for space in self._client.list_workspaces()}
            if workspace not in spaces:
                raise Refused(f"workspace {workspace} is not on {self.cluster.address} (or not yours); see site.yaml")
            projects = {project.name: project.id for project in spaces[workspace].list_projects()}
            if name not in projects:  # made and the answer lost: the next time it is there
                projects[name] = spaces[workspace].create_project(name, "agentic RL on German tasks").id
            return projects[name]

        return self._asked(found_or_made)

    def find(self, project: int, stage: str, plan: str, label: str) -> list[int]:
        """Experiments of a stage with this plan file that carry ``label`` or have not ended (started by hand).

        The plan file is compared because two run folders may hold equal plans.
        """
        labelled = self._asked(lambda: self._client.list_experiments(labels=[label], project_id=project))
        named = self._asked(lambda: self._client.list_experiments(name=stage, project_id=project))
        alive = [found for found in named if found.name == stage and _state(found) not in ENDED]
        ids = sorted({found.id for found in [*labelled, *alive]})
        return [number for number in ids if _plan_of(self._experiment(number).config) == plan]

    def submit(self, configuration: dict, context: Path, project: int) -> int | None:
        """Create and start an experiment with ``context`` as its files; returns its id.

        None: the answer got lost, and there may be an experiment or none. Never asked again here, for that reason.

        Raises:
            Refused: what the master says about the configuration.
        """
        from determined.common.api import errors

        try:
            with redirect_stdout(io.StringIO()):  # the SDK's count of files
                return self._client.create_experiment(configuration, context, project_id=project).id
        except errors.UnauthenticatedException:
            with in_one_line(self.cluster.address):
                raise
        except Exception as error:
            away = passing(error)
            if away is not None and not away.rejected:
                return None
            if away is None and not isinstance(error, errors.BadRequestException | ValueError):
                raise
            raise Refused(f"stage {configuration['name']} cannot be submitted: {first_line(error)}") from None

    def annotate(self, experiment: int, text: str) -> None:
        """Replace the notes of an experiment, which its page shows as Markdown; one that was deleted has no page."""
        from determined.common.api import errors

        with suppress(errors.NotFoundException):
            self._asked(
                lambda: self._client.get_experiment(experiment).set_notes(text), known=(errors.NotFoundException,)
            )

    def look(self, experiment: int) -> View:
        """State ``DELETED`` also says that the master does not know the experiment."""
        from determined.common.api import errors

        try:
            found = self._experiment(experiment, errors.NotFoundException)
            trial = self._trial(experiment, errors.NotFoundException)
        except errors.NotFoundException:
            return View("DELETED", 0, {})
        if trial is None:
            return View(_state(found), 0, {})
        return View(_state(found), trial.totalBatchesProcessed, _last(trial))

    def state(self, experiment: int) -> str:
        """State of an experiment of any number of trials; ``DELETED`` as in :meth:`look`."""
        from determined.common.api import errors

        try:
            return _state(self._experiment(experiment, errors.NotFoundException))
        except errors.NotFoundException:
            return "DELETED"

    def trials(self, experiment: int) -> list[TrialView]:
        """Every trial of an experiment, in the order in which they were made."""
        from determined.common.api import bindings

        found = []
        while True:
            place = {"experimentId": experiment, "offset": len(found), "limit": 100}
            page = self._asked(partial(bindings.get_GetExperimentTrials, self._session, **place))
            found += page.trials
            if not page.trials or len(found) >= (page.pagination.total or 0):
                break
        views = [
            TrialView(
                trial.id,
                dict(trial.hparams or {}),
                trial.state.name,
                trial.totalBatchesProcessed,
                trial.restarts,
                _last(trial),
            )
            for trial in found
        ]
        return sorted(views, key=lambda view: view.id)

    def record(self, experiment: int) -> Experiment:
        """The facts of an experiment that has ended; asked again they are the same, but for collected checkpoints."""
        from determined.common.api import bindings
        from determined.experimental.client import CheckpointSortBy, OrderBy

        found = self._experiment(experiment)
        answer = self._asked(lambda: bindings.get_GetExperiment(self._session, experimentId=experiment).experiment)
        trial = self._trial(experiment)
        if trial is None:
            raise Refused(f"experiment {experiment} has no trial")
        listed = self._asked(lambda: found.list_checkpoints(CheckpointSortBy.BATCH_NUMBER, OrderBy.ASCENDING))
        storage, searcher = answer.config["checkpoint_storage"], answer.config["searcher"]
        validations = {report.steps_completed: report.metrics for report in self._reports(trial.id, "validation")}
        stored = [_stored(checkpoint, validations, searcher["metric"]) for checkpoint in listed]
        return Experiment(
            id=experiment,
            trial=trial.id,
            state=_state(found),
            restarts=trial.restarts,
            started=answer.startTime,
            finished=answer.endTime,
            configuration=yaml.safe_load(answer.originalConfig),
            segments=self._segments(trial),
            checkpoints=sorted(stored, key=lambda checkpoint: (checkpoint.steps, checkpoint.uuid)),
            policy=Policy(
                **{rule: storage[rule] for rule in ("save_experiment_best", "save_trial_best", "save_trial_latest")},
                smaller_is_better=searcher["smaller_is_better"],
            ),
            asked=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def stored(self, uuid: str) -> dict | None:
        """Metadata of a checkpoint that is still in the cluster's storage; None once it was deleted."""
        from determined.common.api import errors

        try:
            checkpoint = self._asked(lambda: self._client.get_checkpoint(uuid), known=(errors.NotFoundException,))
        except errors.NotFoundException:
            return None
        return dict(checkpoint.metadata) if checkpoint.state.name == "COMPLETED" else None

    def last_lines(self, experiment: int, count: int) -> list[str]:
        """The end of the trial's log, oldest line first."""
        trial = self._trial(experiment)
        if trial is None:
            return []
        lines = self._asked(lambda: list(self._client.get_trial(trial.id).iter_logs(tail=count)))
        return [line.rstrip("\n") for line in lines]

    def save_reports(self, experiment: int, log: Path, metrics: Path) -> None:
        """Write the trial's log and everything that it reported to two files; neither for one killed before its trial."""
        summary = self._trial(experiment)
        if summary is None:
            return
        lines = self._asked(lambda: list(self._client.get_trial(summary.id).iter_logs()))
        write_bytes(log, "".join(line if line.endswith("\n") else f"{line}\n" for line in lines).encode())
        write_lines(metrics, map(asdict, self._all_reports(summary)))

    def reports(self, experiment: int) -> list[Report]:
        """Everything that the trial reported."""
        summary = self._trial(experiment)
        return [] if summary is None else self._all_reports(summary)

    def labelled(self, label: str) -> list[Labelled]:
        """Experiments with this label that the user may see, in any project."""
        found = self._asked(lambda: self._client.list_experiments(labels=[label]))
        return [Labelled(one.id, one.name, _state(one)) for one in sorted(found, key=lambda one: one.id)]

    def register(
        self, name: str, uuid: str, holds: str, workspace: str, description: str, metadata: dict
    ) -> Registered:
        """A version of model ``name`` for a stored checkpoint; the model is made where it is missing.

        Asked twice it finds the version that it made.
        """
        from determined.common.api import bindings, errors

        def found_or_made() -> int:
            try:
                model = self._client.get_model(name)
            except errors.NotFoundException:
                model = self._client.create_model(name, description, workspace_name=workspace)
            versions = [version for version in model.list_versions() if version.checkpoint.uuid == uuid]
            version = versions[0] if versions else model.register_version(uuid)
            number = version.model_version
            change = bindings.v1PatchModelVersion(metadata=metadata, comment=description)
            bindings.patch_PatchModelVersion(self._session, body=change, modelName=name, modelVersionNum=number)
            return number

        return Registered(name, self._asked(found_or_made), uuid, holds)

    def _experiment(self, number: int, *known: type[Exception]):
        return self._asked(lambda: self._client.get_experiment(number), known)

    def _trial(self, experiment: int, *known: type[Exception]):
        """The experiment's one trial (the searcher is ``single``) in the bindings' form; None before it is made."""
        from determined.common.api import bindings

        trials = self._asked(lambda: bindings.get_GetExperimentTrials(self._session, experimentId=experiment).trials, known)
        return trials[0] if trials else None

    def _segments(self, trial) -> list[Segment]:
        """One for each allocation of the trial's task; the master numbers runs as it allocates."""
        from determined.common.api import bindings

        task = self._asked(lambda: bindings.get_GetTask(self._session, taskId=trial.taskId).task)
        allocations = sorted(task.allocations, key=lambda allocation: int(allocation.allocationId.rpartition(".")[2]))
        steps: dict[int, list[int]] = {}
        for report in self._reports(trial.id, "training"):
            steps.setdefault(report.trial_run_id, []).append(report.steps_completed)
        return [
            Segment(
                run=run,
                started=allocation.startTime,
                finished=allocation.endTime,
                ended_by=allocation.exitReason or None,
                steps=[min(steps[run]), max(steps[run])] if run in steps else [],
            )
            for run, allocation in enumerate(allocations, 1)
        ]

    def _all_reports(self, trial) -> list[Report]:
        names = {"avg_metrics": "training", "validation_metrics": "validation"}
        return [
            Report(group, report.trial_run_id, report.steps_completed, report.metrics)
            for group in sorted(names.get(key, key) for key in trial.summaryMetrics or {})
            for report in self._reports(trial.id, group)
        ]

    def _reports(self, trial: int, group: str) -> list:
        return self._asked(lambda: list(self._client.get_trial(trial).iter_metrics(group)))


def _state(experiment) -> str:
    return experiment.state.name


def _last(trial) -> dict[str, float]:
    """The last value of every number that a trial reported."""
    return {
        name: values["last"]
        for group in (trial.summaryMetrics or {}).values()
        for name, values in group.items()
        if isinstance(values, dict) and "last" in values
    }


def _stored(checkpoint, validations: dict[int, dict], metric: str) -> Stored:
    steps = int(checkpoint.metadata["steps_completed"])
    value = validations.get(steps, {}).get(metric)
    measured = float(value) if isinstance(value, int | float) else None
    return Stored(checkpoint.uuid, steps, checkpoint.state.name, steps in validations, measured)


def _plan_of(configuration: dict | None) -> str | None:
    """The plan file of an experiment, or its sweep's folder; the master writes a constant as it is or as
    ``{type: const, val: …}``."""
    given = (configuration or {}).get("hyperparameters") or {}
    value = given.get("plan", given.get("sweep"))
    return value.get("val") if isinstance(value, dict) else value
