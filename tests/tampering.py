"""How tests alter what a run left behind, as an accident or a forger would."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recipe.files import digest, file_digest, write_json, write_lines
from recipe.mgsm.baseline import ITEMS, OUTPUTS, RUN
from recipe.records import read_json, read_lines
from recipe.run import attempts
from recipe.run.attempts import Entry
from recipe.run.evidence import RESULT
from recipe.run.plan import PLAN, id_of, load
from recipe.run.result import consumed, outputs
from recipe.stages import NAMES

REMOVED = object()


def flip(path: Path, place: int | None = None) -> None:
    """Change one bit, of the byte in the middle unless ``place`` says another."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def another(value: Any) -> Any:
    """Another value of the same kind; a text for null."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.125
        case str():
            return value + "1"
        case None:
            return "1"
        case list():
            return [*value[:-1], another(value[-1])] if value else [0]
        case dict():
            key = sorted(value)[0]
            return {**value, key: another(value[key])}


def edit(path: Path, place: str, value: Any) -> None:
    """Set, or by :data:`REMOVED` remove, one value of a JSON file; a function makes it of the old one.

    ``place`` is like ``stages/2/gates``; ``~1`` stands for a slash in a key (RFC 6901). In a file of lines it begins with the line's number from 0.
    """
    lines = path.suffix == ".jsonl"
    document = read_lines(Any, path, "it") if lines else read_json(path, "it")
    *keys, last = (int(key) if key.isdigit() else key.replace("~1", "/") for key in place.split("/"))
    owner = document
    for key in keys:
        owner = owner[key]
    if value is REMOVED:
        del owner[last]
    else:
        owner[last] = value(owner[last]) if isinstance(value, Callable) else value
    (write_lines if lines else write_json)(path, document)


def reseal(stage: Path) -> None:
    """Make a stage's result vouch for its altered files, and every later result for having worked on them."""
    edit(stage / RESULT, "outputs", outputs(stage))
    plan = load(stage.parent / PLAN, check_inputs=False)
    for name in NAMES:
        if (stage.parent / name / RESULT).exists():
            edit(stage.parent / name / RESULT, "inputs", consumed(plan, name))
    rewrite_attempts(stage.parent)


def rewrite_attempts(run: Path, without: str = "") -> None:
    """A journal that fits plan and results as they are now, sealed from its beginning, ``without`` a stage."""
    rewritten: list[Entry] = []
    for entry in read_lines(Entry, run / attempts.NAME, "it"):
        if entry.stage == without:
            continue
        if entry.event in attempts.OUTCOMES and (run / entry.stage / RESULT).exists():
            entry = replace(entry, left=file_digest(run / entry.stage / RESULT))
        previous = rewritten[-1].seal if rewritten else attempts.origin(run)
        entry = replace(entry, previous=previous, number=len(rewritten) + 1)
        rewritten.append(replace(entry, seal=entry.sealed()))
    write_lines(run / attempts.NAME, map(asdict, rewritten))


def reforge(run: Path, **changes) -> None:
    """Change fields of the plan, with a plan id that fits them."""
    document = {**read_json(run / PLAN, "plan"), **changes}
    document["plan_id"] = id_of(document)
    write_json(run / PLAN, document)
    if (run / attempts.NAME).exists():
        rewrite_attempts(run)


def reseal_baseline(run: Path) -> None:
    """Make all digests of an altered retention baseline fit: what is refused then is refused for the field itself."""
    document = read_json(run / RUN, "")
    document |= {"items_sha256": file_digest(run / ITEMS), "outputs_sha256": file_digest(run / OUTPUTS)}
    document.pop("digest", None)
    write_json(run / RUN, {**document, "digest": digest(document)})
