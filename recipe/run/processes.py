"""The processes of one stage, one a GPU, as torchrun starts them (RANK, WORLD_SIZE, LOCAL_RANK).

Rank 0 is the main process: it alone writes, reports and tells, and is asked to pause (torchrun passes SIGTERM on to
all, lets them pause for 30 s, and then exits with 1 itself). Without torchrun there is one process, which is its own
main one, and all of this costs nothing.

A refusal, a failed check or a fault of the environment in one process has to end them all, or the others would wait
for it forever: work in which one may occur goes through :func:`gather`, :func:`all_ranks` or :func:`main_rank`. All
processes call them in the same order. Any other exception is a defect: it ends its process, and torchrun the others.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from recipe.errors import CheckFailed, EnvironmentFault, Refused

EXIT = "MAIN_PROCESS_EXIT"  # environment variable: file for the exit code of the main process
_TOLD = (CheckFailed, EnvironmentFault, Refused)


def rank() -> int:
    """Which process this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process writes and tells."""
    return rank() == 0


def exit_code(code: int) -> int:
    """What a process that ends in order returns: ``code``, or 0 where whoever launched it reads that in a file.

    torchrun answers any other exit with a traceback of its own and with 1, and ends the processes that still write.
    """
    if not is_main():
        return 0
    if EXIT not in os.environ:
        return code
    Path(os.environ[EXIT]).write_text(str(code))
    return 0


@contextmanager
def joined() -> Iterator[None]:
    """The processes find each other, and each takes its GPU.

    Raises:
        Refused: fewer GPUs than processes on this machine.
    """
    if size() == 1:
        yield
        return
    import torch

    if not torch.cuda.is_available():
        backend = "gloo"
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # accelerate says cpu:0, where torch.load finds no such place
    else:
        place, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if here > torch.cuda.device_count():
            raise Refused(f"{here} processes on a machine with {torch.cuda.device_count()} GPUs; start one a GPU")
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"  # plain objects travel through gloo, and so beside what a GPU is doing
    torch.distributed.init_process_group(backend)
    try:
        yield
    except _TOLD:  # in all of them; with the group's threads left alone, one exit in 20 was an abort under load
        torch.distributed.destroy_process_group()
        raise
    # Not after any other exception: the others may be waiting in a collective, and this would wait for them.
    torch.distributed.destroy_process_group()


def gather(work: Callable[[], object]) -> list:
    """What ``work()`` gives in each process, in the order of ranks.

    Raises:
        CheckFailed, EnvironmentFault, Refused: of the first process in which ``work`` failed so, in all of them.
    """
    if size() == 1:
        return [work()]
    from torch.distributed import all_gather_object

    answers = [None] * size()
    all_gather_object(answers, _tried(work))
    return [_value(answer) for answer in answers]


def all_ranks(work: Callable[[], object]):
    """What ``work()`` gives here, once it has succeeded everywhere. Raises as :func:`gather` does."""
    mine = []
    gather(lambda: mine.append(work()))  # the values stay where they are; only failures travel
    return mine[0]


def main_rank(work: Callable[[], object]):
    """What ``work()`` gives in the main process, in all processes; the others do not call it. So is its failure."""
    if size() == 1:
        return work()
    from torch.distributed import broadcast_object_list

    answer = [_tried(work) if is_main() else None]
    broadcast_object_list(answer, src=0)
    return _value(answer[0])


def share(items: list) -> list:
    """This process's part of ``items``: the parts in the order of ranks are the whole."""
    return items[len(items) * rank() // size() : len(items) * (rank() + 1) // size()]


def _tried(work: Callable[[], object]) -> tuple[object, BaseException | None]:
    try:
        return work(), None
    except _TOLD as failure:
        return None, failure


def _value(answer: tuple[object, BaseException | None]):
    value, failure = answer
    if failure is not None:
        raise failure
    return value
