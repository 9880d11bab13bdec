"""What test_parallel starts with torchrun: GRPO of two plans paused at every step, then a stage that fails in one.

    torchrun --nproc-per-node 2 tests/under_torchrun.py PAUSED/plan.json RESAMPLED/plan.json BROKEN/plan.json
"""

import sys
from contextlib import nullcontext
from pathlib import Path

from recipe import grpo
from recipe.errors import CheckFailed
from recipe.orders.environment import OrderEnvironment
from recipe.run import entrypoint, plan, processes, stage
from recipe.run.cluster import Runtime


def fail_beside_the_chief() -> int:
    if not processes.is_main():
        raise CheckFailed("not here")
    return processes.rank()


def exchange() -> None:
    assert processes.gather(processes.rank) == [0, 1] and processes.main_rank(processes.rank) == 0
    mine = object()
    assert processes.all_ranks(lambda: mine) is mine
    for shared in (processes.gather, processes.all_ranks):
        try:
            shared(fail_beside_the_chief)
        except CheckFailed as failure:
            assert str(failure) == "not here"
        else:
            raise AssertionError(f"{shared.__name__} did not fail in process {processes.rank()}")


def pause_after_every_step(path: str) -> None:
    """The chief alone is asked to pause."""
    paused = stage.Stage("grpo", plan.load(Path(path)), Runtime({}, lambda *_: None, processes.is_main, lambda *_: None))
    segments, done = 0, None
    if processes.is_main():
        paused.folder.mkdir()
    while done is None:
        done = grpo.train(paused)
        segments += 1
    assert segments == paused.plan.config.grpo.steps


def broken(self, record_id: str) -> str:
    raise ZeroDivisionError("the disk with the records is gone")


if __name__ == "__main__":
    with processes.joined():
        exchange()
        for path in sys.argv[1:3]:
            pause_after_every_step(path)
        if not processes.is_main():
            broken.__doc__ = OrderEnvironment.lookup.__doc__
            OrderEnvironment.lookup = broken
        sys.argv[1:] = ["--plan", sys.argv[3]]
        processes.joined = nullcontext  # they are
        entrypoint.main("grpo", __doc__, grpo.train)
