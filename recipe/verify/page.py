"""The summary for people who would rather look: one HTML file that opens nothing else and runs nothing.

It is made of aggregates alone. No task, prompt or output of the policy is in it.
"""

from collections.abc import Mapping, Sequence
from html import escape

from recipe.run.evidence import Evaluated, successes
from recipe.statistics import paired
from recipe.verify.charts import WINDOW, Series, histogram, lines, running_mean, shares
from recipe.verify.derive import Derived
from recipe.verify.failures import MOVED, Failures, tables
from recipe.verify.summary import Summary
from recipe.verify.titles import COSTS, costs, heading, rows

MOVES = {"better": "good", "both always solve it": "c0", "alike": "c2", "never solved": "c3", "worse": "bad"}
KEPT = {"gained": "good", "both correct": "c0", "both wrong": "c3", "lost": "bad"}
SHARES = ("strict_success", "final_answer_correct", "malformed", "hit_cap")  # and the milestones: of a rollout true or not
CURVES = {
    "kl": "KL from the starting checkpoint (nats a token)",
    "entropy": "entropy (nats a token)",
    "grad_norm": "gradient norm",
    "logprob_gap_mean": "gap, mean (nats a token)",
    "logprob_gap_max": "gap, largest (nats)",
}


def page(found: Derived, said: Summary) -> bytes:
    """The page of a run whose evidence holds; the same run gives the same bytes."""
    title = escape(heading(said))
    sections = [
        f"<header><h1>{title}</h1>{_verdict(said)}</header>",
        _section("Training", _training(found)),
        _section("Baseline against candidate", _measures(found, said)),
        _section("How test tasks move", _moves(said)),
        _section("Where rollouts fail", _failures(said.failures)),
        _section("Policy tokens of a rollout", _lengths(found)),
        _section("Retention: German mathematics without tools", _retention(said.retention)),
        _section("On the way", _curves(found)),
        _section("Time and cost", _table(COSTS, costs(said.cost)) + '<p class="note">Of each stage\'s last run.</p>'),
        _section("This run", _facts(found, said)),
        _section("What this does not show", f"<ul>{''.join(f'<li>{escape(limit)}</li>' for limit in said.limits)}</ul>"),
    ]
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )
    return text.encode()


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines_ = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines_}</tbody></table></div>'


def _verdict(said: Summary) -> str:
    def item(line: str) -> str:
        name, colon, rest = line.partition(": ")
        return f"<li><b>{escape(name)}{colon}</b>{escape(rest)}</li>" if colon else f"<li>{escape(line)}</li>"

    return f'<ul class="verdict">{"".join(map(item, said.verdict.lines))}</ul>'


def _training(found: Derived) -> str:
    steps = [(step.step, step.metrics) for step in found.training.steps]
    shown = {"reward": "training reward", "strict_success": "strict success", **found.plan.family.milestones}
    series = [
        Series(f"{title}, mean of {WINDOW} steps", list(zip([number for number, _ in steps], running_mean(values))), place)
        for place, (key, title) in enumerate(shown.items())
        if (values := [metrics[key] for _, metrics in steps if key in metrics])
    ]
    points = [(step, metrics["strict_success"]) for step, metrics in sorted(found.training.validations.items())]
    series.append(Series("strict success on the development split", points, len(shown), marked=True))
    return lines(series, "learning curve by optimizer step", top=1.0)


def _counts(records: Sequence[Evaluated], measure: str) -> list[int]:
    return list(successes(records, measure).values())


def _measures(found: Derived, said: Summary) -> str:
    def difference(measure: str) -> str:
        if measure not in (*SHARES, *found.plan.family.milestones):
            return ""
        before, after = _counts(found.baseline, measure), _counts(found.candidate, measure)
        samples = said.compared.samples
        low, high = paired.interval(before, after, samples)
        return f"{100 * paired.difference(before, after, samples):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"

    body = [
        (title, form.format(said.baseline[key]), form.format(said.candidate[key]), difference(key))
        for key, (title, form) in rows(found.plan.family.milestones).items()
    ]
    note = "Differences in points with 95% intervals over tasks. Strict success alone decides the verdict."
    return _table(("", "baseline", "candidate", "difference"), body) + f'<p class="note">{note}</p>'


def _moves(said: Summary) -> str:
    pair = said.compared
    counts = (pair.better, pair.equal_success, pair.equal_in_part, pair.equal_failure, pair.worse)
    return shares(dict(zip(MOVES, counts, strict=True)), MOVES)


def _failures(found: Failures) -> str:
    counts, moves = (_table(head, body) for head, *body in tables(found))
    return f"{counts}<p class=\"note\">{MOVED}</p>{moves}"


def _lengths(found: Derived) -> str:
    sides = {"baseline": found.baseline, "candidate": found.candidate}
    tokens = {name: [record.outcome["tokens"] for record in records] for name, records in sides.items()}
    return histogram(tokens, found.plan.config.agent.max_tokens)


def _retention(kept: Mapping) -> str:
    both = kept["correct_before"] - kept["lost"]
    wrong = kept["items"] - both - kept["gained"] - kept["lost"]
    return shares(dict(zip(KEPT, (kept["gained"], both, wrong, kept["lost"]), strict=True)), KEPT)


def _curves(found: Derived) -> str:
    steps = [(step.step, step.metrics) for step in found.training.steps]
    charts = []
    for place, (key, title) in enumerate(CURVES.items()):
        points = [(number, metrics[key]) for number, metrics in steps if key in metrics]
        if points:
            charts.append(f"<figure>{lines([Series(title, points, place)], title)}<figcaption>{title}</figcaption></figure>")
    return f'<div class="small">{"".join(charts)}</div>' if charts else ""


def _facts(found: Derived, said: Summary) -> str:
    grpo, source = found.plan.config.grpo, said.provenance
    device = source.machines["grpo"].get("gpu") or f"CPU ({source.machines['grpo'].get('processor')})"
    facts = {
        "model": f"{source.model} ({source.starting_checkpoint[:16]})",
        "plan": said.plan_id[:16],
        "commit": (source.commit or "none")[:12] + (", with uncommitted changes" if source.uncommitted else ""),
        "started": source.started["grpo"],
        "device": device,
        "learning rate": f"{grpo.learning_rate:g}, {grpo.lr_schedule}",
        "KL weight": f"{grpo.kl:g}",
        "steps": f"{grpo.steps}, {grpo.batch_size} rollouts each, groups of {grpo.num_generations}",
        "training seed": str(grpo.seed),
        "precision": f"{said.precision.training} in training, {said.precision.evaluation} when measured",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(source.versions.items())),
    }
    return f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{escape(value)}</dd></div>' for name, value in facts.items())}</dl>"


STYLE = """
:root{--back:#fbfaf8;--card:#fff;--ink:#1d1c1a;--soft:#6b6862;--line:#e2dfd8;--good:#1d7a45;--bad:#b3382c;
--c0:#0072b2;--c1:#d55e00;--c2:#56b4e9;--c3:#8a8a8a;--c4:#009e73;--c5:#cc79a7;--c6:#b58900;--c7:#5e4fa2;color-scheme:light}
@media(prefers-color-scheme:dark){:root{--back:#16181b;--card:#1e2125;--ink:#e6e4df;--soft:#9c9a94;--line:#33373d;
--good:#4bb37a;--bad:#e07a70;--c0:#5aaee8;--c1:#f08a4b;--c2:#9fd6f5;--c3:#9a9a9a;--c4:#3fc79a;--c5:#e3a1c6;--c6:#d9b44a;
--c7:#a99ce0;color-scheme:dark}}
*{box-sizing:border-box}body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1.2rem;display:grid;gap:1rem;grid-template-columns:minmax(0,1fr)}
h1{font-size:1.35rem;margin:.2rem 0 .8rem}h2{font-size:1.05rem;margin:0 0 .6rem}
header,section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1rem 1.2rem}
header{border-top:4px solid var(--c0)}ul{margin:0;padding-left:1.1rem}.verdict{list-style:none;padding:0;display:grid;gap:.5rem}
svg{width:100%;height:auto;display:block}.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:12px}
.line{fill:none;stroke-width:2}.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem;
color:var(--soft)}.legend i{display:inline-block;width:.8rem;height:.8rem;border-radius:3px;margin-right:.35rem;
vertical-align:-1px}.bar{display:flex;height:2rem;border-radius:6px;overflow:hidden;margin-bottom:.4rem}
.bar span{color:#fff;font-weight:600;font-size:.85rem;display:grid;place-items:center;min-width:1.2rem}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:500}
th:first-child,td:first-child{text-align:left}.note,figcaption{color:var(--soft);font-size:.85rem;margin:.5rem 0}
.small{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(18rem,100%),1fr));gap:1rem}figure{margin:0}
dl{margin:0;display:grid;gap:.25rem}dl div{display:grid;grid-template-columns:8rem minmax(0,1fr);gap:.6rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:40rem){.tick{font-size:20px}.line{stroke-width:3}}.small .tick{font-size:20px}.small .line{stroke-width:3}
.good{background:var(--good)}.bad{background:var(--bad)}
""" + "".join(
    f".c{n}{{background:var(--c{n})}}.line.c{n}{{stroke:var(--c{n})}}.dot.c{n},rect.c{n}{{fill:var(--c{n})}}\n"
    for n in range(8)
)
