"""Folds the adapter into a standalone checkpoint and checks it against base + adapter.

    python -m experiments.merge --plan runs/my-pilot/plan.json
"""

from recipe.run.entrypoint import main
from recipe.run.result import Done
from recipe.run.stage import Stage


def run(stage: Stage) -> Done:
    from recipe import merge

    return merge.merge(stage)


if __name__ == "__main__":
    main("merge", __doc__, run)
