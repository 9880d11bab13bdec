"""Verifies the whole run and writes its summary.

    python -m experiments.report --plan runs/my-pilot/plan.json
"""

from recipe.stage import Done, Stage, main


def run(stage: Stage) -> Done:
    from recipe import report

    return report.conclude(stage)


if __name__ == "__main__":
    main("report", __doc__, run, model=False)
