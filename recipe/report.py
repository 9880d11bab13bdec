"""Report stage: verify everything, then write aggregates for people and programs.

    python -m recipe.report --run runs/my-pilot --output runs/my-pilot/summary

Writes ``summary.json``, ``summary.md`` and two plots into a new folder; no task, prompt or output of the policy is
in them. Any check that fails ends it with exit code 1, names the check and the record, and writes nothing.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from recipe.errors import CheckFailed, Refused
from recipe.files import write_bytes, write_json
from recipe.progress import Progress
from recipe.records import read_lines
from recipe.run import repository
from recipe.run.entrypoint import guarded
from recipe.run.evidence import ROLLOUTS
from recipe.run.plan import ROOT, Plan, load
from recipe.run.result import Done, Result, completed
from recipe.run.stage import Stage
from recipe.stages import EVIDENCE
from recipe.task import family
from recipe.verify import plots, replay

LAYOUT = 1
RESAMPLES = 10_000
SEED = 0  # of the bootstrap alone

LIMITS = (
    "One run of one seed: a repetition with another seed may differ by more than the interval below.",
    "The interval resamples the test items; it says nothing about other task families, languages or tools.",
    "The replay proves what followed from the sampled tokens, not that this policy sampled them.",
    "Retention covers the frozen German mathematics items alone, not the checkpoint's other abilities.",
)


def report(stage: Stage) -> Done:
    """The report as the last stage of a run."""
    summary = write(stage.plan, stage.folder / "summary")
    return Done({"qualified": summary["qualified"]}, summary["gates"])


def write(plan: Plan, output: Path) -> dict:
    """Verify the run and write its summary into the new folder ``output``. Returns the summary.

    Raises:
        Refused: a changed input, a missing stage, or an ``output`` that exists.
        CheckFailed: evidence that does not hold.
    """
    if output.exists():
        raise Refused(f"the summary folder exists already: {output}; choose a new one")
    results = {name: completed(plan, name) for name in EVIDENCE}
    verify(plan, results)
    summary = summarise(plan, results)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_json(partial / "summary.json", summary)
    plots.training(replay.steps(plan), replay.validations(plan), partial / "training.png", plan.kind)
    plots.paired(summary["paired"], partial / "paired.png", plan.kind)
    write_bytes(partial / "summary.md", markdown(summary).encode())
    partial.rename(output)
    return summary


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


def summarise(plan: Plan, results: dict[str, Result]) -> dict:
    """The aggregates, from results whose evidence was verified."""
    gates = {f"{name}: {gate}": passed for name in EVIDENCE for gate, passed in results[name].gates.items()}
    reasons = [f"gate {gate} did not pass" for gate, passed in gates.items() if not passed]
    if plan.practice:
        reasons.insert(0, "practice checkpoint: it shows that the machinery works, nothing about Qwen3")
    elif plan.frozen.deviations:
        reasons.insert(0, "the configuration deviates from the default protocol")
    measured = {}
    for name in ("baseline", "candidate"):
        measured[name] = {**results[name].metrics, "generation_seconds": results[name].seconds["generation"]}
    return {
        "layout": LAYOUT,
        "kind": plan.kind,
        "family": plan.family.name,
        "plan_id": plan.id,
        "qualified": not reasons,
        "not_qualified_because": reasons,
        "deviations": plan.frozen.deviations,
        **measured,
        "paired": paired(*(_successes(plan, name) for name in ("baseline", "candidate"))),
        "training": results["grpo"].metrics,
        "merge": results["merge"].metrics,
        "retention": results["retention"].metrics,
        "precision": {
            "training": plan.config.precision,
            "evaluation": plan.config.evaluation.precision,
            "retention_baseline": plan.recorded.precision,
        },
        "gates": gates,
        "limits": list(LIMITS),
        "provenance": {
            "commit": plan.frozen.repository.commit,
            "uncommitted": plan.frozen.repository.uncommitted,
            "starting_checkpoint": plan.frozen.checkpoint.digest,
            "adapter": results["grpo"].ancestry["adapter"],
            "merged_checkpoint": results["merge"].ancestry["merged_checkpoint"],
            "versions": plan.frozen.versions,
            "machines": {name: results[name].machine for name in EVIDENCE},
            "seconds": {name: results[name].seconds["total"] for name in EVIDENCE},
        },
    }


def _successes(plan: Plan, name: str) -> dict[str, float]:
    """Share of strict successes over each task's samples."""
    found: dict[str, list[bool]] = {}
    for record in read_lines(plan.run / name / ROLLOUTS, f"the rollouts of stage {name}"):
        found.setdefault(record["task_id"], []).append(record["outcome"]["strict_success"])
    return {task: sum(values) / len(values) for task, values in found.items()}


def paired(before: dict[str, float], after: dict[str, float]) -> dict:
    """Difference of strict success by item, with a percentile bootstrap over items (Efron, 1979)."""
    import numpy as np

    items = sorted(before)
    differences = np.array([after[item] - before[item] for item in items])
    draws = np.random.default_rng(SEED).integers(len(items), size=(RESAMPLES, len(items)))
    low, high = np.percentile(differences[draws].mean(axis=1), [2.5, 97.5])
    return {
        "items": len(items),
        "difference": float(differences.mean()),
        "descriptive_interval_95": [float(low), float(high)],
        "resamples": RESAMPLES,
        "better": int((differences > 0).sum()),
        "worse": int((differences < 0).sum()),
        "equal_success": sum(before[item] == after[item] == 1 for item in items),
        "equal_failure": sum(before[item] == after[item] == 0 for item in items),
    }


_TITLES = {
    "practice": "Practice run",
    "custom": "Run under a custom protocol",
    "pilot": "Pilot",
}
_FIRST_ROWS = {
    "strict_success": ("strict success", "{:.1%}"),
    "final_answer_correct": ("correct answers", "{:.1%}"),
    "reward": ("training reward (shaped)", "{:.3f}"),
}
_LAST_ROWS = {
    "malformed": ("malformed outputs", "{:.1%}"),
    "tool_errors": ("tool errors a rollout", "{:.2f}"),
    "hit_cap": ("token cap hit", "{:.1%}"),
    "tokens": ("policy tokens a rollout", "{:.0f}"),
    "generation_seconds": ("generation time (s)", "{:.1f}"),
}


def _rows(milestones: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Title and format of each measure, a family's milestones in the middle."""
    return {**_FIRST_ROWS, **{name: (title, "{:.1%}") for name, title in milestones.items()}, **_LAST_ROWS}


def markdown(summary: dict) -> str:
    """The summary for people."""
    training, kept, pair = summary["training"], summary["retention"], summary["paired"]
    chosen = family(summary["family"])
    low, high = pair["descriptive_interval_95"]
    lines = [f"# {_TITLES[summary['kind']]}: agentic GRPO on {chosen.title}", ""]
    if summary["qualified"]:
        lines += ["**Qualified**: default protocol, every gate passed.", ""]
    else:
        lines += ["**Not a qualified pilot:**", "", *(f"- {reason}" for reason in summary["not_qualified_because"]), ""]
    lines += [
        f"Plan `{summary['plan_id'][:16]}`, commit `{(summary['provenance']['commit'] or 'none')[:12]}`"
        + (" with uncommitted changes" if summary["provenance"]["uncommitted"] else ""),
        "",
        "## Held-out test tasks",
        "",
        f"{summary['baseline']['rollouts']} rollouts each, the same tasks and random streams.",
        "",
        "| | baseline | candidate |",
        "|---|---:|---:|",
        *(
            f"| {title} | {form.format(summary['baseline'][key])} | {form.format(summary['candidate'][key])} |"
            for key, (title, form) in _rows(chosen.milestones).items()
        ),
        "",
        f"Paired difference of strict success: **{pair['difference']:+.1%}** over {pair['items']} items "
        f"({pair['better']} better, {pair['worse']} worse). Item bootstrap, 95%: {low:+.1%} to {high:+.1%}; "
        "descriptive, not a test of significance.",
        "",
        "![Paired outcomes](paired.png)",
        "",
        "## Training",
        "",
        f"{training['steps']} steps, {training['rollouts']} rollouts on {training['unique_tasks']} tasks; "
        f"{training['mixed_groups']} groups with mixed rewards; gradient norm "
        f"{training['grad_norm_min']:.3g} to {training['grad_norm_max']:.3g}.",
        "",
        "| | first quarter | last quarter |",
        "|---|---:|---:|",
        f"| training reward | {training['reward_first_quarter']:.3f} | {training['reward_last_quarter']:.3f} |",
        f"| strict success | {training['strict_success_first_quarter']:.1%} | "
        f"{training['strict_success_last_quarter']:.1%} |",
        "",
        "![Training](training.png)",
        "",
        "## Retention (German mathematics, no tools)",
        "",
        f"Correct: {kept['correct_before']} of {kept['items']} before, {kept['correct_after']} after "
        f"({kept['gained']} gained, {kept['lost']} lost; at most {kept['margin']} fewer allowed). "
        f"Ambiguous outputs: {kept['ambiguous_before']} before, {kept['ambiguous_after']} after."
        + (" **Regression.**" if kept["regression"] else ""),
        "",
        f"Weights were loaded in {summary['precision']['retention_baseline']} when the retention baseline was recorded "
        f"and in {summary['precision']['evaluation']} when the candidate was measured.",
        "",
        "## Gates",
        "",
        *(f"- {'passed' if passed else '**FAILED**'}: {gate}" for gate, passed in summary["gates"].items()),
        "",
        f"Merged weights (float32): mean KL from base + adapter {summary['merge']['mean_kl']:.2e} nats a token. "
        f"Held in BF16 instead, their update would have a relative error of {summary['merge']['bf16_update_error']:.0%}.",
        "",
        "## What this does not show",
        "",
        *(f"- {limit}" for limit in summary["limits"]),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="run folder with plan.json")
    parser.add_argument("--output", type=Path, required=True, help="new folder for the summary")
    arguments = parser.parse_args()

    def work() -> None:
        summary = write(load(arguments.run / "plan.json", check_sources=False), arguments.output)
        print(f"{'qualified' if summary['qualified'] else 'not qualified'}: {arguments.output / 'summary.md'}")

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
