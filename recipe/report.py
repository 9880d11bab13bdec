"""Report stage: verify everything, then write aggregates for people and programs.

    python -m recipe.report --run runs/my-pilot --output runs/my-pilot/summary

Writes ``summary.json``, ``summary.md``, ``summary.html`` and two plots into a new folder; no task, prompt or output of the policy is
in them. Any check that fails ends it with exit code 1, names the check and the record, and writes nothing.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from recipe.errors import CheckFailed, Refused
from recipe.files import canonical, tree_digests, write_bytes, write_json
from recipe.progress import Progress
from recipe.records import read
from recipe.run.entrypoint import guarded
from recipe.run.plan import Plan, load_run
from recipe.run.result import Done
from recipe.run.stage import Stage
from recipe.verify import plots, sampling, summary
from recipe.verify.derive import Derived, derive
from recipe.verify.markdown import markdown
from recipe.verify.page import page
from recipe.verify.replay import same
from recipe.verify.sampling import Drawn
from recipe.verify.summary import Summary

SUMMARY, SAMPLING = "summary", "sampling.json"  # of the report stage: a folder, and who sampled


def report(stage: Stage) -> Done:
    """The report as the last stage of a run."""
    found = verified(stage.plan)
    drawn = proved(stage.plan)
    write_json(stage.folder / SAMPLING, {name: asdict(claim) for name, claim in drawn.items()})
    return done(found, write(found, drawn, stage.folder / SUMMARY))


def done(found: Derived, said: Summary) -> Done:
    """What the stage's result says."""
    words = {name: getattr(said.verdict, name) for name in ("protocol", "agent_task", "retention")}
    return Done({"difference": said.compared.difference, **words}, found.all_gates)


def verified(plan: Plan, replayed: bool = True) -> Derived:
    """Everything that the numbers rest on, checked; with a progress bar over the replayed rollouts."""
    with Progress("replay", None, "rollout") as progress:
        return derive(plan, replayed, progress.update)


def proved(plan: Plan) -> dict[str, Drawn]:
    """Who sampled, by claim; with a progress bar over the rollouts and answers.

    Raises:
        CheckFailed: a checkpoint that does not draw what is said to be its own.
    """
    with Progress("sampling", None, "rollout") as progress:
        drawn = sampling.prove(plan, progress.update)
    sampling.check(drawn)
    return drawn


def stated(plan: Plan) -> dict[str, Drawn]:
    """Who sampled, as the report stage found it, held against the records that it speaks of.

    Raises:
        Refused, CheckFailed: it speaks of other tokens, does not add up, or is no proof.
    """
    path = plan.run / "report" / SAMPLING
    drawn = read(dict[str, Drawn], path, "the proof of who sampled")
    where = f"report/{SAMPLING}"
    if plan.retention_baseline.is_dir():
        facts = ("tokens", "rollouts", "precision")
        claimed = {name: {fact: getattr(claim, fact) for fact in facts} for name, claim in drawn.items()}
        same(where, "claim", claimed, sampling.claims(plan))
    for name, claim in drawn.items():
        if not claim.possible():
            raise CheckFailed(f"{where}: {name}: its numbers do not go together: {claim}")
    sampling.check(drawn)
    return drawn


def told(plan: Plan) -> list[str]:
    """The verdict's lines in the summary of a run that was just proved, and where that stands."""
    folder = plan.run / "report" / SUMMARY
    return [*summary.load(folder).verdict.lines, f"summary: {folder / 'summary.md'}"]


def summarised(plan: Plan) -> Summary:
    """The summary of a run whose evidence holds, whatever its files say."""
    return summary.summarise(verified(plan), stated(plan))


def write(found: Derived, drawn: dict[str, Drawn], output: Path) -> Summary:
    """Write the summary of a verified run into the new folder ``output``. Returns it.

    Raises:
        Refused: an ``output`` that exists.
    """
    if output.exists():
        raise Refused(f"the summary folder exists already: {output}; choose a new one")
    said = summary.summarise(found, drawn)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in texts(found, said).items():
        write_bytes(partial / name, content)
    for name, draw in pictures(found, said).items():
        draw(partial / name)
    partial.rename(output)
    return said


def texts(found: Derived, said: Summary) -> dict[str, bytes]:
    """The summary's files that are the same on every machine."""
    return {
        summary.SUMMARY: canonical(asdict(said)),
        "summary.md": markdown(said).encode(),
        "summary.html": page(found, said),
    }


def pictures(found: Derived, said: Summary) -> dict[str, Callable[[Path], None]]:
    """The summary's plots, which another version of the library may draw in other bytes."""
    steps = [step.metrics for step in found.training.steps]
    return {
        "training.png": lambda path: plots.training(steps, found.training.validations, path, said.kind),
        "paired.png": lambda path: plots.paired(said.compared, path, said.kind),
    }


def check(found: Derived, drawn: dict[str, Drawn], folder: Path) -> Iterator[str]:
    """Hold a written summary against the run, byte by byte. Yields what this machine could not compare.

    Raises:
        CheckFailed: names the file, and in the summary itself the value.
    """
    said = summary.summarise(found, drawn)
    wanted = texts(found, said)
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
        if arguments.output.exists():
            raise Refused(f"the summary folder exists already: {arguments.output}; choose a new one")
        plan = load_run(arguments.run, check_sources=False)
        found = write(verified(plan), proved(plan), arguments.output)
        print("\n".join([*found.verdict.lines, str(arguments.output / "summary.md")]))

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
