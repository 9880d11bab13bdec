"""German mathematics items: the merged checkpoint against the recorded starting checkpoint.

    python -m experiments.retention --plan runs/my-pilot/plan.json
"""

from recipe.run.entrypoint import main
from recipe.run.result import Done
from recipe.run.stage import Stage


def run(stage: Stage) -> Done:
    from recipe import retention

    return retention.measure(stage)


if __name__ == "__main__":
    main("retention", __doc__, run)
