"""What verified evidence says: the aggregates of a run, for programs; :mod:`recipe.verify.markdown` is for people."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipe.records import read
from recipe.stages import EVIDENCE
from recipe.statistics.verdict import Decided
from recipe.verify import comparison, verdict
from recipe.verify.comparison import Comparison
from recipe.verify.derive import Derived
from recipe.verify.failures import Failures, failures
from recipe.verify.sampling import Drawn
from recipe.verify.verdict import Verdict

SUMMARY = "summary.json"
LAYOUT = 3

LIMITS = (
    "One run of one seed: a repetition with another seed may differ by more than the interval.",
    "The interval is over test items like these; it says nothing about other task families, languages or tools.",
    "The checkpoints draw the sampled tokens again; how they came to be is proved only by training again.",
    "Retention covers the frozen German mathematics items alone, not the checkpoint's other abilities.",
)

Metrics = dict[str, bool | int | float | str]


@dataclass(frozen=True)
class Cost:
    """Of one stage. ``seconds`` are those of its last run; those of generation include the compiling of kernels."""

    seconds: float
    generation_seconds: float | None
    tokens: int | None
    tokens_per_second: float | None
    peak_gpu_bytes: int | None


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from. ``started`` and ``machines`` are those of each stage."""

    commit: str | None
    uncommitted: list[str]
    model: str  # the starting checkpoint's folder
    starting_checkpoint: str
    adapter: str
    merged_checkpoint: str
    versions: dict[str, str]
    machines: dict[str, dict[str, int | str | None]]
    started: dict[str, str]


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
    verdict: Verdict
    decided: Decided  # beforehand, by the plan
    deviations: dict
    baseline: Metrics
    candidate: Metrics
    compared: Comparison
    failures: Failures
    training: Metrics
    merge: Metrics
    retention: Metrics
    precision: Precision
    cost: dict[str, Cost]
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
    compared = comparison.compare(found.baseline, found.candidate, plan.config.evaluation.samples_per_task)
    return Summary(
        layout=LAYOUT,
        kind=plan.kind,
        family=plan.family.name,
        plan_id=plan.id,
        verdict=verdict.judge(found, compared),
        decided=plan.frozen.decided,
        deviations=plan.frozen.deviations,
        baseline=metrics["baseline"],
        candidate=metrics["candidate"],
        compared=compared,
        failures=failures(plan.family, plan.splits["test"], found.baseline, found.candidate),
        training=metrics["grpo"],
        merge=metrics["merge"],
        retention=metrics["retention"],
        precision=Precision(
            training=plan.config.precision,
            evaluation=plan.config.evaluation.precision,
            retention_baseline=plan.config.evaluation.precision,  # prepare refuses another
        ),
        cost={name: _cost(found, name) for name in EVIDENCE},
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
            model=plan.checkpoint.name,
            starting_checkpoint=plan.frozen.checkpoint.digest,
            adapter=results["grpo"].folder("adapter"),
            merged_checkpoint=results["merge"].folder("checkpoint"),
            versions=plan.frozen.versions,
            machines={name: results[name].machine for name in EVIDENCE},
            started={name: results[name].started for name in EVIDENCE},
        ),
    )


def _cost(found: Derived, name: str) -> Cost:
    result = found.results[name]
    sampled = {
        "baseline": found.baseline,
        "candidate": found.candidate,
        "grpo": [rollout for step in found.training.steps for rollout in step.rollouts],
    }.get(name)
    tokens = None if sampled is None else sum(record.outcome["tokens"] for record in sampled)
    generation = result.fact("seconds", "generation", float) if "generation" in result.seconds else None
    return Cost(
        seconds=result.fact("seconds", "total", float),
        generation_seconds=generation,
        tokens=tokens,
        tokens_per_second=round(tokens / generation, 1) if tokens and generation else None,
        peak_gpu_bytes=result.machine.get("peak_gpu_bytes"),
    )
