"""Freezes a plan: inputs, configuration, sources and versions, before anything runs.

    python -m experiments.prepare --model /abs/sft/merged-checkpoint --retention-baseline /abs/sft/run \\
        --output runs/my-pilot [--config overrides.yaml]

The configuration is a YAML of overrides, such as {grpo: {steps: 16}}; the defaults are in recipe/config.py.
"""

import argparse
import sys
from pathlib import Path

from recipe import config
from recipe.run import plan
from recipe.run.cluster import Runtime
from recipe.run.entrypoint import Flags
from recipe.run.sources import ROOT


def main() -> int:
    parser = Flags("prepare", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder to start from")
    parser.add_argument("--retention-baseline", "--retention-run", type=Path, required=True, help="its retention baseline")
    parser.add_argument("--output", type=Path, required=True, help="new run folder")
    parser.add_argument("--config", type=Path, help="YAML with overrides of the configuration")
    parser.add_argument("--repository", type=Path, default=ROOT, help="git checkout of this code (%(default)s)")
    return parser.run(freeze)


def freeze(given: argparse.Namespace, runtime: Runtime) -> dict:
    settings = config.resolve(config.read(given.config))
    repeated = runtime.owner is not None
    frozen = plan.prepare(given.model, given.retention_baseline, settings, given.output, given.repository, repeated)
    print("\n".join(frozen.announcement()))
    return {"frozen": True}


if __name__ == "__main__":
    sys.exit(main())
