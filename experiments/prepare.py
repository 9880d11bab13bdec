"""Freezes a plan: inputs, configuration, sources and versions, before anything runs.

    python -m experiments.prepare --model /abs/sft/merged-checkpoint --retention-run /abs/sft/run \\
        --output runs/my-pilot [--config overrides.yaml]

The configuration is a YAML of overrides, such as {grpo: {steps: 16}}; the defaults are in recipe/config.py.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    from recipe import stage

    parser = argparse.ArgumentParser(
        prog="python -m experiments.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder to start from")
    parser.add_argument("--retention-run", type=Path, required=True, help="its recorded retention run")
    parser.add_argument("--output", type=Path, required=True, help="new run folder")
    parser.add_argument("--config", type=Path, help="YAML with overrides of the configuration")
    arguments = parser.parse_args()
    return stage.guarded(lambda: freeze(arguments))


def freeze(arguments: argparse.Namespace) -> None:
    from recipe import config, plan

    frozen = plan.prepare(
        arguments.model, arguments.retention_run, config.resolve(config.read(arguments.config)), arguments.output
    )
    print(f"{frozen.kind} plan {frozen.id[:16]} frozen in {frozen.run / 'plan.json'}")


if __name__ == "__main__":
    sys.exit(main())
