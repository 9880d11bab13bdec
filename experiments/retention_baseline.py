"""Records the retention run of a checkpoint: the folder that experiments.prepare reads as --retention-run.

    python -m experiments.retention_baseline --model /abs/checkpoint --questions mgsm_de.tsv --output /abs/sft/run
"""

import argparse
import sys
from pathlib import Path

from recipe import config, retention_run, stage


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.retention_baseline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder, with its tokenizer")
    parser.add_argument("--questions", type=Path, required=True, help="TSV: question, tab, answer; no header")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--protocol", type=Path, help="YAML with fields of retention_run.Protocol that differ")
    parser.add_argument("--precision", choices=config.PRECISIONS, default=config.PRECISIONS[0], help="%(default)s")
    parser.add_argument("--limit", type=int, default=retention_run.LIMIT, help="items, from the top (%(default)s)")
    arguments = parser.parse_args()
    return stage.guarded(lambda: record(arguments))


def record(given: argparse.Namespace) -> None:
    protocol = retention_run.resolve_protocol(config.read(given.protocol) or {})
    run = retention_run.record_run(
        given.model, given.questions, given.output, protocol, given.precision, given.limit
    )
    print(f"{run.folder}: {run.counts['correct']} of {run.counts['items']} correct")


if __name__ == "__main__":
    sys.exit(main())
