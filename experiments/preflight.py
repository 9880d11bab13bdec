"""Checks the worker before anything costs time: GPU, memory, disk, versions.

    python -m experiments.preflight --plan runs/my-pilot/plan.json
"""

from recipe.run.entrypoint import main
from recipe.run.result import Done
from recipe.run.stage import Stage


def run(stage: Stage) -> Done:
    from recipe import preflight

    return preflight.check(stage)


if __name__ == "__main__":
    main("preflight", __doc__, run)
