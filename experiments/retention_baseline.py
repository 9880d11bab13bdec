"""Records the retention baseline of a checkpoint: the folder that experiments.prepare reads as --retention-baseline.

    python -m experiments.retention_baseline --model /abs/checkpoint --questions mgsm_de.tsv --output /abs/sft/run
"""

import argparse
import sys
from pathlib import Path

from recipe import config
from recipe.mgsm import baseline
from recipe.policy import PRECISIONS, checkpoint
from recipe.run.cluster import Runtime
from recipe.run.entrypoint import Flags


def main() -> int:
    parser = Flags("retention_baseline", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder, with its tokenizer")
    parser.add_argument("--questions", type=Path, required=True, help="TSV: question, tab, answer; no header")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--protocol", type=Path, help="YAML with fields of baseline.Protocol that differ")
    # The candidate's own, or prepare refuses the two.
    measured = config.Evaluation().precision
    parser.add_argument("--precision", choices=PRECISIONS, default=measured, help="evaluation.precision (%(default)s)")
    parser.add_argument("--limit", type=int, default=baseline.LIMIT, help="items, from the top (%(default)s)")
    return parser.run(record)


def record(given: argparse.Namespace, runtime: Runtime) -> dict:
    protocol = baseline.resolve_protocol(config.read(given.protocol) or {})
    if runtime.owner and given.output.exists() and _asked_for(given, protocol):
        run = baseline.load(given.output)  # a lost machine made the cluster record again
    else:
        run = baseline.record(
            given.model, given.questions, given.output, protocol, given.precision, given.limit
        )
    print(f"{run.folder}: {run.counts['correct']} of {run.counts['items']} correct")
    return run.counts


def _asked_for(given: argparse.Namespace, protocol: baseline.Protocol) -> bool:
    """Whether the output is the finished recording of just this."""
    run = baseline.load(given.output)
    items = baseline.items_from_tsv(given.questions, given.limit)
    found = (run.checkpoint, run.protocol, run.precision, run.items)
    return found == (checkpoint.identity(given.model)["digest"], protocol, given.precision, items)


if __name__ == "__main__":
    sys.exit(main())
