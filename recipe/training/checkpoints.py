"""Checkpoints of GRPO: a step from which it goes on as if nothing had happened.

A checkpoint of the trainer holds the adapter, the optimizer, the schedule and every random state; the sampler's
place follows from the step, because the tasks stand in one frozen order. Checkpoints stand in
``grpo/trainer/checkpoint-N``, each with ``checkpoint-N.json`` beside it: the digests of its files, written after
them and removed before them, so that a checkpoint without one is torn and is passed over.

Those of the frozen schedule (every ``checkpoint_every`` and ``validation_every`` steps) stay as evidence: by the adapter
in it a verifier proves who sampled the validation there and the step after it, and from it he can train the steps up
to the next one again. So a checkpoint holds nothing that depends on the machine's clock or the run's place.

Evidence is cut back to the step that training goes on from; what is later is set aside. Steps repeated after a lost node are the same steps:
same tasks, same random state, same bytes (README, "Repeatability").
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from transformers import TrainerCallback, TrainerControl

from recipe.errors import CheckFailed, Refused
from recipe.files import follow_umask, tree_digests, write_json
from recipe.records import read
from recipe.run import processes
from recipe.run.attempts import set_aside
from recipe.run.evidence import STEPS, TRAINER, VALIDATION, Seal
from recipe.run.stage import Stage
from recipe.training import adapter
from recipe.training.protocol import kept

STATE = "trainer_state.json"
KEPT = (adapter.WEIGHTS, "optimizer.pt", "scheduler.pt", STATE)  # and the random state of every process; the rest is not read
UNREAD = ("log_history", "total_flos")  # of the state: times, and how often training was resumed


class Saver(TrainerCallback):
    """Saves at the scheduled steps and when the stage is asked to pause; then training stops."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._scheduled = {*kept(stage.plan.config.grpo)}
        self.paused = False

    def on_step_end(self, args, state, control, **_):
        last = state.global_step >= state.max_steps  # nothing goes on from there
        self.paused = not last and processes.main_rank(self._stage.should_pause)
        if self.paused or state.global_step in self._scheduled:
            control.should_save = True
        control.should_training_stop |= self.paused

    def on_save(self, args, state, control, **_):
        processes.gather(lambda: None)  # each process saves its random state
        if not processes.is_main():
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        _strip(folder)
        folder.with_name("README.md").unlink(missing_ok=True)  # TRL's model card, which names the run's place
        follow_umask(folder)
        write_json(_seal(folder), asdict(Seal(state.global_step, tree_digests(folder))))
        _discard_unscheduled(self._stage, but=state.global_step)
        if state.global_step < state.max_steps:
            self._stage.store(folder, state.global_step, {"plan_id": self._stage.plan.id, "resumable": True})


def _strip(checkpoint: Path) -> None:
    """Leave what training goes on from, the same whether it was paused before or not."""
    for path in checkpoint.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in KEPT and not path.name.startswith("rng_state"):
            path.unlink()
    state = read(dict, checkpoint / STATE, "the trainer's state")
    control = {"stateful_callbacks": {"TrainerControl": TrainerControl().state()}}
    write_json(checkpoint / STATE, {key: value for key, value in state.items() if key not in UNREAD} | control)


def latest(stage: Stage) -> tuple[Path | None, int]:
    """The newest whole checkpoint that training goes on from and its step, ``(None, 0)`` without one.

    Not that of the last step: nothing is left to train from there.

    Raises:
        CheckFailed: a checkpoint whose files are not those that were written.
        Refused: one of another number of processes, which has other random states.
    """
    folder = stage.folder / TRAINER
    saved = map(_number, folder.glob("checkpoint-*.json"))
    step = max((number for number in saved if number < stage.plan.config.grpo.steps), default=0)
    if not step:
        return None, 0
    checkpoint = folder / f"checkpoint-{step}"
    sealed = read(Seal, _seal(checkpoint), "a checkpoint's seal").files
    if sealed != tree_digests(checkpoint):
        raise CheckFailed(f"resume: the files of {checkpoint} are not those that were saved")
    saved_by = sum(name.startswith("rng_state") for name in sealed)
    if saved_by != processes.size():
        raise Refused(
            f"{checkpoint} was saved by {saved_by} processes (slots) and this is {processes.size()}; go on with "
            f"{saved_by}, or prepare a new run"
        )
    return checkpoint, step


def cut_back(stage: Stage, step: int) -> None:
    """Set aside what is later than ``step``, which training goes on from; what is torn before that was to be removed.

    Training from 0 begins with the validation of step 0, which is set aside with the rest then.
    """
    beside = [path for kind in (STEPS, VALIDATION) for path in (stage.folder / kind).glob("step-*")]
    saved = (stage.folder / TRAINER).glob("checkpoint-*")
    later = [path for path in [*saved, *beside] if _number(path) > step or not step]
    later.sort(key=lambda path: (path.is_dir(), path))  # a checkpoint after its seal: between the two it is torn
    torn = [folder for folder in _folders(stage) if _number(folder) <= step and not _seal(folder).exists()]
    if later:
        set_aside(stage.folder, later, stage.runtime.owner)
    for folder in torn:
        _discard(folder)


def finish(stage: Stage) -> None:
    """Remove what only a paused training would go on from."""
    _discard_unscheduled(stage)


def _discard_unscheduled(stage: Stage, but: int | None = None) -> None:
    stay = {*kept(stage.plan.config.grpo), but}
    for folder in _folders(stage):
        if _number(folder) not in stay:
            _discard(folder)


def _folders(stage: Stage) -> Iterator[Path]:
    return (path for path in (stage.folder / TRAINER).glob("checkpoint-*") if path.is_dir())


def _discard(checkpoint: Path) -> None:
    _seal(checkpoint).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def _number(path: Path) -> int:
    """The step in a name like ``checkpoint-8`` or ``step-0008.json``."""
    number = path.stem.partition("-")[2]
    if not (number.isascii() and number.isdigit()):
        raise Refused(f"{path} is none of the stage's own files; move it away")
    return int(number)


def _seal(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.json")
