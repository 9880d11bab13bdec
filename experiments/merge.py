"""Folds the adapter into a standalone checkpoint and checks it against base + adapter.

    python -m experiments.merge --plan runs/my-pilot/plan.json
"""

from recipe.stage import Done, Stage, main


def run(stage: Stage) -> Done:
    from recipe import merge

    return merge.merge(stage)


if __name__ == "__main__":
    main("merge", __doc__, run)
