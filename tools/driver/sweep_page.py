"""``sweep.html``: the table of a sweep and its picture in one file, which opens nothing else and runs no script.

The picture has success on development against what was searched, every seed a point, the mean of each configuration
with its 95 % interval, and the starting checkpoint as a line.
"""

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from recipe.sweep import table
from recipe.sweep.choice import Configuration
from recipe.sweep.table import COMPLETE, Row, Table

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 12, 44  # margins of the picture
SPREAD = 9  # pixels between the seeds of one place
RATE = "grpo.learning_rate"


def html(found: Table, lines: Sequence[str]) -> bytes:
    """The page; ``lines`` say in words what was chosen."""
    style = Path(__file__).with_suffix(".css").read_text()
    source = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    title = "Practice sweep" if found.practice else "Sweep"
    rest = [*_head(found, title, lines), *_picture(found), *_configurations(found), *_trials(found), *_foot(found)]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            f"style-src 'sha256-{source}'; base-uri 'none'; form-action 'none'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>",
            *rest,
            "</body>\n</html>\n",
        ]
    ).encode()


def _head(found: Table, title: str, lines: Sequence[str]) -> list[str]:
    warning = (
        ["<p class=warn>A practice checkpoint: these numbers say nothing about a real model.</p>"]
        if found.practice
        else []
    )
    stopped = sum(row.state == table.STOPPED for row in found.trials)
    return [
        *warning,
        f"<h1>{title} over {escape(', '.join(_searched(found)) or 'nothing')}</h1>",
        f"<p class=soft>{len(found.trials)} trials by {escape(found.searcher['name'])}, {stopped} stopped early. Strict "
        f"success on {found.items} development items, {found.samples} sample{'s' * (found.samples != 1)} each. Sweep "
        f"<code>{found.sweep_id[:16]}</code>.</p>",
        f"<div class=verdict>{''.join(f'<p>{escape(line)}</p>' for line in lines)}</div>",
    ]


def _searched(found: Table) -> list[str]:
    """The settings that differ between trials."""
    keys = {key: None for row in found.trials for key in row.hyperparameters}
    return [key for key in keys if len({str(row.hyperparameters.get(key)) for row in found.trials}) > 1]


# ---- the picture


def _picture(found: Table) -> list[str]:
    key = next((key for key in (RATE, *_searched(found)) if key in _searched(found)), None)
    rows = [row for row in found.trials if row.development]
    if key is None or not rows:
        return []
    place, ticks = _axis([row.hyperparameters[key] for row in rows])
    parts = [*_frame(key, place, ticks), *_start(rows)]
    seen: dict[float, int] = {}
    for row in rows:
        x = place(row.hyperparameters[key])
        number = seen.get(x, 0)
        seen[x] = number + 1
        x += SPREAD * (number // 2 + 1) * (-1 if number % 2 else 1)
        kind = "seed" if row.state == COMPLETE else "cut"
        last = row.development[-1]
        tip = f"{row.name}: {table.label(row.hyperparameters)}, {row.state}, {last.success:.3f} at step {last.step}"
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{_y(last.success):.1f}" r="5"><title>{escape(tip)}</title></circle>'
        )
    shown = [one for one in found.choice.configurations if one.mean is not None and key in one.hyperparameters]
    parts += [
        mark
        for one in shown
        for mark in _mean(one, place(one.hyperparameters[key]), one.hyperparameters == found.choice.chosen)
    ]
    caption = (
        "Points: trials (hollow: stopped early or failed, at their last measurement). Bars: mean over seeds with its 95 % "
        "interval over items and seeds; the chosen one in colour. Dashed: the starting checkpoint."
    )
    label = f"Strict success on development against {key}"
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    return [f"<h2>{escape(label)}</h2>", f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"]


def _axis(values: Sequence[Any]) -> tuple[Callable[[Any], float], list[Any]]:
    """Where a value stands, and which are named: by size, logarithmic where all are positive and far apart."""
    different = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    numbers = all(type(value) in (int, float) for value in different)
    scale: Callable[[Any], float] = different.index
    if numbers:
        far = different[0] > 0 and different[-1] / different[0] > 5
        scale = math.log if far else float
    low, high = scale(different[0]), scale(different[-1])
    inner = WIDTH - LEFT - RIGHT - 80

    def place(value: Any) -> float:
        share = 0.5 if high == low else (scale(value) - low) / (high - low)
        return LEFT + 40 + share * inner

    return place, different if len(different) <= 8 else [different[0], different[len(different) // 2], different[-1]]


def _y(success: float) -> float:
    return TOP + (1 - success) * (HEIGHT - TOP - BOTTOM)


def _frame(key: str, place: Callable[[Any], float], ticks: Sequence[Any]) -> list[str]:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _y(share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{share:g}</text>')
    bottom = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for value in ticks:
        shown = f"{value:g}" if type(value) in (int, float) else str(value)
        parts.append(f'<text class="middle" x="{place(value):.1f}" y="{bottom + 17}">{escape(shown)}</text>')
    return [*parts, f'<text class="middle" x="{WIDTH / 2}" y="{HEIGHT - 6}">{escape(key)}</text>']


def _start(rows: Sequence[Row]) -> list[str]:
    first = [row.development[0].success for row in rows if row.development[0].step == 0]
    if not first:
        return []
    y = _y(first[0])
    return [f'<line class="start" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>']


def _mean(one: Configuration, x: float, won: bool) -> list[str]:
    kind = " won" if won else ""
    low, middle, high = (_y(value) for value in (one.low, one.mean, one.high))
    tip = f"{table.label(one.hyperparameters)}: {one.mean:.3f} ({one.low:.3f} to {one.high:.3f})"
    ends = "".join(
        f'<line class="bar{kind}" x1="{x - 5:.1f}" x2="{x + 5:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>' for y in (low, high)
    )
    line = f'<line class="bar{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
    dot = f'<rect class="dot{kind}" x="{x - 4:.1f}" y="{middle - 4:.1f}" width="8" height="8"/>'
    return [f"<g><title>{escape(tip)}</title>{line}{ends}{dot}</g>"]


# ---- the tables


def _table(caption: str, head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Cells are text; a row's kind is its class."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f'<tr class="{kind}">{"".join(f"<td>{escape(cell)}</td>" for cell in values)}</tr>' for kind, values in rows
    )
    return [
        f"<p class=soft>{escape(caption)}</p>",
        f"<div class=scroll><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>",
    ]


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else f"{value:{form}}"


def _configurations(found: Table) -> list[str]:
    rows = []
    for one in found.choice.configurations:
        interval = "–" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
        spread = [_number(value) for value in (one.between_seeds, one.between_items, one.rest)]
        near = "" if one.behind is None or one.barred else f"{one.behind:.3f} (±{one.error:.3f})"
        values = [table.label(one.hyperparameters), str(len(one.trials)), _number(one.mean), interval]
        rows.append(
            (
                "won" if one.hyperparameters == found.choice.chosen else "",
                [*values, *spread, near, f"{one.change:.3g}", one.barred or ""],
            )
        )
    head = (
        "settings",
        "seeds",
        "mean",
        "95 %",
        "between seeds",
        "between items",
        "rest",
        "behind best (± s.e.)",
        "change",
        "not eligible",
    )
    caption = (
        "By mean success. Spreads are standard deviations: between seeds only where there are several. Change: "
        f"{found.choice.change}."
    )
    return ["<h2>Configurations</h2>", *_table(caption, head, rows)]


def _trials(found: Table) -> list[str]:
    by_success = sorted(found.trials, key=lambda row: -(row.development[-1].success if row.development else -1))
    rows = []
    for row in by_success:
        course = " → ".join(f"{point.success:.2f}" for point in row.development) or "–"
        state = row.state if row.failure is None else f"{row.state}: {row.failure}"
        measured = str(row.development[-1].step) if row.development else "–"
        costs = (f"{row.seconds:.0f} s", f"{row.rollouts:,}", f"{row.tokens:,}")
        kind = "" if row.state == COMPLETE else "stopped"
        rows.append(
            (
                kind,
                [
                    row.name,
                    table.label(row.hyperparameters),
                    course,
                    measured,
                    f"{row.step} of {row.steps}",
                    state,
                    _number(row.kl, ".3g"),
                    *costs,
                ],
            )
        )
    head = (
        "trial",
        "settings",
        "development, from step 0",
        "measured at",
        "trained",
        "state",
        "KL",
        "time",
        "rollouts",
        "tokens",
    )
    total = sum(row.seconds for row in found.trials)
    caption = (
        f"Sorted by their last measurement on development. Time is a trial's own, all its runs, {total:.0f} s together; a "
        "run that was killed has no end and is left out. Rollouts and tokens are training's."
    )
    return ["<h2>Trials</h2>", *_table(caption, head, rows)]


def _foot(found: Table) -> list[str]:
    unseen = "".join(f"<li>{escape(one)}</li>" for one in found.choice.not_looked_at)
    where = found.conductor
    told = (
        f"<p class=soft>Experiment {where.experiment} on a {escape(where.master)} master, {escape(where.address)}.</p>"
        if where
        else "<p class=soft>Run by processes on one machine.</p>"
    )
    return [
        "<h2>How it was chosen</h2>",
        f"<p>Frozen before the first trial: {escape(found.choice.rule)}</p>",
        f"<p>The rule did not look at:</p><ul>{unseen}</ul>",
        told,
    ]
