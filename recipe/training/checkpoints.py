"""Checkpoints of GRPO: a pause at a step, from which it goes on as if nothing had happened.

A checkpoint of the trainer holds the adapter, the optimizer, the schedule and every random state; the sampler's
place follows from the step, because the tasks stand in one frozen order. Checkpoints stand in
``grpo/trainer/checkpoint-N``, each with ``checkpoint-N.json`` beside it: the digests of its files, written after
them and removed before them, so that a checkpoint without one is torn and is passed over.

Evidence is cut back to the step that training goes on from. Steps repeated after a lost node are the same steps:
same tasks, same random state, same bytes (on a GPU as far as its kernels are deterministic).
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import TrainerCallback

from recipe.errors import CheckFailed, Refused
from recipe.files import follow_umask, tree_digests, write_json
from recipe.records import Inside, Sha256, read
from recipe.run import processes
from recipe.run.evidence import STEPS, VALIDATION
from recipe.run.stage import Stage

TRAINER = "trainer"  # folder of the trainer's own files


@dataclass(frozen=True)
class Seal:
    """``checkpoint-N.json``: the SHA-256 of each file of ``checkpoint-N``."""

    step: int
    files: dict[Inside, Sha256]


class Saver(TrainerCallback):
    """Saves every ``checkpoint_every`` steps and when the stage is asked to pause; then training stops."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self.paused = False

    def on_step_end(self, args, state, control, **_):
        every = self._stage.plan.config.grpo.checkpoint_every
        last = state.global_step >= state.max_steps  # the finished adapter is kept instead
        self.paused = not last and processes.main_rank(self._stage.should_pause)
        if self.paused or (every and not last and state.global_step % every == 0):
            control.should_save = True
        control.should_training_stop |= self.paused

    def on_save(self, args, state, control, **_):
        processes.gather(lambda: None)  # each process saves its random state
        if not processes.is_main():
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        follow_umask(folder)
        write_json(_seal(folder), asdict(Seal(state.global_step, tree_digests(folder))))
        for older in Path(args.output_dir).glob("checkpoint-*.json"):
            if older != _seal(folder):
                _discard(older.with_suffix(""))
        self._stage.store(folder, state.global_step, {"plan_id": self._stage.plan.id, "resumable": True})


def latest(stage: Stage) -> tuple[Path | None, int]:
    """The newest whole checkpoint and its step, ``(None, 0)`` without one.

    Raises:
        CheckFailed: a checkpoint whose files are not those that were written.
        Refused: one of another number of processes, which has other random states.
    """
    folder = stage.folder / TRAINER
    step = max((_number(seal) for seal in folder.glob("checkpoint-*.json")), default=0)
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
    """Remove what is later than ``step``, which training goes on from, and every other checkpoint."""
    for other in (stage.folder / TRAINER).glob("checkpoint-*"):
        if other.is_dir() and _number(other) != step:
            _discard(other)
    for kind in (STEPS, VALIDATION):
        for path in (stage.folder / kind).glob("step-*"):
            if _number(path) > step:
                path.unlink()


def discard_all(stage: Stage) -> None:
    """Remove all checkpoints: there is nothing to resume any more."""
    for seal in (stage.folder / TRAINER).glob("checkpoint-*.json"):
        _discard(seal.with_suffix(""))
    shutil.rmtree(stage.folder / TRAINER)


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
