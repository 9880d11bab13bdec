"""All transcripts in one HTML file, which opens nothing else.

Tokens are a table of texts and one stream of places in it; both are compressed, and a browser builds what it shows of a
rollout when that is opened. Base64 has no character that means anything to HTML, the script puts texts into text nodes
alone, and the page's own policy lets no script run but that one.
"""

import base64
import gzip
import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from recipe.files import canonical
from recipe.records import short
from recipe.run.plan import Plan
from recipe.task.failure import SOLVED
from recipe.task.family import Task
from tools.transcripts.anatomy import KINDS, Block, Piece, printable
from tools.transcripts.gather import STAGES, Transcript

WARNING = (
    "Here stand task texts, hidden facts and what the policy said. "
    "They are no part of the summary: keep them to yourself."
)
_HERE = Path(__file__).parent
_FIXED = 0  # of the compressed data's time stamp: the same run gives the same page


def html(plan: Plan, found: Iterable[Transcript]) -> bytes:
    """The page."""
    table, stream = _Table(), array("I")
    tasks: dict[str, int] = {}
    prompts: dict[tuple[int, ...], tuple[int, int]] = {}
    failures: dict[str, int] = {}
    shown, rows = [], []
    for one in found:
        if one.task.task_id not in tasks:
            tasks[one.task.task_id] = len(tasks)
            shown.append(_task(one.task))
        prompt = tuple(one.record.prompt_ids)
        if prompt not in prompts:
            prompts[prompt] = _add(stream, table, one.anatomy.prompt)
        kind = one.anatomy.kind
        start, turns, titles = len(stream), [], list(one.anatomy.earned)
        for turn in one.anatomy.turns:
            blocks = [_block(block, _add(stream, table, block.pieces)[1], titles) for block in turn.blocks]
            turns.append([turn.finished, turn.readable, blocks])
        rows.append(
            [
                STAGES.index(one.stage),
                one.step,
                one.sample,
                tasks[one.task.task_id],
                one.record.reward,
                one.advantage,
                None if kind == SOLVED else failures.setdefault(kind, len(failures)),
                [one.record.outcome["hit_cap"], one.record.outcome["malformed"], one.record.outcome["tool_errors"]],
                one.record.outcome["tokens"],
                list(one.anatomy.earned.values()),
                list(one.anatomy.parts.values()),
                prompts[prompt],
                start,
                turns,
            ]
        )
    if sys.byteorder == "big":
        stream.byteswap()
    about = {
        "kind": plan.kind,
        "plan": plan.id,
        "title": plan.family.title,
        "run": printable(plan.run.name),
        "warning": WARNING,
        "stages": STAGES,
        "kinds": KINDS,
        "milestones": list(plan.family.milestones.values()),
        "weights": [entry.name for entry in fields(plan.config.rules.weights)],
        "turns": plan.config.rules.agent.max_tool_iterations,
    }
    data = {
        "about": about,
        "texts": [printable(piece.text) for piece in table.pieces],
        "ids": [piece.ids[0] if len(piece.ids) == 1 else piece.ids for piece in table.pieces],
        "tasks": shown,
        "failures": list(failures),
        "rollouts": rows,
    }
    return _filled(canonical(data), stream.tobytes())


class _Table:
    """Numbers pieces in the order of their first use."""

    def __init__(self):
        self.pieces: list[Piece] = []
        self._places: dict[tuple[int, ...], int] = {}

    def place(self, piece: Piece) -> int:
        if piece.ids not in self._places:
            self._places[piece.ids] = len(self.pieces)
            self.pieces.append(piece)
        return self._places[piece.ids]


def _add(stream: array, table: _Table, pieces: Sequence[Piece]) -> tuple[int, int]:
    """Append pieces to the stream; returns where, and how many."""
    start = len(stream)
    stream.extend(map(table.place, pieces))
    return start, len(pieces)


def _block(block: Block, count: int, titles: list[str]) -> list:
    """``[kind, pieces]``, and for a call ``[name, executed, error, milestones]``."""
    shown = [KINDS.index(block.kind), count]
    if block.called is not None:
        event = block.called.event
        earned = [titles.index(title) for title in block.called.earned]
        shown.append([printable(block.called.name), event is not None, event and event.error, earned])
    return shown


def _task(task: Task) -> list:
    """``[task_id, question, facts]``: the facts are its other fields, which the policy does not see."""
    facts = {name: value for name, value in task.record().items() if name not in ("task_id", "question")}
    return [task.task_id, task.question, [[name, short(value)] for name, value in facts.items()]]


def _filled(data: bytes, stream: bytes) -> bytes:
    style, script = ((_HERE / name).read_bytes() for name in ("page.css", "page.js"))
    values = {
        b"@STYLE_DIGEST@": _source(style),
        b"@SCRIPT_DIGEST@": _source(script),
        b"@STYLE@": style,
        b"@SCRIPT@": script,
        b"@WARNING@": WARNING.encode(),
        b"@DATA@": _packed(data),
        b"@STREAM@": _packed(stream),
    }
    page = (_HERE / "page.html").read_bytes()
    for name, value in values.items():
        page = page.replace(name, value)
    return page


def _source(content: bytes) -> bytes:
    """What the page's policy calls an inline script or style by."""
    return b"sha256-" + base64.b64encode(hashlib.sha256(content).digest())


def _packed(content: bytes) -> bytes:
    return base64.b64encode(gzip.compress(content, mtime=_FIXED))
