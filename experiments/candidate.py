"""Agent evaluation of the merged checkpoint on the test split, by the baseline's protocol.

    python -m experiments.candidate --plan runs/my-pilot/plan.json
"""

from recipe.run.entrypoint import main
from recipe.run.result import Done
from recipe.run.stage import Stage


def run(stage: Stage) -> Done:
    from recipe import evaluation

    return evaluation.evaluate_merged(stage)


if __name__ == "__main__":
    main("candidate", __doc__, run)
