"""Which rollouts a run has, complete or not, and those of them that are asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipe.errors import Refused
from recipe.files import file_digest
from recipe.policy import checkpoint
from recipe.rollout import agent_chat
from recipe.run.evidence import ROLLOUTS, STEPS, VALIDATION, RolloutRecord, Trained, read_rollouts, read_step
from recipe.run.plan import Plan
from recipe.task.family import Task
from tools.transcripts.anatomy import Anatomy, Pieces, dissect

BASELINE, TRAINING, DEVELOPMENT, CANDIDATE = STAGES = ("baseline", "grpo", "development", "candidate")
_SPLITS = {BASELINE: "test", TRAINING: "train", DEVELOPMENT: "development", CANDIDATE: "test"}


@dataclass(frozen=True)
class Choice:
    """What is asked for; an empty part asks for all."""

    stages: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Transcript:
    """A rollout of a run. ``step`` is None of an evaluation; ``sample`` counts the rollouts of its task, from 0."""

    stage: str
    step: int | None
    sample: int
    task: Task
    record: RolloutRecord
    anatomy: Anatomy

    @property
    def advantage(self) -> float | None:
        return self.record.advantage if isinstance(self.record, Trained) else None


def transcripts(plan: Plan, choice: Choice) -> Iterator[Transcript]:
    """The rollouts that ``choice`` asks for, in the order of the run.

    Raises:
        Refused: a task that the plan does not have, no tokenizer, a record that cannot be read, or no such rollout.
    """
    tasks = {task.task_id: task for split in plan.splits.values() for task in split}
    for name in choice.tasks:
        if name not in tasks:
            raise Refused(f"{plan.run} has no task {name!r}; its tasks are called like {next(iter(tasks))}")
    sources = [
        (stage, step, path)
        for stage, step, path in _files(plan)
        if stage in (choice.stages or STAGES) and (not choice.steps or step in choice.steps)
    ]
    if not sources:
        there = ", ".join(dict.fromkeys(stage for stage, _, _ in _files(plan))) or "no stage"
        raise Refused(f"{plan.run} has no such rollouts; so far it has rollouts of {there}")
    chat, found = agent_chat(checkpoint.load_tokenizer(_tokenizer(plan)), plan.family), 0
    pieces = Pieces(chat)
    for stage, step, path in sources:
        split = {task.task_id for task in plan.splits[_SPLITS[stage]]}
        for number, (sample, record) in enumerate(_records(plan, stage, path)):
            where = f"{path}: record {number}"
            if record.task_id not in split:
                raise Refused(f"{where}: task_id {record.task_id[:40]!r} is not of the {_SPLITS[stage]} split")
            if choice.tasks and record.task_id not in choice.tasks:
                continue
            task, found = tasks[record.task_id], found + 1
            anatomy = dissect(record, task, pieces, chat, plan.config.rules, where)
            yield Transcript(stage, step, sample, task, record, anatomy)
    if not found:
        raise Refused(f"{plan.run} has no rollout of {', '.join(choice.tasks)} there")


def _files(plan: Plan) -> list[tuple[str, int | None, Path]]:
    """``(stage, step, file)`` of all rollouts that are there."""
    grpo = plan.run / TRAINING
    found = [(BASELINE, None, plan.run / BASELINE / ROLLOUTS)]
    found += [(TRAINING, _step(path), path) for path in sorted((grpo / STEPS).glob("step-*.json"))]
    found += [(DEVELOPMENT, _step(path), path) for path in sorted((grpo / VALIDATION).glob("step-*.jsonl"))]
    found.append((CANDIDATE, None, plan.run / CANDIDATE / ROLLOUTS))
    return [entry for entry in found if entry[2].exists()]


def _step(path: Path) -> int:
    number = path.stem.removeprefix("step-")
    if not number.isdecimal():
        raise Refused(f"{path} is not named after a step; move it away")
    return int(number)


def _records(plan: Plan, stage: str, path: Path) -> Iterator[tuple[int, RolloutRecord]]:
    if stage == TRAINING:
        size = plan.config.grpo.num_generations
        yield from ((number % size, record) for number, record in enumerate(read_step(path).rollouts))
    else:
        yield from ((record.sample, record) for record in read_rollouts(path, f"the rollouts of {stage}"))


def _tokenizer(plan: Plan) -> Path:
    """A checkpoint's folder with the tokenizer that the plan froze: the starting one, or the merged one of a copy."""
    merged = plan.run / "merge" / "checkpoint"
    folder = next((folder for folder in (plan.checkpoint, merged) if folder.is_dir()), None)
    if folder is None:
        raise Refused(f"no tokenizer to read the tokens with: neither {plan.checkpoint} nor {merged} is here")
    for name in checkpoint.carried(folder):
        if file_digest(folder / name) != plan.frozen.checkpoint.files.get(name):
            raise Refused(f"{folder / name} is not the one that the plan froze: ids would be read as other words")
    return folder
