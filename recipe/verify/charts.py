"""Small charts as inline SVG: the same numbers are the same bytes on every machine, and a page's own colours reach them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 30  # room for the axes' words
TICKS = 4
WINDOW = 5  # steps of the running mean

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line; ``place`` chooses one of the page's colours, ``marked`` draws its points as well."""

    title: str
    points: Sequence[Point]
    place: int
    marked: bool = False


def running_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and those up to ``WINDOW - 1`` before it."""
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def lines(series: Sequence[Series], title: str, top: float | None = None, bottom: float = 0.0) -> str:
    """Curves over steps, with the legend below them and not over data.

    Args:
        top: of the scale; the largest value where none is given.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    values = [value for one in drawn for _, value in one.points]
    low, high = min(bottom, *values), max(values) if top is None else top
    high = high if high > low else low + 1
    last = max(place for one in drawn for place, _ in one.points)
    first = min(place for one in drawn for place, _ in one.points)
    across, up = _scale(first, last, LEFT, WIDTH - RIGHT), _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for number in range(TICKS + 1):
        value = low + (high - low) * number / TICKS
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(value)}" y2="{up(value)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{up(value)}" dy="4" text-anchor="end">{short(value)}</text>')
    for place in sorted({first, *(first + (last - first) * part / 4 for part in (1, 2, 3)), last}):
        parts.append(
            f'<text class="tick" x="{across(place)}" y="{HEIGHT - 10}" text-anchor="middle">{round(place)}</text>'
        )
    for one in drawn:
        corners = " ".join(f"{across(place)},{up(value)}" for place, value in one.points)
        parts.append(f'<polyline class="line c{one.place}" points="{corners}"/>')
        if one.marked or len(one.points) == 1:
            parts += [
                f'<circle class="dot c{one.place}" cx="{across(place)}" cy="{up(value)}" r="4"/>'
                for place, value in one.points
            ]
    legend = "".join(f'<li><i class="c{one.place}"></i>{escape(one.title)}</li>' for one in drawn)
    return "".join([*parts, "</svg>", f'<ul class="legend">{legend}</ul>' if len(drawn) > 1 else ""])


def shares(parts: Mapping[str, int], kinds: Mapping[str, str]) -> str:
    """One bar, divided by counts; ``kinds`` are the classes of its parts."""
    total = sum(parts.values())
    drawn = {name: count for name, count in parts.items() if count}
    bar = "".join(
        f'<span class="{kinds[name]}" style="width:{100 * count / total:.2f}%">{count}</span>' for name, count in drawn.items()
    )
    legend = "".join(f'<li><i class="{kinds[name]}"></i>{escape(name)}: {count}</li>' for name, count in drawn.items())
    return f'<div class="bar">{bar}</div><ul class="legend">{legend}</ul>'


def histogram(sides: Mapping[str, Sequence[int]], cap: int, bins: int = 12) -> str:
    """How often each length occurs, side by side; the last bin ends at the cap."""
    width, counts = max(-(-cap // bins), 1), {}
    for name, values in sides.items():
        counts[name] = [0] * bins
        for value in values:
            counts[name][min((value - 1) // width if value else 0, bins - 1)] += 1
    most = max(max(found) for found in counts.values()) or 1
    across, up = _scale(0, bins, LEFT, WIDTH - RIGHT), _scale(0, most, HEIGHT - BOTTOM, TOP)
    each = (WIDTH - LEFT - RIGHT) / bins / (len(sides) + 0.5)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="lengths of rollouts">']
    for value in (0, most):
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{up(value)}" dy="4" text-anchor="end">{value}</text>')
    for side, name in enumerate(counts):
        for place, count in enumerate(counts[name]):
            left, height = float(across(place)) + side * each, HEIGHT - BOTTOM - float(up(count))
            parts.append(
                f'<rect class="c{side}" x="{left:.1f}" y="{up(count)}" width="{each:.1f}" height="{height:.1f}"/>'
            )
    for place in range(0, bins + 1, 3):
        text = "cap" if place == bins else str(min(place * width, cap))
        parts.append(f'<text class="tick" x="{across(place)}" y="{HEIGHT - 10}" text-anchor="middle">{text}</text>')
    legend = "".join(f'<li><i class="c{side}"></i>{escape(name)}</li>' for side, name in enumerate(counts))
    return "".join([*parts, "</svg>", f'<ul class="legend">{legend}</ul>'])


def short(value: float) -> str:
    """A number in few characters."""
    if value == 0 or 0.01 <= abs(value) < 10_000:
        return f"{value:.3g}"
    return f"{value:.1e}"


def _scale(low: float, high: float, start: float, end: float):
    span = high - low or 1.0
    return lambda value: f"{start + (value - low) / span * (end - start):.1f}"
