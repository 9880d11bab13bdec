"""What a run says, in fixed words: no stronger than its intervals carry, by rules that its plan froze.

The words of the agent task and of retention are those of :mod:`recipe.statistics.verdict`.
"""

from dataclasses import dataclass

from recipe.statistics import rounded, verdict
from recipe.sweep.records import Chosen
from recipe.verify.comparison import Comparison
from recipe.verify.derive import Derived

PRACTICE = "practice checkpoint: it shows that the machinery works, nothing about Qwen3"
RESERVATION = "Neither check qualifies a model for deployment, and this is no open benchmark."


@dataclass(frozen=True)
class Verdict:
    """``lines`` say all of it; the rest is for programs.

    Args:
        protocol: ``default``, ``custom`` or ``practice``.
        failed: gates that did not pass, by stage.
        smallest_gain: that the design detects from the baseline's own success, as a share; None where there is none.
    """

    protocol: str
    agent_task: str
    retention: str
    failed: list[str]
    smallest_gain: float | None
    lines: list[str]


def judge(found: Derived, compared: Comparison) -> Verdict:
    """The verdict of a run whose evidence holds."""
    plan, kept = found.plan, found.metrics["retention"]
    word = verdict.agent_task(compared.difference, tuple(compared.interval), compared.p)
    protocol = {"pilot": "default"}.get(plan.kind, plan.kind)
    smallest = found.metrics["baseline"].get("smallest_gain")
    return Verdict(
        protocol=protocol,
        agent_task=word,
        retention=kept["word"],
        failed=[name for name, passed in found.all_gates.items() if not passed],
        smallest_gain=smallest,
        lines=[
            _protocol(protocol, plan.frozen.deviations),
            *_chosen(plan.frozen.chosen),
            _learning(found),
            *_other_gates(found),
            f"Agent task: {word}. {_agent_task(found, compared, smallest)}",
            f"Retention: {kept['word']}. {_retention(kept, plan.frozen.decided.retention_interval)}",
            f"Evidence: verified; {'; '.join(found.attempts) or 'every stage ran once, undisturbed'}.",
            RESERVATION,
        ],
    )


def _protocol(name: str, deviations: dict) -> str:
    differing = ", ".join(f"{key} = {value}" for key, value in deviations.items())
    title = PRACTICE if name == "practice" else name
    return f"Protocol: {title}" + (f"; not the default: {differing}." if differing else ".")


def _chosen(by: Chosen | None) -> list[str]:
    if by is None:
        return []
    settings = ", ".join(f"{key} = {value}" for key, value in by.hyperparameters.items())
    return [f"Chosen among {by.trials} trials on {by.split}: {settings}."]


def _learning(found: Derived) -> str:
    failed = [gate for gate, passed in found.gates["grpo"].items() if not passed]
    training = found.metrics["grpo"]
    mixed, equal = training["mixed_groups"], training["zero_variance_groups"]
    return (
        f"Learning gates: {'FAILED: ' + ', '.join(failed) if failed else 'passed'}. "
        f"{mixed} of {mixed + equal} groups had mixed rewards"
        + (f"; the other {equal} taught nothing but KL." if equal else ".")
    )


def _other_gates(found: Derived) -> list[str]:
    gates = {name: found.gates[name] for name in found.gates if name not in ("grpo", "retention")}
    failed = [f"{name}: {gate}" for name in gates for gate, passed in gates[name].items() if not passed]
    return [f"Other gates FAILED: {', '.join(failed)}."] if failed else []


def _agent_task(found: Derived, compared: Comparison, smallest: float | None) -> str:
    decided = found.plan.frozen.decided
    before, after = (found.metrics[stage]["strict_success"] for stage in ("baseline", "candidate"))
    return (
        f"Strict success {before:.1%} before, {after:.1%} after: {_points(compared.difference)} points, 95% interval "
        f"{_range(*compared.interval)} ({decided.interval}); p = {_p(compared.p)} ({decided.test}; "
        f"{compared.items} items, {compared.samples} {'sample' if compared.samples == 1 else 'samples'} each). "
        + (
            "From there no gain can be detected with 80% power."
            if smallest is None
            else f"From there a gain of {100 * smallest:.1f} points is detected with 80% power."
        )
    )


def _retention(kept: dict, interval: str) -> str:
    return (
        f"Correct: {kept['correct_before']} of {kept['items']} before, {kept['correct_after']} after ({kept['gained']} "
        f"gained, {kept['lost']} lost): {_points(kept['difference'])} points, 95% interval "
        f"{_range(kept['interval_low'], kept['interval_high'])} ({interval}); margin {kept['margin']:g} points."
    )


def _points(share: float) -> str:
    return f"{100 * rounded(share) + 0.0:+.1f}"


def _range(low: float, high: float) -> str:
    return f"{_points(low)} to {_points(high)}"


def _p(value: float) -> str:
    return "below 0.001" if value < 0.001 else f"{value:.3f}"
