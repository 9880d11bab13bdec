"""Agent evaluation of the starting checkpoint on the test split.

    python -m experiments.baseline --plan runs/my-pilot/plan.json
"""

from recipe.run.entrypoint import main
from recipe.run.result import Done
from recipe.run.stage import Stage


def run(stage: Stage) -> Done:
    from recipe import evaluation

    return evaluation.evaluate_starting(stage)


if __name__ == "__main__":
    main("baseline", __doc__, run)
