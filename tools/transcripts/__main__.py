"""What the policy said, rollout by rollout: a page to look at, or lines in a terminal.

    python -m tools.transcripts --run runs/my-pilot --output page.html
    python -m tools.transcripts --run runs/my-pilot --output page.html --stage baseline candidate
    python -m tools.transcripts --run runs/my-pilot --text --stage grpo --step 12 | less -R

Both hold task texts and outputs of the policy: they are for your own eyes and no part of the summary. The page is one
file that opens nothing else. A run that is not finished is shown as far as it is.
"""

import argparse
import math
import os
import sys
from pathlib import Path

from recipe.errors import Refused
from recipe.files import real, write_bytes
from recipe.run.entrypoint import guarded
from recipe.run.plan import load_run
from tools.transcripts.gather import STAGES, Choice, transcripts
from tools.transcripts.page import WARNING, html
from tools.transcripts.terminal import lines


def write(run: Path, choice: Choice, output: Path) -> None:
    """Write the page.

    Raises:
        Refused: an ``output`` that exists or would lie in a folder of the run, or as :func:`transcripts`.
    """
    plan = load_run(run, check_inputs=False)
    if os.path.lexists(output):
        raise Refused(f"{output} exists already; choose a new file")
    if plan.run in real(output).parent.parents:
        raise Refused(f"{output} would lie among the run's evidence; choose a file outside {plan.run}")
    page = html(plan, transcripts(plan, choice))
    write_bytes(output, page)
    print(f"{output}: {math.ceil(len(page) / 1000)} kB")


def show(run: Path, choice: Choice) -> None:
    """Print the transcripts. Raises as :func:`transcripts`."""
    found = transcripts(load_run(run, check_inputs=False), choice)
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not have every letter
    try:
        for number, line in enumerate(lines(found, sys.stdout.isatty())):
            if number == 0:
                print(WARNING, file=sys.stderr)
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.transcripts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", type=Path, help="new HTML file")
    where.add_argument("--text", action="store_true", help="print them instead")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=[], help="of these alone")
    parser.add_argument("--task", nargs="+", metavar="ID", default=[], help="of these tasks alone")
    parser.add_argument("--step", nargs="+", type=int, metavar="N", default=[], help="of these training steps alone")
    given = parser.parse_args()
    choice = Choice(tuple(given.stage), tuple(given.task), tuple(given.step))
    return guarded(lambda: show(given.run, choice) if given.text else write(given.run, choice, given.output))


if __name__ == "__main__":
    sys.exit(main())
