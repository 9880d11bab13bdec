"""Report stage: verify everything, then write aggregates for people and programs.

    python -m recipe.report --run runs/my-pilot --output runs/my-pilot/summary

Writes ``summary.json``, ``summary.md`` and two plots into a new folder; no task, prompt or output of the policy is
in them. Any check that fails ends it with exit code 1, names the check and the record, and writes nothing.
"""

import argparse
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from recipe.errors import CheckFailed, Refused
from recipe.files import write_bytes, write_json
from recipe.progress import Progress
from recipe.run import repository
from recipe.run.entrypoint import guarded
from recipe.run.plan import ROOT, Plan, load_run
from recipe.run.result import Done, Result, completed
from recipe.run.stage import Stage
from recipe.stages import EVIDENCE
from recipe.verify import plots, replay, summary
from recipe.verify.summary import Summary


def report(stage: Stage) -> Done:
    """The report as the last stage of a run."""
    found = write(stage.plan, stage.folder / "summary")
    return Done({"qualified": found.qualified}, found.gates)


def write(plan: Plan, output: Path) -> Summary:
    """Verify the run and write its summary into the new folder ``output``. Returns the summary.

    Raises:
        Refused: a changed input, a missing stage, or an ``output`` that exists.
        CheckFailed: evidence that does not hold.
    """
    if os.path.lexists(output):
        raise Refused(f"the summary folder exists already: {output}; choose a new one")
    results = {name: completed(plan, name) for name in EVIDENCE}
    verify(plan, results)
    found = summary.summarise(plan, results)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_json(partial / summary.SUMMARY, asdict(found))
    plots.training(replay.steps(plan), replay.validations(plan), partial / "training.png", plan.kind)
    plots.paired(found.paired, partial / "paired.png", plan.kind)
    write_bytes(partial / "summary.md", summary.markdown(found).encode())
    partial.rename(output)
    return found


def verify(plan: Plan, results: dict[str, Result]) -> None:
    """Every check that the numbers rest on, with a progress bar over the replayed rollouts."""
    from recipe.policy.checkpoint import load_tokenizer
    from recipe.rollout import agent_chat

    _committed(plan)
    replay.ancestry(plan, results)
    chat = agent_chat(load_tokenizer(plan.checkpoint), plan.family)
    with Progress("replay", None, "rollout") as progress:
        replay.evaluation(plan, "baseline", "test", chat, progress.update)
        replay.training(plan, chat, progress.update)
        replay.evaluation(plan, "candidate", "test", chat, progress.update)
    replay.retained(plan, results["retention"])


def _committed(plan: Plan) -> None:
    """The consumed sources are those of the recorded commit; a practice plan may be ahead of it."""
    state = plan.frozen.repository
    if state.commit is None or state.uncommitted:
        if plan.practice:
            return
        raise CheckFailed("sources: the plan was prepared from uncommitted sources")
    where = Path(state.path) if Path(state.path).is_dir() else ROOT
    for path in repository.differing(where, state.commit, plan.frozen.sources):
        raise CheckFailed(f"sources: {path} in commit {state.commit[:12]} is not the one that this run consumed")


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
