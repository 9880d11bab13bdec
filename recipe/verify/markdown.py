"""The summary for people who read text."""

from recipe.task import family
from recipe.verify import failures
from recipe.verify.comparison import Comparison
from recipe.verify.summary import Cost, Summary
from recipe.verify.titles import heading, rows


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
        "| | baseline | candidate |",
        "|---|---:|---:|",
        *(
            f"| {title} | {form.format(summary.baseline[key])} | {form.format(summary.candidate[key])} |"
            for key, (title, form) in rows(chosen.milestones).items()
        ),
        *_rates(summary.compared),
        "",
        f"{summary.compared.better} tasks better, {summary.compared.worse} worse.",
        "",
        "![Paired outcomes](paired.png)",
        "",
        "### Where rollouts fail",
        "",
        *failures.markdown(summary.failures),
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
        "| stage | seconds | of them generating, with the compiling of kernels | tokens | tokens a second | GPU memory (GiB) |",
        "|---|---:|---:|---:|---:|---:|",
        *(_cost(name, cost) for name, cost in summary.cost.items()),
        "",
        "## What this does not show",
        "",
        *(f"- {limit}" for limit in summary.limits),
        "",
    ]
    return "\n".join(lines)


def _rates(compared: Comparison) -> list[str]:
    """Rows beyond one sample; of a single one they would be strict success again."""
    return [
        f"| {title.format(k)} | {getattr(compared.baseline, name)[k]:.1%} | {getattr(compared.candidate, name)[k]:.1%} |"
        for name, title in (("pass_at", "one of {} samples succeeds"), ("pass_hat", "all of {} samples succeed"))
        for k in compared.baseline.pass_at
        if k != "1"
    ]


def _cost(name: str, cost: Cost) -> str:
    memory = None if cost.peak_gpu_bytes is None else cost.peak_gpu_bytes / 2**30
    values = (cost.seconds, cost.generation_seconds, cost.tokens, cost.tokens_per_second, memory)
    cells = ["" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
    return f"| {name} | {' | '.join(cells)} |"
