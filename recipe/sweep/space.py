"""Which settings a sweep tries: ``hyperparameters`` and ``searcher`` of a YAML in Determined's own form.

A hyperparameter is a constant, or a mapping with a ``type``::

    grpo:
      learning_rate: {type: categorical, vals: [3.0e-6, 1.0e-5, 3.0e-5]}
      kl: {type: double, minval: 0.0, maxval: 0.1, count: 3}             # count: points of a grid
      steps: {type: int, minval: 16, maxval: 64, count: 3}
    grpo.lora_rank: 16                                                    # dotted is the same as nested

``log`` has ``base`` and exponents ``minval`` and ``maxval``. A grid's points are those that a master makes of the same
lines. Every value is checked as a configuration is before anything is submitted.
"""

import difflib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from recipe.config import resolve
from recipe.errors import Refused
from recipe.records import below, parse, short
from recipe.settings import flat

SEED = "grpo.seed"
SHORT = {"seed": SEED}  # of the three seeds, the one that trials differ in
FOLDER = "sweep"  # beside the settings: the sweep's folder, as an experiment is told it
# What training does, and not what is measured, nor when: trials are compared on the same items at the same steps.
SEARCHED = ("grpo.", "reward.", "precision")
MEASURING = ("grpo.validation_every", "grpo.validation_samples", "grpo.select")
SEARCHERS = {
    "grid": {"max_concurrent_trials": int},
    "random": {"max_concurrent_trials": int, "max_trials": int},
    "adaptive_asha": {
        "max_concurrent_trials": int,
        "max_trials": int,
        "mode": str,
        "divisor": int | float,
        "max_rungs": int,
        "bracket_rungs": list[int],
        "stop_once": bool,
    },
}
FILLED = ("metric", "smaller_is_better", "max_length", "time_metric", "max_time")  # of a searcher, by the driver
MOST = 1_000  # points of a grid


@dataclass(frozen=True)
class Space:
    """The settings that differ, by dotted key, and how the next trial's are picked.

    ``parameters`` has each as ``{"type": …}`` in Determined's form, constants apart; ``constants`` the others.
    """

    parameters: dict[str, dict[str, Any]]
    constants: dict[str, Any]
    searcher: dict[str, Any]

    def grid(self) -> list[dict[str, Any]]:
        """The points of a grid, in the order of the YAML, the last key fastest."""
        axes = [list(_points(key, parameter, MOST)) for key, parameter in self.parameters.items()]
        return [dict(zip(self.parameters, point)) for point in itertools.product(*axes)]

    def admits(self, hyperparameters: Mapping[str, Any], where: str) -> dict[str, Any]:
        """What a trial was given, in the order and the types of the space.

        Raises:
            Refused: a key too many or too few, or a value that this space does not have.
        """
        for key in sorted(hyperparameters.keys() ^ self.parameters.keys()):
            state = "missing" if key in self.parameters else "none of this sweep's"
            raise Refused(f"{where}: hyperparameter {key} is {state}")
        given = {}
        for key, parameter in self.parameters.items():
            given[key] = _admitted(parameter, hyperparameters[key])
            if given[key] is None:
                raise Refused(f"{where}: {key}={short(hyperparameters[key])} lies outside the frozen space")
        return given

    def overrides(self, hyperparameters: Mapping[str, Any]) -> dict:
        """A trial's settings as nested overrides of the configuration."""
        return nested({**self.constants, **hyperparameters})


def of(document: Mapping[str, Any], base: dict, where: str) -> Space:
    """The space of a YAML's ``hyperparameters`` and ``searcher``, checked against the overrides that all trials share.

    Raises:
        Refused: an unknown key (with the nearest name), a setting that decides what is measured, a range or a value
            that the configuration does not take.
    """
    searcher = _searcher(parse(dict, document.get("searcher"), where, "searcher"), where)
    given = parse(dict, document.get("hyperparameters"), where, "hyperparameters")
    settings = flat(asdict(resolve(base)))
    parameters: dict[str, dict] = {}
    constants: dict[str, Any] = {}
    for written, value in _leaves(given):
        key = SHORT.get(written, written)
        if key == FOLDER:
            continue
        if key in parameters or key in constants:
            raise Refused(f"{where}: {key} stands in the space twice")
        _check_key(key, settings, where)
        if isinstance(value, dict) and value["type"] != "const":
            parameters[key] = _parameter(key, settings[key], value, searcher["name"] == "grid", where)
        else:
            constants[key] = _plain(settings[key], value.get("val") if isinstance(value, dict) else value)
    if not parameters:
        raise Refused(f"{where}: no hyperparameter varies, so there is nothing to search")
    space = Space(parameters, constants, searcher)
    _check_values(space, base, where)
    return space


def nested(settings: Mapping[str, Any]) -> dict:
    """``{"grpo.steps": 8}`` as ``{"grpo": {"steps": 8}}``."""
    found: dict = {}
    for key, value in settings.items():
        *owners, name = key.split(".")
        place = found
        for owner in owners:
            place = place.setdefault(owner, {})
        place[name] = value
    return found


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of :func:`nested`; a key that is dotted already stays."""
    return dict(_leaves(settings))


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict:
    """Nested overrides, those of ``second`` before those of ``first``."""
    both = dict(first)
    for key, value in second.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and "type" not in value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_key(key: str, settings: Mapping[str, Any], where: str) -> None:
    names = [name for name in settings if name.startswith(SEARCHED) and name not in MEASURING]
    if key in names:
        return
    if key in settings:
        raise Refused(f"{where}: {key} decides what is measured or when; trials that differ in it cannot be compared")
    near = difflib.get_close_matches(key, [*names, *SHORT], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"a sweep varies {', '.join(part.rstrip('.') for part in SEARCHED)}"
    raise Refused(f"{where}: unknown configuration key {below('', key)}; {hint}")


def _searcher(given: dict, where: str) -> dict:
    name = given.get("name")
    if name not in SEARCHERS:
        raise Refused(f"{where}: searcher.name must be one of {', '.join(SEARCHERS)}, not {short(name)}")
    known = SEARCHERS[name]
    found = {"name": name}
    for key, value in given.items():
        if key in ("name", *FILLED):
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise Refused(
                f"{where}: searcher.{key} is none of {name}'s" + (f"; did you mean {near[0]}?" if near else "")
            )
        found[key] = parse(known[key], value, where, f"searcher.{key}")
    if "max_trials" in known and not 0 < found.get("max_trials", 0) <= MOST:
        raise Refused(f"{where}: searcher.max_trials must be given for {name}, from 1 to {MOST}")
    if found.get("max_concurrent_trials", 1) < 1:
        raise Refused(f"{where}: searcher.max_concurrent_trials must be at least 1")
    return found


_FIELDS = {
    "categorical": {"vals"},
    "int": {"minval", "maxval"},
    "double": {"minval", "maxval"},
    "log": {"minval", "maxval", "base"},
}


def _parameter(key: str, setting: Any, given: dict, grid: bool, where: str) -> dict:
    """One of Determined's ranges; ``setting`` is the configuration's value, whose type the range's values get."""
    kind = given["type"]
    if kind not in _FIELDS:
        raise Refused(f"{where}: {key}.type must be one of {', '.join(_FIELDS)} or const, not {short(kind)}")
    needed = _FIELDS[kind] | ({"count"} if grid and kind != "categorical" else set())
    for name in sorted(needed - given.keys()) + sorted(given.keys() - needed - {"type", "count"}):
        raise Refused(f"{where}: {key}.{name} is {'missing' if name in needed else 'unknown'}")
    if kind == "categorical":
        values = parse(list, given["vals"], where, f"{key}.vals")
        vals = [_plain(setting, value) for value in values]
        if not vals or any(vals.count(value) > 1 for value in vals):
            raise Refused(f"{where}: {key}.vals must be different values, at least one")
        return {"type": kind, "vals": vals}
    number = int if kind == "int" else int | float
    found = {name: parse(number, _number(given[name]), where, f"{key}.{name}") for name in given if name != "type"}
    if found["minval"] >= found["maxval"]:
        raise Refused(f"{where}: {key}.minval must be less than maxval")
    if found.get("base", 2) <= 1 or not 0 < found.get("count", 1) <= MOST or type(found.get("count", 1)) is not int:
        raise Refused(f"{where}: {key} needs a base above 1 and a count from 1 to {MOST}")
    return {"type": kind, **found}


def _points(key: str, parameter: Mapping[str, Any], most: int) -> Iterator[Any]:
    """A grid's points, as the masters 0.35.0 and 0.38.1 make them."""
    kind = parameter["type"]
    if kind == "categorical":
        yield from parameter["vals"]
        return
    low, high, count = parameter["minval"], parameter["maxval"], parameter.get("count", 2)
    count = min(count, high - low + 1) if kind == "int" else count
    if count > most:
        raise Refused(f"{key} has {count} points, more than {most}")
    for place in range(count):
        share = 0.5 if count == 1 else place / (count - 1)
        value = low + share * (high - low)
        yield int(value + 0.5) if kind == "int" else parameter["base"] ** value if kind == "log" else value


def _admitted(parameter: Mapping[str, Any], value: Any) -> Any:
    """A value of this range in the type that was frozen; None for any other. JSON makes 1 of 1.0."""
    if parameter["type"] == "categorical":
        return next((known for known in parameter["vals"] if known == value), None)
    low, high = parameter["minval"], parameter["maxval"]
    if parameter["type"] == "log":
        low, high = parameter["base"] ** low, parameter["base"] ** high
    if type(value) not in (int, float) or not low * (1 - 1e-9) <= value <= high * (1 + 1e-9):
        return None
    return int(value) if parameter["type"] == "int" else float(value)


def _plain(setting: Any, value: Any) -> Any:
    """A value in the type of a setting: YAML 1.1 reads 1e-5 as text."""
    if type(setting) is not float:
        return value
    value = _number(value)
    return float(value) if type(value) is int else value


def _number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_values(space: Space, base: dict, where: str) -> None:
    """Try every point of a grid, and the ends of what is drawn at random."""
    ends = [list(_points(key, {**parameter, "count": 2}, MOST)) for key, parameter in space.parameters.items()]
    if space.searcher["name"] == "grid":
        count = 1
        for key, parameter in space.parameters.items():
            count *= sum(1 for _ in _points(key, parameter, MOST))
            if count > MOST:
                raise Refused(f"{where}: the grid has more than {MOST} points")
        points = space.grid()
    else:
        points = [dict(zip(space.parameters, point)) for point in itertools.islice(itertools.product(*ends), MOST)]
    for point in points:
        try:
            config = resolve(merged(base, space.overrides(point)))
        except Refused as refusal:
            raise Refused(f"{where}: {refusal}") from None
        every = config.grpo.validation_every
        if not every or config.grpo.steps % every:
            raise Refused(
                f"{where}: grpo.steps={config.grpo.steps} must be a multiple of grpo.validation_every={every}, so that "
                "the last step is measured on the development split"
            )


def longest(space: Space, base: dict) -> int:
    """Most steps that a trial takes."""
    steps = space.parameters.get("grpo.steps")
    ends = list(_points("grpo.steps", {**steps, "count": 2}, MOST)) if steps else [None]
    fixed = resolve(merged(base, nested(space.constants))).grpo.steps
    return max(fixed if end is None else end for end in ends)
