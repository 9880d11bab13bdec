"""The summary for people who read text."""

from collections.abc import Sequence

from recipe.task import family
from recipe.verify.comparison import Comparison
from recipe.verify.failures import MOVED, Failures, tables
from recipe.verify.summary import Summary
from recipe.verify.titles import COSTS, costs, heading, rows


def markdown(summary: Summary) -> str:
    """The summary as Markdown; its pictures lie beside it."""
    training, kept, chosen = summary.training, summary.retention, family(summary.family)
    lines = [
        f"# {heading(summary)}",
        "",
        *(f"- {line}" for line in summary.verdict.lines),
        "",
        f"Plan `{summary.plan_id[:16]}`, commit `{(summary.provenance.commit or 'none')[:12]}`"
        + (" with uncommitted changes" if summary.provenance.uncommitted else "")
        + f"; model `{summary.provenance.model}` (`{summary.provenance.starting_checkpoint[:12]}`).",
        "",
        "## Held-out test tasks",
        "",
        f"{summary.baseline['rollouts']} rollouts each, the same tasks and random streams.",
        "",
        *_table(
            ("", "baseline", "candidate"),
            *(
                (title, form.format(summary.baseline[key]), form.format(summary.candidate[key]))
                for key, (title, form) in rows(chosen.milestones).items()
            ),
            *_rates(summary.compared),
        ),
        "",
        f"{summary.compared.better} tasks better, {summary.compared.worse} worse.",
        "",
        "![Paired outcomes](paired.png)",
        "",
        "### Where rollouts fail",
        "",
        *failing(summary.failures),
        "",
        "## Training",
        "",
        f"{training['steps']} steps, {training['rollouts']} rollouts on {training['unique_tasks']} tasks; "
        f"{training['mixed_groups']} groups with mixed rewards; gradient norm "
        f"{training['grad_norm_min']:.3g} to {training['grad_norm_max']:.3g}.",
        "",
        *_table(
            ("", "first quarter", "last quarter"),
            *(
                (title, *(form.format(training[f"{key}_{part}_quarter"]) for part in ("first", "last")))
                for key, title, form in (
                    ("reward", "training reward", "{:.3f}"), ("strict_success", "strict success", "{:.1%}"),
                )
            ),
        ),
        "",
        "![Training](training.png)",
        "",
        "## Retention (German mathematics, no tools)",
        "",
        f"Ambiguous outputs: {kept['ambiguous_before']} before, {kept['ambiguous_after']} after; unreadable: "
        f"{kept['unreadable_before']} before, {kept['unreadable_after']} after.",
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
        "## Who sampled",
        "",
        "Drawn again by the checkpoints that are said to have sampled them: "
        + ", ".join(f"{summary.sampling[name]} {name}" for name in ("matched", "undecided", "contradicted"))
        + f" of {summary.sampling['tokens']} tokens.",
        "",
        "## Cost",
        "",
        *_table(COSTS, *costs(summary.cost)),
        "",
        "## What this does not show",
        "",
        *(f"- {limit}" for limit in summary.limits),
        "",
    ]
    return "\n".join(lines)


def _rates(compared: Comparison) -> list[tuple[str, str, str]]:
    """Rows beyond one sample; of a single one they would be strict success again."""
    return [
        (title.format(k), f"{getattr(compared.baseline, name)[k]:.1%}", f"{getattr(compared.candidate, name)[k]:.1%}")
        for name, title in (("pass_at", "one of {} samples succeeds"), ("pass_hat", "all of {} samples succeed"))
        for k in compared.baseline.pass_at
        if k != "1"
    ]


def failing(found: Failures) -> list[str]:
    """Where rollouts fail, and what became of them."""
    counts, moves = tables(found)
    return [*_table(*counts), "", MOVED, "", *_table(*moves)]


def _table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Numbers to the right of what they are of; the first column may have no title."""
    titles, *lines = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return [titles.replace("|  |", "| |", 1), f"|---|{'---:|' * (len(head) - 1)}", *lines]
