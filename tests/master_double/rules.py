"""How experiments, trials and commands live and end: the rules of the 0.35 master.

When a container of a trial exits, the first that applies decides:

1. killed by the master: no error;
2. it acknowledged a preemption signal: no error, and not finished either;
3. exit code 0: finished, whatever the searcher still had open; so is, even with 2., what has completed
   all that it had;
4. anything else, a lost agent included: an error.

Then: a stopping trial reaches its terminal state (ERROR after an error). An error counts one
restart, unless the agent was lost; more than `max_restarts`, or a `cancel_retries` pattern seen in
the logs, means ERROR. A finished trial is COMPLETED, and its experiment with the last of its
trials. Everything else is rescheduled while the experiment is ACTIVE.

All methods expect the lock `world.changed` to be held.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from typing import Any

from .agent import Agent, Job
from .context import pack
from .records import (
    STOPPING_TO_TERMINAL,
    TERMINAL_STATES,
    Allocation,
    Command,
    Experiment,
    LogLine,
    Task,
    Trial,
    World,
    now,
)
from .retention import collect_garbage, latest


class Conflict(Exception):
    """The request makes no sense in the present state."""


class Rules:
    def __init__(self, world: World, preemption_timeout: float, collection_delay: float) -> None:
        self.agent: Agent
        self.preemption_timeout = preemption_timeout
        self.collection_delay = collection_delay
        self._world = world

    # ---- experiments: what users ask for, and the searcher

    def create_trial(self, experiment: Experiment) -> Trial:
        """The next point of the search."""
        task = Task(f"{experiment.id}.{uuid.uuid4()}", "TRIAL", experiment.user, pack(experiment.model_definition))
        trial = Trial(
            id=len(self._world.trials) + 1,
            experiment=experiment,
            task=task,
            hparams=experiment.points.pop(),
            seed=experiment.config["reproducibility"]["experiment_seed"],
        )
        experiment.trials.append(trial)
        self._world.trials[trial.id] = trial
        self._world.tasks[task.id] = task
        return trial

    def activate(self, experiment: Experiment) -> None:
        self._refuse_if_stopping(experiment)
        experiment.state = "ACTIVE"
        for trial in experiment.trials:
            if trial.state == "PAUSED":
                trial.state = "ACTIVE"
            self._maybe_allocate(trial)

    def pause(self, experiment: Experiment) -> None:
        self._refuse_if_stopping(experiment)
        experiment.state = "PAUSED"
        for trial in experiment.trials:
            if trial.state == "ACTIVE":
                trial.state = "PAUSED"
            self._ask_to_leave(trial.task.allocation)

    def cancel(self, experiment: Experiment) -> None:
        self._stop(experiment, "STOPPING_CANCELED")

    def kill(self, experiment: Experiment) -> None:
        self._stop(experiment, "STOPPING_KILLED")

    def _refuse_if_stopping(self, experiment: Experiment) -> None:
        if experiment.state not in ("ACTIVE", "PAUSED"):
            raise Conflict(f"experiment {experiment.id} is in state {experiment.state}")

    def _stop(self, experiment: Experiment, state: str) -> None:
        if experiment.state in TERMINAL_STATES:
            return
        # A kill overtakes a cancel, never the other way round.
        if experiment.state != "STOPPING_KILLED":
            experiment.state = state
        for trial in experiment.trials:
            if trial.state not in TERMINAL_STATES:
                self._stop_trial(trial, experiment.state)

    def _stop_trial(self, trial: Trial, state: str) -> None:
        trial.state = state
        allocation = trial.task.allocation
        if allocation is None:
            self._finish_trial(trial, STOPPING_TO_TERMINAL[state])
        elif state == "STOPPING_KILLED":
            self.kill_allocation(allocation)
        else:
            self._ask_to_leave(allocation)

    # ---- allocations

    def _maybe_allocate(self, trial: Trial) -> None:
        if trial.state != "ACTIVE" or trial.task.allocation is not None:
            return
        config = trial.experiment.config
        trial.run_id += 1
        allocation = trial.task.new_allocation(config["resources"]["slots_per_trial"])
        checkpoint = latest(trial, self._world)
        variables = {
            "DET_TRIAL_ID": str(trial.id),
            "DET_EXPERIMENT_ID": str(trial.experiment.id),
            "DET_EXPERIMENT_CONFIG": json.dumps(config),
            "DET_HPARAMS": json.dumps(trial.hparams),
            "DET_TRIAL_SEED": str(trial.seed),
            "DET_TRIAL_RUN_ID": str(trial.run_id),
            "DET_STEPS_COMPLETED": str(checkpoint.steps if checkpoint else 0),
        }
        if checkpoint is not None:
            variables["DET_LATEST_CHECKPOINT"] = checkpoint.uuid

        def on_exit(ended: Allocation) -> None:
            self._trial_exited(trial, ended)

        self.agent.launch(Job(trial.task, allocation, config, variables, on_exit))

    def kill_allocation(self, allocation: Allocation | None) -> None:
        if allocation is not None:
            allocation.killed = True
            self.agent.kill(allocation)

    def _ask_to_leave(self, allocation: Allocation | None) -> None:
        if allocation is None:
            return
        if not allocation.rendezvoused:
            # Still in its hook: nobody is listening for the signal yet.
            self.kill_allocation(allocation)
            return
        allocation.preempt = True
        self._world.changed.notify_all()
        timer = threading.Timer(self.preemption_timeout, self._deadline_passed, (allocation,))
        timer.daemon = True
        timer.start()

    def _deadline_passed(self, allocation: Allocation) -> None:
        with self._world.changed:
            if allocation.alive:
                self.kill_allocation(allocation)

    def lose_agent(self, trial: Trial) -> None:
        allocation = trial.task.allocation
        if allocation is not None:
            allocation.agent_lost = True
            self.agent.kill(allocation)

    # ---- what containers tell

    def log_written(self, task: Task, text: str) -> None:
        for trial in self._world.trials.values():
            if trial.task is not task:
                continue
            for policy in trial.experiment.config["log_policies"]:
                canceling = policy["action"]["type"] == "cancel_retries"
                if canceling and re.search(policy["pattern"], text):
                    trial.retries_canceled_by = trial.retries_canceled_by or (text, policy["pattern"])

    def _trial_exited(self, trial: Trial, allocation: Allocation) -> None:
        finished = error = False
        if trial.searched is not None and not allocation.killed:
            finished = allocation.exit_code == 0
            error = not finished
        elif not (allocation.killed or allocation.acked):
            finished = allocation.exit_code == 0 and not allocation.agent_lost
            error = not finished

        if trial.state in STOPPING_TO_TERMINAL:
            self._finish_trial(trial, "ERROR" if error else STOPPING_TO_TERMINAL[trial.state])
        elif error and allocation.agent_lost:
            self._maybe_allocate(trial)
        elif error:
            trial.restarts += 1
            allowed = trial.experiment.config["max_restarts"]
            if trial.retries_canceled_by is not None:
                self._tell_why(trial, allocation)
            if trial.retries_canceled_by is not None or trial.restarts > allowed:
                self._finish_trial(trial, "ERROR")
            else:
                self._maybe_allocate(trial)
        elif finished:
            self._finish_trial(trial, "COMPLETED")
        else:
            self._maybe_allocate(trial)

    def _tell_why(self, trial: Trial, allocation: Allocation) -> None:
        """The master's own two lines, in which the one that matched stands once more."""
        text, pattern = map(json.dumps, trial.retries_canceled_by)
        logs = trial.task.logs
        for line in ("trial failed and matched logs to a don't retry policy", f"(log {text} matched regex {pattern})"):
            logs.append(LogLine(len(logs) + 1, now(), "", line, allocation.id, allocation.container_id))

    def _finish_trial(self, trial: Trial, state: str) -> None:
        experiment = trial.experiment
        trial.state = state
        trial.end_time = trial.task.end_time = now()
        if experiment.points and experiment.state in ("ACTIVE", "PAUSED"):
            made = self.create_trial(experiment)
            made.state = experiment.state
            self._maybe_allocate(made)
        if any(one.state not in TERMINAL_STATES for one in experiment.trials):
            self._world.changed.notify_all()
            return
        # A search fails if all of its trials did. A stop asked for by the user decides, whatever the trials did.
        if any(one.state == "COMPLETED" for one in experiment.trials):
            state = "COMPLETED"
        experiment.state = STOPPING_TO_TERMINAL.get(experiment.state, state)
        experiment.end_time = trial.end_time
        timer = threading.Timer(self.collection_delay, self._collect, (experiment,))
        timer.daemon = True
        timer.start()
        self._world.changed.notify_all()

    def _collect(self, experiment: Experiment) -> None:
        with self._world.changed:
            collect_garbage(experiment, self._world)
            self._world.changed.notify_all()

    # ---- commands

    def start_command(self, command: Command, arguments: list[str]) -> None:
        resources: dict[str, Any] = command.config["resources"]
        allocation = command.task.new_allocation(resources["slots"])

        def on_exit(ended: Allocation) -> None:
            failed = not ended.killed and ended.exit_reason is not None
            command.exit_status = (
                f"allocation failed: {ended.exit_reason}" if failed else "allocation exited successfully"
            )
            command.task.end_time = now()

        self.agent.launch(Job(command.task, allocation, command.config, {}, on_exit, arguments))

    def kill_command(self, command: Command) -> None:
        self.kill_allocation(command.task.allocation)
