"""What test_parallel starts with torchrun: GRPO paused after every step, then a stage that fails in one process.

    torchrun --nproc-per-node 2 tests/under_torchrun.py PAUSED/plan.json BROKEN/plan.json
"""

import sys
from contextlib import nullcontext
from pathlib import Path

from recipe import grpo, parallel, plan, stage
from recipe.cluster import Site
from recipe.environment import OrderEnvironment
from recipe.errors import CheckFailed


def fail_beside_the_chief() -> int:
    if not parallel.chief():
        raise CheckFailed("not here")
    return parallel.rank()


def exchange() -> None:
    assert parallel.everyone(parallel.rank) == [0, 1] and parallel.by_chief(parallel.rank) == 0
    mine = object()
    assert parallel.together(lambda: mine) is mine
    for shared in (parallel.everyone, parallel.together):
        try:
            shared(fail_beside_the_chief)
        except CheckFailed as failure:
            assert str(failure) == "not here"
        else:
            raise AssertionError(f"{shared.__name__} did not fail in process {parallel.rank()}")


def pause_after_every_step(path: str) -> None:
    """The chief alone is asked to pause."""
    paused = stage.Stage("grpo", plan.load(Path(path)), Site({}, lambda *_: None, parallel.chief, lambda *_: None))
    segments, done = 0, None
    if parallel.chief():
        paused.folder.mkdir()
    while done is None:
        done = grpo.train(paused)
        segments += 1
    assert segments == paused.plan.config.grpo.steps


def broken(self, record_id: str) -> str:
    raise ZeroDivisionError("the disk with the records is gone")


if __name__ == "__main__":
    with parallel.joined():
        exchange()
        pause_after_every_step(sys.argv[1])
        if not parallel.chief():
            broken.__doc__ = OrderEnvironment.lookup.__doc__
            OrderEnvironment.lookup = broken
        sys.argv[1:] = ["--plan", sys.argv[2]]
        parallel.joined = nullcontext  # they are
        stage.main("grpo", __doc__, grpo.train, resumable=True, spread=lambda config: config.grpo.batch_size)
