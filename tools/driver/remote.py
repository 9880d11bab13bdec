"""The cluster as the driver sees it: a dozen questions to Determined's SDK (0.35.0 and 0.38.1).

Where the SDK's objects leave something out (configuration as submitted, restarts, allocations, notes of a model
version), the same answers are read with the SDK's own bindings. ``GetMaster`` is not asked: 0.38.1 cannot read what
a 0.35 master answers; ``/info`` tells the version to both.

``determined`` is imported when a master is first wanted, so that help and refusals stay instant.
"""

import getpass
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from recipe.errors import Refused
from recipe.files import write_bytes, write_lines
from tools.driver.records import Cluster, Experiment, Policy, Registered, Segment, Stored

ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
PATIENCE = 600.0  # seconds that a master may be away while an experiment is followed
HICCUP = 5.0  # seconds of it that nobody needs to hear of
NO_LOGIN = "no valid login at {}; run `det user login USER`, or set DET_USER and DET_PASS"


@dataclass(frozen=True)
class View:
    """One look at an experiment. ``metrics`` has the last value of every number that it reported."""

    state: str
    steps: int
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


@contextmanager
def _in_one_line(address: str) -> Iterator[None]:
    """The master's refusals as one line each."""
    from determined.common.api import errors

    try:
        yield
    except errors.MasterNotFoundException:
        raise Refused(f"no master answers at {address}; set DET_MASTER, or try again later") from None
    except errors.UnauthenticatedException:
        raise Refused(NO_LOGIN.format(address)) from None
    except errors.BadRequestException as error:
        raise Refused(f"the master at {address} answers: {_first_line(error)}") from None


def connect(recorded: str | None = None, say: Callable[[str], None] = partial(print, file=sys.stderr)) -> "Master":
    """Log in by Determined's own means: DET_MASTER (else the ``recorded`` address), the user's cached login, DET_USER.

    ``say`` shows a line to the user, when the master is waited for.

    Raises:
        Refused: no such package, no master, or no valid login.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the package warns of its own old names
            import determined
            from determined.common import api
            from determined.experimental.client import Determined
    except ModuleNotFoundError:
        raise Refused("determined is not installed here; install it, or use run --local") from None
    named = os.environ.get("DET_MASTER") or os.environ.get("DET_MASTER_ADDR")
    address = api.canonicalize_master_url(named or recorded or api.get_default_master_url())
    with _without_prompt(address), _in_one_line(address):
        client = Determined(master=address)
        about = client._session.get("info").json()
        return Master(client, Cluster(about["cluster_id"], address, about["version"], determined.__version__), say)


class Master:
    """A logged-in master. Questions are asked again while it does not answer; a submission never is."""

    def __init__(
        self, client, cluster: Cluster, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
    ):
        self._client, self._session, self._say, self._sleep = client, client._session, say, sleep
        self.cluster = cluster

    def page(self, experiment: int) -> str:
        """Address of an experiment's page in the web interface."""
        return f"{self.cluster.address}/det/experiments/{experiment}"

    def project(self, workspace: str, name: str) -> int:
        """Id of a project, which is made where it is missing; the workspace must be there."""
        spaces = {space.name: space for space in self._asked(self._client.list_workspaces)}
        if workspace not in spaces:
            raise Refused(f"workspace {workspace} is not on {self.cluster.address} (or not yours); see site.yaml")
        projects = {project.name: project.id for project in self._asked(spaces[workspace].list_projects)}
        if name not in projects:
            with _in_one_line(self.cluster.address):
                projects[name] = spaces[workspace].create_project(name, "agentic RL on German order tasks").id
        return projects[name]

    def find(self, project: int, stage: str, plan: str, label: str) -> list[int]:
        """Experiments of a stage with this plan file that carry ``label`` or have not ended (started by hand).

        The plan file is compared because two run folders may hold equal plans.
        """
        labelled = self._asked(lambda: self._client.list_experiments(labels=[label], project_id=project))
        named = self._asked(lambda: self._client.list_experiments(name=stage, project_id=project))
        alive = [found for found in named if found.name == stage and _state(found) not in ENDED]
        ids = sorted({found.id for found in [*labelled, *alive]})
        return [number for number in ids if _plan_of(self._experiment(number).config) == plan]

    def submit(self, configuration: dict, context: Path, project: int) -> int:
        """Create and start an experiment with ``context`` as its files; returns its id.

        Raises:
            Refused: what the master says about the configuration, or that the answer got lost.
        """
        from determined.common.api import errors

        try:
            with redirect_stdout(io.StringIO()):  # the SDK's count of files
                return self._client.create_experiment(configuration, context, project_id=project).id
        except errors.MasterNotFoundException:
            raise Refused(
                f"the answer of {self.cluster.address} to a submission got lost; give the same command again: "
                "it looks for the experiment before it submits one"
            ) from None
        except (errors.BadRequestException, ValueError) as error:
            raise Refused(f"stage {configuration['name']} cannot be submitted: {_first_line(error)}") from None

    def annotate(self, experiment: int, text: str) -> None:
        """Replace the notes of an experiment, which its page shows as Markdown; one that was deleted has no page."""
        from determined.common.api import errors

        with suppress(errors.NotFoundException):
            self._asked(lambda: self._client.get_experiment(experiment).set_notes(text))

    def look(self, experiment: int) -> View:
        """State ``DELETED`` also says that the master does not know the experiment."""
        from determined.common.api import errors

        try:
            found = self._experiment(experiment)
            trial = self._trial(experiment)
        except errors.NotFoundException:
            return View("DELETED", 0, {})
        if trial is None:
            return View(_state(found), 0, {})
        last = {
            name: values["last"]
            for group in (trial.summaryMetrics or {}).values()
            for name, values in group.items()
            if isinstance(values, dict) and "last" in values
        }
        return View(_state(found), trial.totalBatchesProcessed, last)

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
            checkpoint = self._asked(lambda: self._client.get_checkpoint(uuid))
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
        """Write the trial's log and everything that it reported to two files."""
        summary = self._trial(experiment)
        trial = self._client.get_trial(summary.id)
        lines = self._asked(lambda: list(trial.iter_logs()))
        write_bytes(log, "".join(line if line.endswith("\n") else f"{line}\n" for line in lines).encode())
        names = {"avg_metrics": "training", "validation_metrics": "validation"}
        reports = []
        for group in sorted(names.get(key, key) for key in summary.summaryMetrics or {}):
            for report in self._reports(summary.id, group):
                place = {"group": group, "run": report.trial_run_id, "steps": report.steps_completed}
                reports.append({**place, "metrics": report.metrics})
        write_lines(metrics, reports)

    def register(
        self, name: str, uuid: str, holds: str, workspace: str, description: str, metadata: dict
    ) -> Registered:
        """A version of model ``name`` for a stored checkpoint; the model is made where it is missing.

        Asked twice it finds the version that it made.
        """
        from determined.common.api import bindings, errors

        with _in_one_line(self.cluster.address):
            try:
                model = self._client.get_model(name)
            except errors.NotFoundException:
                model = self._client.create_model(name, description, workspace_name=workspace)
            versions = [version for version in model.list_versions() if version.checkpoint.uuid == uuid]
            version = versions[0] if versions else model.register_version(uuid)
            number = version.model_version
            change = bindings.v1PatchModelVersion(metadata=metadata, comment=description)
            bindings.patch_PatchModelVersion(self._session, body=change, modelName=name, modelVersionNum=number)
        return Registered(name, number, uuid, holds)

    def _experiment(self, number: int):
        return self._asked(lambda: self._client.get_experiment(number))

    def _trial(self, experiment: int):
        """The experiment's one trial (the searcher is ``single``) in the bindings' form; None before it is made."""
        from determined.common.api import bindings

        trials = self._asked(lambda: bindings.get_GetExperimentTrials(self._session, experimentId=experiment).trials)
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

    def _reports(self, trial: int, group: str) -> list:
        return self._asked(lambda: list(self._client.get_trial(trial).iter_metrics(group)))

    def _asked(self, question: Callable[[], Any]) -> Any:
        """The answer to a question that changes nothing; asked again while the master is away or restarts."""
        from determined.common.api import errors

        waited, pause = 0.0, 1.0
        while True:
            try:
                answer = question()
                if waited > HICCUP:
                    self._say(f"{self.cluster.address} answers again")
                return answer
            except errors.NotFoundException:
                raise
            except (errors.MasterNotFoundException, errors.APIException) as error:
                lasting = isinstance(error, errors.APIException) and error.status_code < 500
                if lasting or waited >= PATIENCE:
                    with _in_one_line(self.cluster.address):
                        raise
            except errors.BadRequestException:
                with _in_one_line(self.cluster.address):
                    raise
            if waited <= HICCUP < waited + pause:
                self._say(f"{self.cluster.address} does not answer; asking again for {PATIENCE / 60:.0f} minutes")
            self._sleep(pause)
            waited, pause = waited + pause, min(pause * 2, 30.0)


def _state(experiment) -> str:
    return experiment.state.name


def _stored(checkpoint, validations: dict[int, dict], metric: str) -> Stored:
    steps = int(checkpoint.metadata["steps_completed"])
    value = validations.get(steps, {}).get(metric)
    measured = float(value) if isinstance(value, int | float) else None
    return Stored(checkpoint.uuid, steps, checkpoint.state.name, steps in validations, measured)


def _plan_of(configuration: dict | None) -> str | None:
    """The plan file of an experiment; the master writes a constant as it is or as ``{type: const, val: …}``."""
    value = ((configuration or {}).get("hyperparameters") or {}).get("plan")
    return value.get("val") if isinstance(value, dict) else value


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    try:
        text = json.loads(text)["message"]  # what the master's gateway answers
    except (ValueError, KeyError, TypeError):
        pass
    return text.splitlines()[0] if text else type(error).__name__
