"""Retention: whether the candidate still solves what the starting checkpoint solved, without tools.

The starting checkpoint's side is its retention baseline (:mod:`recipe.mgsm.baseline`); only the candidate is measured.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict

from recipe import determinism
from recipe.errors import Refused
from recipe.files import write_lines
from recipe.mgsm.baseline import OUTPUTS, Output, counts, evaluate, load
from recipe.policy import checkpoint
from recipe.run.result import Done
from recipe.run.stage import Stage
from recipe.statistics import pairs, rounded, verdict


def measure(stage: Stage) -> Done:
    """The merged checkpoint on the retention baseline's items under its protocol; the whole of the retention stage."""
    plan = stage.plan
    determinism.settle(plan.config.deterministic)
    merged = plan.run / "merge" / "checkpoint"
    run = load(plan.retention_baseline)
    tokenizer = checkpoint.load_tokenizer(merged)
    model = checkpoint.load_model(merged, plan.config.evaluation.precision, checkpoint.device())
    start = time.perf_counter()
    with stage.progress(len(run.items), "item") as progress:
        outputs = evaluate(model, tokenizer, run.items, run.protocol, progress.update)
    stage.seconds["generation"] = time.perf_counter() - start
    write_lines(stage.folder / OUTPUTS, map(asdict, outputs))
    metrics = compare(run.outputs, outputs, plan.config.retention.margin)
    return Done(metrics, gates(metrics))


def gates(metrics: dict) -> dict[str, bool]:
    return {"retention_shown": metrics["word"] == verdict.SHOWN}


def compare(before: Sequence[Output], after: Sequence[Output], margin: float) -> dict[str, int | float | str]:
    """Two evaluations of the same items, paired by id.

    ``gained`` and ``lost`` count items that became correct or wrong. ``difference`` of the shares of correct items has
    Tango's 95 % interval, which ``word`` holds against the margin (points): :func:`recipe.statistics.verdict.retention`.

    Raises:
        Refused: the two are not of the same items; names one.
    """
    old, new = ({output.id: output.correct for output in outputs} for outputs in (before, after))
    if alone := sorted(old.keys() ^ new.keys()):
        raise Refused(f"the two retention evaluations are of different items: {alone[0]} is in one of them only")
    for outputs in (before, after):
        if len(outputs) != len(old):
            raise Refused("a retention evaluation answers an item twice")
    was, now = counts(before), counts(after)
    gained, lost = sum(new[key] and not old[key] for key in old), sum(old[key] and not new[key] for key in old)
    difference, interval = (gained - lost) / len(old), pairs.score(len(old), gained, lost)
    return {
        "items": len(old),
        "margin": margin,
        **{f"{name}_before": was[name] for name in ("correct", "ambiguous", "unreadable")},
        **{f"{name}_after": now[name] for name in ("correct", "ambiguous", "unreadable")},
        "gained": gained,
        "lost": lost,
        "difference": rounded(difference),
        "interval_low": rounded(interval[0]),
        "interval_high": rounded(interval[1]),
        "word": verdict.retention(difference, interval, margin / 100),
    }
