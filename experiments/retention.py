"""German mathematics items: the merged checkpoint against the recorded starting checkpoint.

    python -m experiments.retention --plan runs/my-pilot/plan.json
"""

from recipe.stage import Done, Stage, main


def run(stage: Stage) -> Done:
    from recipe import retention

    return retention.measure(stage)


if __name__ == "__main__":
    main("retention", __doc__, run)
