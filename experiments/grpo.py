"""GRPO with tools from the starting checkpoint to an adapter, every rollout recorded.

    python -m experiments.grpo --plan runs/my-pilot/plan.json
    torchrun --nproc-per-node 2 -m experiments.grpo --plan runs/my-pilot/plan.json    # over two GPUs
"""

from recipe.run.entrypoint import main
from recipe.run.result import Done
from recipe.run.stage import Stage


def run(stage: Stage) -> Done | None:
    from recipe import grpo

    return grpo.train(stage)


if __name__ == "__main__":
    main("grpo", __doc__, run)
