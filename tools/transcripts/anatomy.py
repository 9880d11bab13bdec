"""One rollout taken apart for people: its tokens by what they are, what each call earned, what the reward is made of.

Nothing here is proved: a record is shown as it stands, and ``python -m tools.driver verify`` is what holds it to its
tokens. Refused is only what cannot be laid out.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from recipe.config import Rules
from recipe.errors import Refused
from recipe.policy.chat import CALL, END_CALL, Chat, Turn, parse_turn
from recipe.run.evidence import RolloutRecord
from recipe.task import failure
from recipe.task.environment import Event
from recipe.task.family import Family, Task
from recipe.task.outcome import Outcome

# Kinds of blocks. The first three are the policy's own tokens, which the loss counts; the others are put between them.
THINKING, SAID, CALLED, TEMPLATE, OBSERVED = KINDS = ("thinking", "said", "call", "template", "observation")

_CALLS = re.compile(f"{CALL}.*?{END_CALL}", re.DOTALL)
_RESPONSES = re.compile("<tool_response>.*?(?:</tool_response>|\\Z)", re.DOTALL)
_BROKEN = "\ufffd"  # what bytes become that are no whole character
_LONGEST = 4  # bytes of a character, so most tokens that can share one


@dataclass(frozen=True)
class Piece:
    """Tokens of one readable text: one, or several that share a character."""

    ids: tuple[int, ...]
    text: str


class Pieces:
    """Splits token ids into pieces, each decoded once."""

    def __init__(self, chat: Chat):
        self._chat = chat
        self._known: dict[tuple[int, ...], Piece] = {}

    def of(self, ids: Sequence[int]) -> list[Piece]:
        """The pieces of a run of tokens, all of them, in order."""
        pieces, place = [], 0
        while place < len(ids):
            piece = self._piece(tuple(ids[place : place + 1]))
            if _BROKEN in piece.text:
                longer = (self._piece(tuple(ids[place : place + more])) for more in range(2, _LONGEST + 1))
                piece = next((whole for whole in longer if _BROKEN not in whole.text), piece)
            pieces.append(piece)
            place += len(piece.ids)
        return pieces

    def _piece(self, ids: tuple[int, ...]) -> Piece:
        if ids not in self._known:
            self._known[ids] = Piece(ids, self._chat.decode(ids))
        return self._known[ids]


@dataclass(frozen=True)
class Called:
    """A call beside what came of it: its event, None if it was not executed, and the titles of what it earned."""

    name: str
    event: Event | None
    earned: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """Pieces of one kind that follow each other; ``called`` beside those of a call."""

    kind: str
    pieces: list[Piece]
    called: Called | None = None


@dataclass(frozen=True)
class Spoken:
    """A turn of the policy and what follows it up to the next one. ``readable``: it closed its thinking, once."""

    finished: bool
    readable: bool
    blocks: list[Block]


@dataclass(frozen=True)
class Anatomy:
    """A rollout taken apart.

    ``parts`` are what each weight of the reward adds, and sum to it; ``earned`` says in which turn (from 0) each
    milestone was, None if it was missed. ``kind`` is where it failed, if it did (:mod:`recipe.task.failure`).
    """

    prompt: list[Piece]
    turns: list[Spoken]
    earned: dict[str, int | None]
    parts: dict[str, float]
    kind: str


def dissect(record: RolloutRecord, task: Task, pieces: Pieces, chat: Chat, rules: Rules, where: str) -> Anatomy:
    """Take one record apart; ``where`` names it where it is refused.

    Raises:
        Refused: ids, mask and turns that do not belong together, or an outcome of another family.
    """
    family = rules.family
    streams = _streams(record, where)
    said = [pieces.of(span) for span, _ in streams]
    turns = [_parsed(entry, span, chat) for entry, (span, _) in zip(said, streams)]
    steps = _milestones(family, task, turns, record.events)
    outcome = _outcome(record, steps[0], where)
    earned = dict.fromkeys(family.milestones.values())
    spoken = []
    for number, (turn, entry, (_, glue)) in enumerate(zip(turns, said, streams)):
        answered = [place for place, event in enumerate(record.events) if event.turn == number]
        calls = []
        for order, call in enumerate(turn.calls):
            place = answered[order] if order < len(answered) else None
            new = () if place is None else tuple(_new(family, steps[place], steps[place + 1]))
            earned |= {title: number for title in new}
            calls.append(Called(call.name, None if place is None else record.events[place], new))
        blocks = [*_policy_blocks(entry, turn, calls), *_glue_blocks(pieces.of(glue))]
        spoken.append(Spoken(turn.finished, turn.visible is not None, blocks))
    parts = reward_parts(family, outcome, rules.weights)
    kind = failure.kind(family, task, record.events, record.outcome)
    return Anatomy(pieces.of(record.prompt_ids), spoken, earned, parts, kind)


def _streams(record: RolloutRecord, where: str) -> list[tuple[list[int], list[int]]]:
    """``(sampled ids, ids that follow)`` of each turn: the record's ``ids`` cut at its mask."""
    if len(record.mask) != len(record.ids) or not {*record.mask} <= {0, 1}:
        raise Refused(f"{where}: mask does not say of every token whether the policy sampled it")
    if min((*record.ids, *record.prompt_ids), default=0) < 0:
        raise Refused(f"{where}: ids holds a negative number, which is no token")
    streams, place = [], 0
    for number, span in enumerate(record.spans):
        end = place + len(span)
        if not span or record.ids[place:end] != span or not all(record.mask[place:end]):
            raise Refused(f"{where}: spans[{number}] is not where ids and mask have it")
        place = end
        while place < len(record.ids) and not record.mask[place]:
            place += 1
        streams.append((span, record.ids[end:place]))
    if place < len(record.ids):
        raise Refused(f"{where}: mask marks tokens as sampled that are of no turn")
    if not all(0 <= event.turn < len(streams) for event in record.events):
        raise Refused(f"{where}: events names a turn that the rollout does not have")
    return streams


def _parsed(pieces: list[Piece], span: list[int], chat: Chat) -> Turn:
    finished = span[-1] == chat.end_id
    return parse_turn(_text(pieces[:-1] if finished else pieces), finished, chat.thinking_opened)


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _milestones(family: Family, task: Task, turns: list[Turn], events: list[Event]) -> list[Outcome]:
    """The judge's word after none of the events, after the first, and so on: what changes was earned there."""
    return [
        family.judge(task, turns, tuple(events[:count]), hit_cap=False, tokens=0) for count in range(len(events) + 1)
    ]


def _new(family: Family, before: Outcome, after: Outcome) -> Iterator[str]:
    for name, title in family.milestones.items():
        if getattr(after, name) and not getattr(before, name):
            yield title


def _outcome(record: RolloutRecord, judged: Outcome, where: str) -> Outcome:
    """The recorded outcome, of the class that the family's judge gives."""
    names = {entry.name for entry in fields(judged)}
    if record.outcome.keys() != names:
        raise Refused(f"{where}: outcome has not the entries {', '.join(sorted(names))}")
    return type(judged)(**record.outcome)


def reward_parts(family: Family, outcome: Outcome, weights: object) -> dict[str, float]:
    """What each weight adds to the reward, in their order, clipping included; zero where it adds nothing."""
    names = [entry.name for entry in fields(weights)]
    now, parts = replace(weights, **dict.fromkeys(names, 0.0)), {}
    before = family.reward(outcome, now)
    for name in names:
        now = replace(now, **{name: getattr(weights, name)})
        after = family.reward(outcome, now)
        parts[name], before = round(after - before, 6), after
    return parts


def _policy_blocks(pieces: list[Piece], turn: Turn, calls: list[Called]) -> list[Block]:
    """Thinking, text and calls of a turn; white space and the end token stand with what is before them."""
    if turn.visible is None:
        return [Block(THINKING, pieces)]
    ended, pieces = (pieces[-1:], pieces[:-1]) if turn.finished else ([], pieces)
    start, said = (len(turn.text) - len(part) for part in (turn.visible, turn.visible.lstrip()))
    cuts = [(0, THINKING, None)] if start else []
    cuts.append((said if start else 0, SAID, None))
    for found, call in zip(_CALLS.finditer(turn.visible), calls):
        cuts += [(start + found.start(), CALLED, call), (start + found.end(), SAID, None)]
    blocks = _cut(pieces, cuts) or [Block(SAID, [])]
    blocks[-1].pieces.extend(ended)
    return blocks


def _glue_blocks(pieces: list[Piece]) -> list[Block]:
    cuts = [(0, TEMPLATE, None)]
    for found in _RESPONSES.finditer(_text(pieces)):
        cuts += [(found.start(), OBSERVED, None), (found.end(), TEMPLATE, None)]
    return _cut(pieces, cuts)


def _cut(pieces: list[Piece], cuts: list[tuple[int, str, Called | None]]) -> list[Block]:
    """Blocks that begin at the offsets of ``cuts``; a piece belongs where its first character does."""
    blocks: list[Block] = []
    begun, place, number = -1, 0, 0
    for piece in pieces:
        while number + 1 < len(cuts) and cuts[number + 1][0] <= place:
            number += 1
        _, kind, called = cuts[number]
        if begun != number:
            blocks.append(Block(kind, [], called))
            begun = number
        blocks[-1].pieces.append(piece)
        place += len(piece.text)
    joined: list[Block] = []
    for block in blocks:
        if joined and block.kind == SAID and not _text(block.pieces).strip():
            joined[-1].pieces.extend(block.pieces)
        else:
            joined.append(block)
    return joined


def printable(text: str) -> str:
    """``text`` with every invisible character spelled out, but for spaces, tabs and line breaks.

    A policy may sample control codes that would act on a terminal, and marks that turn the direction of a page.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
