"""Transcripts as lines for a terminal, with colours where it is one."""

from collections.abc import Iterable, Iterator

from recipe.task.failure import SOLVED
from tools.transcripts.anatomy import CALLED, OBSERVED, SAID, TEMPLATE, THINKING, Block, printable
from tools.transcripts.gather import Transcript

_RESET, _BOLD, _FAINT, _RED, _GREEN, _YELLOW, _BLUE = (f"\x1b[{code}m" for code in (0, 1, 2, 31, 32, 33, 34))
_COLOURS = {THINKING: _FAINT, SAID: "", CALLED: _BLUE, OBSERVED: _YELLOW}
_MARGIN = max(map(len, _COLOURS)) + 2


def lines(found: Iterable[Transcript], coloured: bool) -> Iterator[str]:
    """Every rollout: how it ended, its question, and what was thought, said, called and answered."""

    def paint(colour: str, text: str) -> str:
        return f"{colour}{text}{_RESET}" if coloured and colour and text else text

    for one in found:
        record, anatomy = one.record, one.anatomy
        good = anatomy.kind == SOLVED
        step = "" if one.step is None else f"step {one.step} · "
        yield paint(_BOLD, f"── {one.stage} · {step}{one.task.task_id} · sample {one.sample}")
        parts = " ".join(f"{value:+.2f} {name}" for name, value in anatomy.parts.items() if value)
        verdict = paint(_GREEN if good else _RED, f"{'✓' if good else '✗'} {anatomy.kind}")
        advantage = "" if one.advantage is None else f" · advantage {one.advantage:+.2f}"
        reward = f"reward {record.reward:.2f}{f' = {parts}' if parts else ''}"
        yield f"{verdict} · {reward}{advantage} · {record.outcome['tokens']} tokens"
        yield from _labelled("question", one.task.question, paint, "")
        for number, turn in enumerate(anatomy.turns, 1):
            flaws = [] if turn.finished else ["not finished"]
            flaws += [] if turn.readable else ["thinking never closed"]
            yield paint(_FAINT, f"  turn {number}") + paint(_RED, "".join(f"  {flaw}" for flaw in flaws))
            for block in turn.blocks:
                if block.kind == TEMPLATE:
                    continue
                text = printable("".join(piece.text for piece in block.pieces))
                yield from _labelled(block.kind, text, paint, _COLOURS[block.kind])
                yield from (f"{'':{_MARGIN + 4}}{note}" for note in _notes(block, paint))
        yield ""


def _labelled(kind: str, text: str, paint, colour: str) -> Iterator[str]:
    """``text`` with its kind before the first line; a tab would leave the margin, so it is spaces."""
    for number, line in enumerate(text.strip().expandtabs(4).split("\n")):
        label = (kind if number == 0 else "").ljust(_MARGIN)
        yield f"    {paint(_FAINT, label)}{paint(colour, line)}".rstrip()


def _notes(block: Block, paint) -> Iterator[str]:
    called = block.called
    if called is None:
        return
    if called.event is None:
        yield paint(_RED, "not executed")
    elif called.event.error is not None:
        yield paint(_RED, called.event.error)
    yield from (paint(_GREEN, f"✓ {title}") for title in called.earned)
