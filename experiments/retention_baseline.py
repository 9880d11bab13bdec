"""Records the retention run of a checkpoint: the folder that experiments.prepare reads as --retention-run.

    python -m experiments.retention_baseline --model /abs/checkpoint --questions mgsm_de.tsv --output /abs/sft/run
"""

import argparse
import sys
from pathlib import Path

from recipe import config
from recipe.mgsm import record as retention_run
from recipe.policy import checkpoint
from recipe.run.cluster import Runtime
from recipe.run.entrypoint import Flags


def main() -> int:
    parser = Flags("retention_baseline", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder, with its tokenizer")
    parser.add_argument("--questions", type=Path, required=True, help="TSV: question, tab, answer; no header")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--protocol", type=Path, help="YAML with fields of retention_run.Protocol that differ")
    parser.add_argument("--precision", choices=config.PRECISIONS, default=config.PRECISIONS[0], help="%(default)s")
    parser.add_argument("--limit", type=int, default=retention_run.LIMIT, help="items, from the top (%(default)s)")
    return parser.run(record)


def record(given: argparse.Namespace, runtime: Runtime) -> dict:
    protocol = retention_run.resolve_protocol(config.read(given.protocol) or {})
    if runtime.owner and given.output.exists() and _asked_for(given, protocol):
        run = retention_run.load_run(given.output)  # a lost machine made the cluster record again
    else:
        run = retention_run.record_run(
            given.model, given.questions, given.output, protocol, given.precision, given.limit
        )
    print(f"{run.folder}: {run.counts['correct']} of {run.counts['items']} correct")
    return run.counts


def _asked_for(given: argparse.Namespace, protocol: retention_run.Protocol) -> bool:
    """Whether the output is the finished recording of just this."""
    run = retention_run.load_run(given.output)
    items = retention_run.items_from_tsv(given.questions, given.limit)
    found = (run.checkpoint, run.protocol, run.precision, run.items)
    return found == (checkpoint.identity(given.model)["digest"], protocol, given.precision, items)


if __name__ == "__main__":
    sys.exit(main())
