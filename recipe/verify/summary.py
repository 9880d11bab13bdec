"""What verified evidence says: the aggregates of a run, for programs and for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.records import read
from recipe.run.evidence import Evaluated
from recipe.stages import EVIDENCE
from recipe.task import family
from recipe.verify.derive import Derived
from recipe.verify.sampling import Drawn

SUMMARY = "summary.json"
LAYOUT = 2
RESAMPLES = 10_000
SEED = 0  # of the bootstrap alone

LIMITS = (
    "One run of one seed: a repetition with another seed may differ by more than the interval below.",
    "The interval resamples the test items; it says nothing about other task families, languages or tools.",
    "The checkpoints draw the sampled tokens again; how they came to be is proved only by training again.",
    "Retention covers the frozen German mathematics items alone, not the checkpoint's other abilities.",
)

Metrics = dict[str, bool | int | float | str]


@dataclass(frozen=True)
class Paired:
    """Baseline and candidate on the same items; ``difference`` is that of strict success, in [-1, 1]."""

    items: int
    difference: float
    descriptive_interval_95: list[float]
    resamples: int
    better: int
    worse: int
    equal_success: int
    equal_failure: int


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from. ``seconds`` and ``machines`` are those of each stage."""

    commit: str | None
    uncommitted: list[str]
    starting_checkpoint: str
    adapter: str
    merged_checkpoint: str
    versions: dict[str, str]
    machines: dict[str, dict[str, int | str | None]]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Precision:
    """Types that the weights were loaded in."""

    training: str
    evaluation: str
    retention_baseline: str


@dataclass(frozen=True)
class Summary:
    """``summary.json``."""

    layout: int
    kind: str
    family: str
    plan_id: str
    qualified: bool
    not_qualified_because: list[str]
    deviations: dict
    baseline: Metrics
    candidate: Metrics
    paired: Paired
    training: Metrics
    merge: Metrics
    retention: Metrics
    precision: Precision
    gates: dict[str, bool]
    attempts: list[str]  # what did not go straight to its end; empty where everything ran once
    sampling: dict[str, int]  # sampled tokens that the checkpoints draw again, over all claims
    limits: list[str]
    provenance: Provenance


def load(folder: Path) -> Summary:
    """The summary in ``folder``."""
    return read(Summary, folder / SUMMARY, "the summary", (LAYOUT, "report the run again"))


def summarise(found: Derived, drawn: Mapping[str, Drawn]) -> Summary:
    """The aggregates of a run; ``drawn`` says who sampled, by claim."""
    plan, results, metrics = found.plan, found.results, found.metrics
    reasons = [f"gate {gate} did not pass" for gate, passed in found.all_gates.items() if not passed]
    if plan.practice:
        reasons.insert(0, "practice checkpoint: it shows that the machinery works, nothing about Qwen3")
    elif plan.frozen.deviations:
        reasons.insert(0, "the configuration deviates from the default protocol")
    return Summary(
        layout=LAYOUT,
        kind=plan.kind,
        family=plan.family.name,
        plan_id=plan.id,
        qualified=not reasons,
        not_qualified_because=reasons,
        deviations=plan.frozen.deviations,
        baseline=_measured(found, "baseline"),
        candidate=_measured(found, "candidate"),
        paired=paired(_successes(found.baseline), _successes(found.candidate)),
        training=metrics["grpo"],
        merge=metrics["merge"],
        retention=metrics["retention"],
        precision=Precision(
            training=plan.config.precision,
            evaluation=plan.config.evaluation.precision,
            retention_baseline=plan.config.evaluation.precision,  # prepare refuses another
        ),
        gates=found.all_gates,
        attempts=found.attempts,
        sampling={
            name: sum(getattr(claim, name) for claim in drawn.values())
            for name in ("tokens", "matched", "undecided", "contradicted")
        },
        limits=list(LIMITS),
        provenance=Provenance(
            commit=plan.frozen.repository.commit,
            uncommitted=plan.frozen.repository.uncommitted,
            starting_checkpoint=plan.frozen.checkpoint.digest,
            adapter=results["grpo"].folder("adapter"),
            merged_checkpoint=results["merge"].folder("checkpoint"),
            versions=plan.frozen.versions,
            machines={name: results[name].machine for name in EVIDENCE},
            seconds={name: results[name].fact("seconds", "total", float) for name in EVIDENCE},
        ),
    )


def _measured(found: Derived, stage: str) -> Metrics:
    return {**found.metrics[stage], "generation_seconds": found.results[stage].fact("seconds", "generation", float)}


def _successes(records: Sequence[Evaluated]) -> dict[str, float]:
    """Share of strict successes over each task's samples."""
    by_task: dict[str, list[bool]] = {}
    for record in records:
        by_task.setdefault(record.task_id, []).append(record.outcome["strict_success"])
    return {task: sum(values) / len(values) for task, values in by_task.items()}


def paired(before: dict[str, float], after: dict[str, float]) -> Paired:
    """Difference of strict success by item, with a percentile bootstrap over items (Efron, 1979)."""
    import numpy as np

    items = sorted(before)
    differences = np.array([after[item] - before[item] for item in items])
    draws = np.random.default_rng(SEED).integers(len(items), size=(RESAMPLES, len(items)))
    low, high = np.percentile(differences[draws].mean(axis=1), [2.5, 97.5])
    return Paired(
        items=len(items),
        difference=float(differences.mean()),
        descriptive_interval_95=[float(low), float(high)],
        resamples=RESAMPLES,
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        equal_success=sum(before[item] == after[item] == 1 for item in items),
        equal_failure=sum(before[item] == after[item] == 0 for item in items),
    )


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


def markdown(summary: Summary) -> str:
    """The summary for people."""
    training, kept, pair = summary.training, summary.retention, summary.paired
    chosen = family(summary.family)
    low, high = pair.descriptive_interval_95
    lines = [f"# {_TITLES[summary.kind]}: agentic GRPO on {chosen.title}", ""]
    if summary.qualified:
        lines += ["**Qualified**: default protocol, every gate passed.", ""]
    else:
        lines += ["**Not a qualified pilot:**", "", *(f"- {reason}" for reason in summary.not_qualified_because), ""]
    lines += [
        f"Plan `{summary.plan_id[:16]}`, commit `{(summary.provenance.commit or 'none')[:12]}`"
        + (" with uncommitted changes" if summary.provenance.uncommitted else ""),
        "",
        "## Held-out test tasks",
        "",
        f"{summary.baseline['rollouts']} rollouts each, the same tasks and random streams.",
        "",
        "| | baseline | candidate |",
        "|---|---:|---:|",
        *(
            f"| {title} | {form.format(summary.baseline[key])} | {form.format(summary.candidate[key])} |"
            for key, (title, form) in _rows(chosen.milestones).items()
        ),
        "",
        f"Paired difference of strict success: **{pair.difference:+.1%}** over {pair.items} items "
        f"({pair.better} better, {pair.worse} worse). Item bootstrap, 95%: {low:+.1%} to {high:+.1%}; "
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
        f"Weights were loaded in {summary.precision.retention_baseline} when the retention baseline was recorded "
        f"and in {summary.precision.evaluation} when the candidate was measured.",
        "",
        "## Gates",
        "",
        *(f"- {'passed' if passed else '**FAILED**'}: {gate}" for gate, passed in summary.gates.items()),
        "",
        f"Merged weights (float32): mean KL from base + adapter {summary.merge['mean_kl']:.2e} nats a token. "
        f"Held in BF16 instead, their update would have a relative error of {summary.merge['bf16_update_error']:.0%}.",
        "",
        "## Attempts",
        "",
        *(f"- {line}" for line in summary.attempts or ["every stage ran once, undisturbed"]),
        "",
        "## Who sampled",
        "",
        "Drawn again by the checkpoints that are said to have sampled them: "
        + ", ".join(f"{summary.sampling[name]} {name}" for name in ("matched", "undecided", "contradicted"))
        + f" of {summary.sampling['tokens']} tokens.",
        "",
        "## What this does not show",
        "",
        *(f"- {limit}" for limit in summary.limits),
        "",
    ]
    return "\n".join(lines)
