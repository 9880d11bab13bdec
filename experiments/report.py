"""Verifies the whole run and writes its summary.

    python -m experiments.report --plan runs/my-pilot/plan.json
"""

from recipe.run.entrypoint import main
from recipe.run.result import Done
from recipe.run.stage import Stage


def run(stage: Stage) -> Done:
    from recipe import report

    return report.report(stage)


if __name__ == "__main__":
    main("report", __doc__, run)
