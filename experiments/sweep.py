"""One trial of a sweep: GRPO under settings of its own, measured on the development split alone.

    python -m experiments.sweep --sweep runs/my-sweep --trial 3

The driver's sweep freezes the folder and starts the trials; on a cluster its master gives each the settings.
"""

import sys

from recipe.run.result import Done
from recipe.run.stage import Stage
from recipe.sweep import trial


def run(stage: Stage) -> Done | None:
    from recipe import grpo

    return grpo.train(stage)


if __name__ == "__main__":
    sys.exit(trial.main(__doc__, run))
