"""The stages as experiments on the cluster, one after another, by one who may be killed at any moment.

Of each stage: look for its experiment by label; submit one only where there is none; follow it to its end; hold
its result and outputs on disk against how it ended; keep log, metrics and the master's record of it. What was done
is in ``RUN/driver.json`` before and after each submission, so that the next call goes on in the middle.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from recipe import report
from recipe.errors import CheckFailed, Refused
from recipe.records import parse, read_yaml
from recipe.run.attempts import set_aside
from recipe.run.claim import holder
from recipe.run.cluster import chart
from recipe.run.evidence import CLAIM, RESULT
from recipe.run.plan import Plan
from recipe.run.result import Result, completed, heading
from recipe.run.result import load as load_result
from recipe.run.sources import ROOT
from recipe.stages import STAGES
from recipe.verify.summary import Summary
from tools import site
from tools.driver.records import Attempt, Experiment, Registered, State, load_state
from tools.driver.remote import ENDED, Master, View
from tools.driver.submission import Submission

LATE = 60.0  # seconds after which a file written on another node is visible here, whatever the file system caches
LOG_READ, LOG_LINES, LOG_WIDTH = 200, 25, 200  # lines looked through for a reason, lines shown, characters of one
TRACED = re.compile(r"\|\| +\++ ")  # a command of the startup hook, as its shell traces it
# What a stage says last, what the launcher says of a process, how a traceback ends.
REASONS = re.compile(
    r"\|\| +((?:refused|check failed|startup hook): .*|ERROR: \[\d+\] determined: .*|[\w.]+(?:Error|Exception|Fault)(?:: .*)?$)"
)


def configuration(name: str, plan_id: str, kind: str, plan_file: Path, label: str, store: bool = False) -> dict:
    """A stage's shipped YAML with its plan, and what its page shows of it.

    ``store`` asks the merge stage to put its checkpoint into the cluster's storage as well, for the model registry.
    """
    path = site.FOLDER / f"{name}.yaml"
    shipped = read_yaml(dict, path, f"the configuration of stage {name}")
    hyperparameters = parse(dict, shipped.get("hyperparameters"), str(path), "hyperparameters")
    given = {"plan": str(plan_file), **({"store": True} if store and name == "merge" else {})}
    return {
        **shipped,
        "description": f"{kind} plan {plan_id[:16]}, run {plan_file.parent}",
        "labels": [label, label.split("/")[0], kind],
        "hyperparameters": {**hyperparameters, **given},
    }


def label_of(plan_id: str, nonce: str, name: str, number: int) -> str:
    """Label of a stage's n-th submission: how a driver that was killed finds it again, and no other run of the plan."""
    return f"plan:{plan_id[:16]}/{nonce[:8]}/{name}" + (f"/{number}" if number > 1 else "")


def on_disk(folder: Path, name: str) -> str:
    """What lies on disk of a stage: ``nothing``, ``unfinished``, ``failed`` or ``complete``."""
    if not (folder / name).exists():
        return "nothing"
    if not (folder / name / RESULT).is_file():
        return "unfinished"
    return "failed" if load_result(folder / name).failure else "complete"


class Chain:
    """The stages of one plan on one cluster.

    Args:
        again: whether a stage that failed is submitted anew; its evidence is set aside first.
        register: model in the registry that gets the outcome; None for none.
        summarised: derives what the registry is told of a run.
        say: shows a line to the user; ``progress`` shows one that the next may replace.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[str],
        master: Master,
        again: bool,
        register: str | None,
        say: Callable[[str], None],
        progress: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
        summarised: Callable[[Plan], Summary] = report.summarised,
    ):
        self._plan, self._stages, self._master = plan, stages, master
        self._again, self._model = again, register
        self._say, self._progress, self._sleep, self._now = say, progress, sleep, now
        self._summarised = summarised
        self._plan_file = plan.run / "plan.json"
        self._state = self._resumed()

    def _resumed(self) -> State:
        state = load_state(self._plan.run)
        here = self._master.cluster
        if state is None:
            return State(self._plan.id, here)
        if state.plan_id != self._plan.id:
            raise Refused(
                f"{self._plan_file} is not the plan that this run was started with "
                f"({self._plan.id[:12]}…, not {state.plan_id[:12]}…); prepare a new run"
            )
        if state.cluster.id != here.id:
            raise Refused(f"this run was started on {state.cluster.address}, not {here.address}; set DET_MASTER")
        return state

    def run(self) -> None:
        """Bring every stage to its checked end, then register what came of it, once.

        Raises:
            Refused, CheckFailed: at the first stage that cannot be started or that failed.
        """
        here = site.agreed()
        self._workspace = here.workspace
        self._project = self._master.project(here.workspace, here.project)
        if self._model is not None:
            self._can_register()
        for name in self._stages:
            self._stage(name)
        if self._model is None:
            return
        if self._state.registered is None:
            self._state.registered = self._register(self._model)
            self._save()
        done = self._state.registered
        self._say(f"registered: {done.holds} as {done.model} version {done.version}")

    def _can_register(self) -> None:
        """A merge stage that has ended without storing its checkpoint will not do so any more."""
        attempts = self._state.attempts.get("merge")
        if self._state.registered is None and attempts and attempts[-1].ended and self._merged() is None:
            raise Refused(
                f"the merged checkpoint of {self._plan.run} is not in the cluster's storage, which the model registry "
                "needs: its stage was submitted without --register; give --register from the start of a new run"
            )

    def _merged(self) -> str | None:
        """Uuid of the merged checkpoint in the cluster's storage."""
        attempts = self._state.attempts.get("merge")
        stored = attempts[-1].ended.checkpoints if attempts and attempts[-1].ended else []
        return next((one.uuid for one in reversed(stored) if self._master.stored(one.uuid) is not None), None)

    def _register(self, model: str) -> Registered:
        """A version for what the merge stage stored."""
        said = self._summarised(self._plan)
        holds = "merge/checkpoint"
        metadata = {
            "plan_id": self._plan.id,
            "kind": self._plan.kind,
            "protocol": said.verdict.protocol,
            "agent_task": said.verdict.agent_task,
            "retention": said.verdict.retention,
            "starting_checkpoint": self._plan.frozen.checkpoint.digest,
            "adapter": said.provenance.adapter,
            "merged_checkpoint": said.provenance.merged_checkpoint,
            "folder": str(self._plan.run / holds),
            "holds": holds,
        }
        uuid = self._merged()
        if uuid is None:
            raise Refused(f"stage merge of {self._plan.run} left no checkpoint in the cluster's storage to register")
        text = f"{holds} of {self._plan.kind} plan {self._plan.id[:16]}"
        return self._master.register(model, uuid, holds, self._workspace, text, metadata)

    # ---- one stage

    def _stage(self, name: str) -> None:
        attempt, known = self._attempt(name)
        if attempt is None:
            completed(self._plan, name)
            self._say(f"{name}: complete on disk, by no experiment of this driver")
            return
        if attempt.failure:
            raise CheckFailed(f"stage {name}: {attempt.failure}; once it is mended, go on with --resume")
        if attempt.ended is not None:
            completed(self._plan, name)
            self._say(f"{name}: complete, experiment {attempt.experiment}")
            return
        if attempt.experiment is None:
            attempt.experiment = self._experiment(name, attempt, known)
            self._save()
        number = attempt.experiment
        self._say(f"{name}: experiment {number}, {self._master.page(number)}")
        self._master.annotate(number, self._notes(name))
        ended_before = known and self._master.look(number).state in ENDED
        try:
            self._judge(name, attempt, self._follow(name, number))
        except CheckFailed as failure:
            if not (self._again and ended_before):
                raise
            self._say(str(failure))
            self._say(f"{name}: --resume was given since; submitting it again")
            self._stage(name)

    def _attempt(self, name: str) -> tuple[Attempt | None, bool]:
        """The submission in hand, and whether an earlier call wrote it down; None where the disk says all."""
        attempts = self._state.attempts.setdefault(name, [])
        if attempts and not (attempts[-1].failure and self._again):
            return attempts[-1], True
        attempt = Attempt(label_of(self._plan.id, self._plan.frozen.nonce, name, len(attempts) + 1), self._now())
        disk = on_disk(self._plan.run, name)
        if not attempts and disk != "nothing" and not self._search(name, attempt):
            claim = holder(self._plan.run / name)
            if disk == "complete" and claim and claim.cluster == self._master.cluster.id:
                attempt.experiment = claim.experiment  # was submitted by hand
            elif disk == "complete":
                return None, False
            elif not self._again:
                raise Refused(
                    f"{self._plan.run / name} is used already ({disk}), by no experiment of this driver; "
                    "go on with --resume, or prepare a new run"
                )
        attempts.append(attempt)
        self._save()
        return attempt, False

    def _experiment(self, name: str, attempt: Attempt, known: bool) -> int:
        """Found again or submitted."""
        return Submission(
            name,
            self._master.cluster.address,
            lambda: self._search(name, attempt),
            lambda: self._submitted(name, attempt),
            self._save,
            self._say,
            self._progress,
            self._sleep,
            self._now,
        ).experiment(attempt, known)

    def _search(self, name: str, attempt: Attempt) -> list[int]:
        """By label and plan; else by the claim on the folder, which also tells of one that was moved or relabelled."""
        found = self._master.find(self._project, name, str(self._plan_file), attempt.label)
        claim = holder(self._plan.run / name)
        if found or not claim or claim.cluster != self._master.cluster.id:
            return found
        return [claim.experiment] if self._master.look(claim.experiment).state not in ENDED else []

    def _submitted(self, name: str, attempt: Attempt) -> int | None:
        if STAGES[name].resumable and on_disk(self._plan.run, name) == "unfinished":
            (self._plan.run / name / CLAIM).unlink(missing_ok=True)  # its experiment has ended: hand it on
        else:
            set_aside(self._plan.run / name)
        store = self._model is not None
        wanted = configuration(name, self._plan.id, self._plan.kind, self._plan_file, attempt.label, store)
        return self._master.submit(wanted, ROOT, self._project)

    def _follow(self, name: str, number: int) -> View:
        """Wait for the end, showing how far it is. A pause is not an end."""
        pause, shown, started = 0.5, "", False
        while (view := self._master.look(number)).state not in ENDED:
            if view.state != shown and view.state == "PAUSED":
                self._say(
                    f"{name}: experiment {number} is paused; waiting until it is activated again "
                    f"(det experiment activate {number})"
                )
            elif view.state != shown and started:  # lost its machine, or goes on
                self._say(f"{name}: experiment {number} is {view.state.lower()} again{_reading(view)}")
            shown, started = view.state, started or view.state == "RUNNING"
            self._progress(f"{name}: {shown}{_reading(view)}")
            self._sleep(pause)
            pause = min(pause * 1.3, 10.0)
        return view

    def _judge(self, name: str, attempt: Attempt, view: View) -> None:
        """Hold what lies on disk against how the experiment ended; both must say that the stage is complete."""
        number, run = attempt.experiment, self._plan.run
        if view.state != "DELETED":
            self._master.save_reports(number, run / "logs" / f"{name}.log", run / "metrics" / f"{name}.jsonl")
        problem = self._problem(name, number, view)
        if problem is None:
            attempt.ended = self._master.record(number)
            self._save()
            self._master.annotate(number, self._notes(name))
            self._say(f"{name}: complete{_outcome(load_result(run / name), attempt.ended)}")
            return
        lines = self._master.last_lines(number, LOG_READ) if view.state != "DELETED" else []
        if view.state == "ERROR" and on_disk(run, name) != "failed" and (reason := _reason(lines)):
            problem += f": {reason}"
        attempt.failure = problem
        self._save()
        for line in [line for line in lines if not TRACED.search(line)][-LOG_LINES:]:
            self._say(f"  | {line if len(line) <= LOG_WIDTH else line[:LOG_WIDTH] + '…'}")
        self._say(f"{name}: see {self._master.page(number)}")
        raise CheckFailed(f"stage {name}: {problem}; once it is mended, go on with --resume")

    def _problem(self, name: str, number: int, view: View) -> str | None:
        run, folder, waited = self._plan.run, self._plan.run / name, 0.0
        while view.state == "COMPLETED" and not (folder / RESULT).is_file() and waited < LATE:
            self._sleep(2.0)
            waited += 2.0
            os.listdir(run)  # makes a network file system look again
        disk, claim = on_disk(run, name), holder(folder)
        if claim and claim.experiment != number:
            return f"experiment {number} ended {view.state}, but {folder} belongs to experiment {claim.experiment}"
        if disk == "failed":
            return load_result(folder).failure
        if view.state != "COMPLETED" and disk == "complete":
            return f"complete on disk, but experiment {number} ended {view.state} on the cluster"
        if view.state != "COMPLETED":
            return f"experiment {number} ended {view.state}"
        if disk != "complete":
            return f"experiment {number} is COMPLETED on the cluster, but {folder / RESULT} is missing"
        try:
            completed(self._plan, name)
        except Refused as refusal:
            return f"experiment {number} is COMPLETED on the cluster, but {refusal}"
        return None

    def _notes(self, name: str) -> str:
        """What the experiment's page tells: where it stands in the run, and what came of it."""
        lines = [heading(self._plan, name)]
        for stage in self._stages:
            attempts = self._state.attempts.get(stage) or [None]
            number = attempts[-1] and attempts[-1].experiment
            link = f"[experiment {number}]({self._master.page(number)})" if number else "not submitted"
            lines.append(f"- {stage}: {link}")
        if on_disk(self._plan.run, name) == "complete":
            lines += ["", load_result(self._plan.run / name).describe()]
        return "\n".join(lines)

    def _save(self) -> None:
        self._state.save(self._plan.run)


def _reason(lines: Sequence[str]) -> str | None:
    """Why a trial ended, in the last line of its log that gives a reason."""
    found = [match[1].strip() for line in lines if (match := REASONS.search(line))]
    return found[-1][:LOG_WIDTH] if found else None


def _reading(view: View) -> str:
    """Steps and the numbers that say most while a stage runs."""
    shown = [f"step {view.steps}"] if view.steps else []
    last = {name: view.metrics[chart(name)] for name in ("reward", "strict_success") if chart(name) in view.metrics}
    return ", ".join(["", *shown, *(f"{name} {value:.3g}" for name, value in last.items())])


def _outcome(result: Result, experiment: Experiment) -> str:
    """Time and gates; those that did not pass are named. A result knows the last run of an interrupted stage alone."""
    gates, runs = result.gates, len(experiment.segments)
    failed = [name for name, passed in gates.items() if not passed]
    said = [f"{result.seconds['total']:.0f} s" + (f" in the last of {runs} runs" if runs > 1 else "")]
    said += [f"gates passed: {len(gates) - len(failed)} of {len(gates)}"] if gates else []
    said += [f"FAILED: {', '.join(failed)}"] if failed else []
    return "".join(f", {part}" for part in said)
