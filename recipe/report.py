"""Report stage: verify everything, then write aggregates for people and programs.

    python -m recipe.report --run runs/my-pilot --output runs/my-pilot/summary

Writes ``summary.json``, ``summary.md`` and two plots into a new folder; no task, prompt or output of the policy is
in them. Any check that fails ends it with exit code 1, names the check and the record, and writes nothing.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from recipe.errors import CheckFailed, Refused
from recipe.files import canonical, tree_digests, write_bytes
from recipe.progress import Progress
from recipe.run.entrypoint import guarded
from recipe.run.plan import Plan, load_run
from recipe.run.result import Done
from recipe.run.stage import Stage
from recipe.verify import plots, summary
from recipe.verify.derive import Derived, derive
from recipe.verify.replay import same
from recipe.verify.summary import Summary

SUMMARY = "summary"  # folder of the report stage


def report(stage: Stage) -> Done:
    """The report as the last stage of a run."""
    found = verified(stage.plan)
    said = write(found, stage.folder / SUMMARY)
    return done(found, said)


def done(found: Derived, said: Summary) -> Done:
    """What the stage's result says."""
    return Done({"qualified": said.qualified}, found.all_gates)


def verified(plan: Plan, replayed: bool = True) -> Derived:
    """Everything that the numbers rest on, checked; with a progress bar over the replayed rollouts."""
    with Progress("replay", None, "rollout") as progress:
        return derive(plan, replayed, progress.update)


def summarised(plan: Plan) -> Summary:
    """The summary of a run whose evidence holds, whatever its files say."""
    return summary.summarise(verified(plan))


def write(found: Derived, output: Path) -> Summary:
    """Write the summary of a verified run into the new folder ``output``. Returns it.

    Raises:
        Refused: an ``output`` that exists.
    """
    if output.exists():
        raise Refused(f"the summary folder exists already: {output}; choose a new one")
    said = summary.summarise(found)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in texts(said).items():
        write_bytes(partial / name, content)
    for name, draw in pictures(found, said).items():
        draw(partial / name)
    partial.rename(output)
    return said


def texts(said: Summary) -> dict[str, bytes]:
    """The summary's files that are the same on every machine."""
    return {summary.SUMMARY: canonical(asdict(said)), "summary.md": summary.markdown(said).encode()}


def pictures(found: Derived, said: Summary) -> dict[str, Callable[[Path], None]]:
    """The summary's plots, which another version of the library may draw in other bytes."""
    steps = [step.metrics for step in found.training.steps]
    return {
        "training.png": lambda path: plots.training(steps, found.training.validations, path, said.kind),
        "paired.png": lambda path: plots.paired(said.paired, path, said.kind),
    }


def check(found: Derived, folder: Path) -> Iterator[str]:
    """Hold a written summary against the run, byte by byte. Yields what this machine could not compare.

    Raises:
        CheckFailed: names the file, and in the summary itself the value.
    """
    said = summary.summarise(found)
    wanted = texts(said)
    written = summary.load(folder)
    same(f"{folder.name}/{summary.SUMMARY}", "value", asdict(written), asdict(said))
    drawn = pictures(found, said)
    if names := tree_digests(folder).keys() ^ {*wanted, *drawn}:
        raise CheckFailed(f"{folder}: {sorted(names)[0]} is missing, or is no part of a summary")
    for name, content in wanted.items():
        if (folder / name).read_bytes() != content:
            raise CheckFailed(f"{folder / name} is not what the run's evidence gives")
    yield from plots.check(folder, drawn)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="run folder with plan.json")
    parser.add_argument("--output", type=Path, required=True, help="new folder for the summary")
    arguments = parser.parse_args()

    def work() -> None:
        found = write(load_run(arguments.run, check_sources=False), arguments.output)
        print(f"{'qualified' if found.qualified else 'not qualified'}: {arguments.output / 'summary.md'}")

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
