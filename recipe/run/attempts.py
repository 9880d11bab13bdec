"""Attempts: what was begun, paused, repeated or set aside in a run, in a journal that only grows.

``RUN/attempts.jsonl`` has one :class:`Entry` a line. Each names the SHA-256 of the one before it, the first one the
plan id and the run's nonce, so that no line can be changed, dropped, moved or taken from another run without the next
one saying so; a last line that is missing is missed by :func:`check`. Whoever owns the folder can write another journal
from its beginning: a manifest that is kept elsewhere, or signed, is what ties him down.

Nothing recorded is deleted in place. What an attempt left that is not gone on from is moved beside its stage, into
``STAGE.attempt-N/``, and the journal has the digest of that. An attempt that was killed is a start without an end.

Stages and driver write, also on several nodes. They take turns by a lock on the file itself (flock(2); network file
systems pass it on to their server), append one line and sync it. On a file system without locks it rests on stages
being started one after another, as the driver does; two lines that both follow the same one are then refused. What
a killed writer left of a line is no line: the next one cuts it off.
"""

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from recipe.errors import CheckFailed, Refused
from recipe.files import canonical, check_entry, digest, file_digest, files_below, permitted, sync_folder, tree_digests
from recipe.records import Form, Sha256, Word, content, lines, parse, read
from recipe.run.alone import NO_LOCKS
from recipe.run.evidence import RESULT
from recipe.run.plan import PLAN, Nonce
from recipe.run.result import STAMP
from recipe.run.result import load as load_result
from recipe.stages import STAGES

NAME = "attempts.jsonl"
WHAT = "the journal of attempts"
STARTED, RESUMED, PAUSED = "started", "resumed", "paused"
REFUSED, FAILED, COMPLETED, ASIDE = "refused", "failed", "completed", "set aside"
BEGUN, OUTCOMES = (STARTED, RESUMED), (FAILED, COMPLETED)
MEASURING = ("baseline", "candidate", "retention")
START = "0" * 64  # stands for the seal of an entry while it is made

Event = Annotated[str, Form("an event of an attempt", "|".join((*BEGUN, PAUSED, REFUSED, *OUTCOMES, ASIDE)))]
Moment = Annotated[str, Form("a time like 2026-01-31T23:59:59Z", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")]
Aside = Annotated[str, Form("a folder like grpo.attempt-1", r"[a-z_]+\.attempt-[1-9]\d{0,3}")]


@dataclass(frozen=True)
class Owner:
    """The trial that an attempt, and so a stage's folder (``claim.json``), belongs to."""

    cluster: str
    experiment: int
    trial: int


@dataclass(frozen=True)
class Entry:
    """A line of the journal.

    ``step`` is the one that training began or paused at; ``left`` the SHA-256 of the result of an attempt that failed
    or was completed, or of ``folder``, what was set aside; ``seal`` that of all the other fields.
    """

    number: int  # from 1
    stage: Word
    event: Event
    step: int | None
    time: Moment
    owner: Owner | None
    folder: Aside | None
    left: Sha256 | None
    previous: Sha256
    seal: Sha256

    def sealed(self) -> str:
        """What :attr:`seal` has to be."""
        return digest({name: value for name, value in asdict(self).items() if name != "seal"})


def load(run: Path) -> list[Entry]:
    """The journal of a run; empty where nothing was begun.

    Raises:
        Refused: a line that does not follow from the one before it, or is not whole; names it.
    """
    path = run / NAME
    if not os.path.lexists(path):
        return []
    found = content(path, WHAT, own=True)
    if _whole(found) != found:
        raise Refused(f"{path}: its last line was cut off in the writing; the driver's --resume sets that right")
    return _entries(run, found)


def begin(run: Path, stage: str, step: int | None = None, owner: Owner | None = None) -> None:
    """Record that a stage begins: before it computes anything."""
    _settle(run, stage, owner)
    past = [entry for entry in load_for_writing(run) if entry.stage == stage]
    resumed = past and past[-1].event == PAUSED and past[-1].step == step
    append(run, stage, RESUMED if resumed else STARTED, owner, step=step)


def end(folder: Path, owner: Owner | None = None) -> None:
    """Record how the attempt in a stage's folder ended, as its result says; once, however often it is asked.

    A result that no attempt began is none of this run, and :func:`check` says so.
    """
    past = [entry for entry in load_for_writing(folder.parent) if entry.stage == folder.name]
    if past and past[-1].event in BEGUN and (folder / RESULT).exists():
        event = FAILED if load_result(folder).failure else COMPLETED
        append(folder.parent, folder.name, event, owner, left=file_digest(folder / RESULT))


def refuse(run: Path, stage: str, owner: Owner | None = None) -> None:
    """Record that an attempt was refused, if it had begun at all."""
    past = [entry for entry in load_for_writing(run) if entry.stage == stage]
    if past and past[-1].event in BEGUN:
        append(run, stage, REFUSED, owner)


def set_aside(folder: Path, paths: Iterable[Path] | None = None, owner: Owner | None = None) -> None:
    """Keep what an unfinished or failed attempt left under a free name: all of a stage's folder, or ``paths`` in it.

    Killed on the way, it is brought to its end by the next start or the next call.

    Raises:
        Refused: a link, a pipe or their like in there, before anything is moved.
    """
    run, stage = folder.parent, folder.name
    _settle(run, stage, owner)
    if paths is None:
        if not os.path.lexists(folder):
            return
        files_below(folder)
        folder.rename(_halfway(run, stage))
    else:
        for path in paths:
            kept = _halfway(run, stage) / path.relative_to(folder)
            kept.parent.mkdir(parents=True, exist_ok=True)
            path.rename(kept)
    _settle(run, stage, owner)


def _halfway(run: Path, stage: str) -> Path:
    """Where what is being set aside is gathered, until the journal knows of it."""
    return run / f".{stage}.attempt.partial"


def _settle(run: Path, stage: str, owner: Owner | None) -> None:
    """Give what was gathered its name: first in the journal, then on disk."""
    partial = _halfway(run, stage)
    if not partial.exists():
        return
    entries = load_for_writing(run)
    past = [entry for entry in entries if entry.stage == stage]
    named = past[-1].folder if past and past[-1].event == ASIDE else None
    if named is None or os.path.lexists(run / named):
        known = {entry.folder for entry in entries}
        names = (f"{stage}.attempt-{number}" for number in range(1, 10_000))
        named = next(name for name in names if name not in known and not os.path.lexists(run / name))
        append(run, stage, ASIDE, owner, folder=named, left=digest(tree_digests(partial)))
    partial.rename(run / named)


# ---- the file


def append(
    run: Path,
    stage: str,
    event: str,
    owner: Owner | None = None,
    *,
    step: int | None = None,
    folder: str | None = None,
    left: str | None = None,
) -> None:
    """Add an entry, durably. Raises as :func:`load` does; nothing is added to a journal that does not hold."""
    path = run / NAME
    check_entry(path)
    with permitted(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    with open(handle, "r+b", buffering=0) as file:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        found = file.read()
        whole = _whole(found)
        past = _entries(run, whole)
        now = time.strftime(STAMP, time.gmtime())
        previous = past[-1].seal if past else origin(run)
        entry = Entry(len(past) + 1, stage, event, step, now, owner, folder, left, previous, START)
        try:
            if whole != found:
                file.truncate(len(whole))
            line = canonical(asdict(replace(entry, seal=entry.sealed())))
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
    if not past:
        sync_folder(run)


def load_for_writing(run: Path) -> list[Entry]:
    """The journal as the next writer finds it: without what a killed one left of a line."""
    path = run / NAME
    return _entries(run, _whole(content(path, WHAT, own=True))) if os.path.lexists(path) else []


def _whole(found: bytes) -> bytes:
    return found[: found.rfind(b"\n") + 1]


def _entries(run: Path, found: bytes) -> list[Entry]:
    path = run / NAME
    entries = lines(Entry, found, path, WHAT)
    if b"".join(canonical(asdict(entry)) for entry in entries) != found:
        raise Refused(f"{path} is not as it was written: its lines are not canonical JSON")
    previous = origin(run) if entries else ""
    for number, entry in enumerate(entries, 1):
        before = f"line {number - 1}" if number > 1 else f"{PLAN} of this run"
        if entry.seal != entry.sealed():
            raise Refused(f"{path}: line {number} was altered: its seal is not that of its other fields")
        if entry.previous != previous:
            raise Refused(f"{path}: line {number} does not follow {before}; a line was altered, dropped or moved")
        if entry.number != number:
            raise Refused(f"{path}: line {number} has number {entry.number}")
        previous = entry.seal
    return entries


def origin(run: Path) -> str:
    """What the first entry follows: the plan, and which of its runs this is."""
    path = run / PLAN
    frozen = read(dict, path, "the plan")
    plan_id, nonce = (
        parse(kind, frozen.get(name), str(path), name) for name, kind in (("plan_id", Sha256), ("nonce", Nonce))
    )
    return hashlib.sha256(f"{plan_id}{nonce}".encode()).hexdigest()


# ---- what it says


def check(run: Path, stages: Sequence[str]) -> list[str]:
    """That the journal tells one story, and that it is the one of the run's complete ``stages`` and of its folders.

    Returns:
        The folders that were set aside and are not here: a copy leaves them behind, a run has them all.

    Raises:
        Refused: as :func:`load`.
        CheckFailed: an attempt out of order, a stage whose result is not the one that its last attempt left, or
            a folder set aside that is not the recorded one; names it.
    """
    entries = load(run)
    for stage in STAGES:
        past = [entry for entry in entries if entry.stage == stage]
        _in_order(stage, past)
        if stage not in stages:
            continue
        if not past or past[-1].event != COMPLETED:
            last = f"ends with {past[-1].event}" if past else "has no attempt"
            raise CheckFailed(f"attempts: stage {stage} is complete, but the journal {last}")
        if past[-1].left != file_digest(run / stage / RESULT):
            raise CheckFailed(f"attempts: {stage}/{RESULT} is not the one that the journal's last attempt left")
    return _folders(run, entries)


def _in_order(stage: str, past: Sequence[Entry]) -> None:
    """What may follow what. Only an attempt of a resumable stage is taken up without its folder being set aside."""
    last: Entry | None = None
    going_on = (*BEGUN, ASIDE, REFUSED) if STAGES[stage].resumable else (ASIDE, REFUSED)
    for entry in past:
        where = f"attempts: line {entry.number}: stage {stage} {entry.event}"
        before = last and last.event
        why = f"after {f'it was {before}' if before else 'nothing'}"
        if entry.event == STARTED and before not in (None, *going_on):
            raise CheckFailed(f"{where} {why}, and what that attempt left was not set aside")
        if entry.event == RESUMED and (before != PAUSED or last.step != entry.step):
            raise CheckFailed(f"{where} from step {entry.step} {why}")
        if entry.event in (PAUSED, REFUSED, *OUTCOMES) and before not in BEGUN:
            raise CheckFailed(f"{where} {why}")
        if entry.event == PAUSED and (entry.step is None or entry.step < (last.step or 0)):
            raise CheckFailed(f"{where} at step {entry.step}, having begun from {last.step}")
        if (entry.left is None) == (entry.event in (*OUTCOMES, ASIDE)) or (entry.folder is None) == (entry.event == ASIDE):
            raise CheckFailed(f"{where}, with fields of another event")
        last = entry


def _folders(run: Path, entries: Sequence[Entry]) -> list[str]:
    """Hold what was set aside against the folders that are here."""
    kept = {entry.folder: entry for entry in entries if entry.event == ASIDE}
    for entry in entries:
        if entry.event == ASIDE and (kept[entry.folder] != entry or not entry.folder.startswith(f"{entry.stage}.")):
            raise CheckFailed(f"attempts: line {entry.number}: {entry.folder} is not a name for what was set aside")
    for name in sorted(os.listdir(run)):
        if ".attempt-" in name and name not in kept or name.endswith(".attempt.partial"):
            raise CheckFailed(f"attempts: {run / name} is not in the journal")
    here = {name for name in kept if os.path.lexists(run / name)}
    for name in sorted(here):
        if digest(tree_digests(run / name)) != kept[name].left:
            raise CheckFailed(f"attempts: {run / name} is not what was set aside")
    return [name for name in kept if name not in here]


def before(entries: Sequence[Entry], stage: str) -> list[Entry]:
    """What the journal held when a stage last began: a report speaks of that, and not of itself."""
    starts = [place for place, entry in enumerate(entries) if (entry.stage, entry.event) == (stage, STARTED)]
    return [*entries[: starts[-1] if starts else None]]


def summary(entries: Sequence[Entry]) -> list[str]:
    """Lines for people on what did not go straight to its end; none where every stage ran once, undisturbed."""
    found = [line for stage in STAGES for line in _told(stage, [entry for entry in entries if entry.stage == stage])]
    aside = [entry.folder for entry in entries if entry.event == ASIDE]
    return [*found, f"set aside: {', '.join(aside)}"] if aside else found


def _told(stage: str, past: Sequence[Entry]) -> list[str]:
    name = "GRPO" if stage == "grpo" else stage
    starts = [entry for entry in past if entry.event == STARTED]
    counts = {event: sum(entry.event == event for entry in past) for event in (PAUSED, REFUSED, FAILED)}
    outcomes = sum(entry.event in OUTCOMES for entry in past)
    found = []
    if len(starts) - counts[REFUSED] > max(1, outcomes):
        steps = ", ".join(str(entry.step) for entry in starts if entry.step is not None)
        found.append(f"{name} started {_times(len(starts))}" + (f", from steps {steps}" if steps else ""))
    if outcomes > 1:
        found.append(f"{name} {'measured' if stage in MEASURING else 'brought to its end'} {_times(outcomes)}")
    return [*found, *(f"{name} {event} {_times(count)}" for event, count in counts.items() if count)]


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
