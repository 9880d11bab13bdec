"""Claims: whose a stage's folder is.

On a cluster ``claim.json`` names the trial that a folder belongs to. That trial alone takes up an unfinished attempt
when Determined starts it again (pause, lost node, crash): a resumable stage goes on, any other starts over, and what
was finished is told again; what is not gone on from is set aside (:mod:`recipe.run.attempts`). Removing the claim hands the folder on; do so only when its experiment has ended.
"""

import shutil
from dataclasses import asdict
from pathlib import Path

from recipe.errors import Refused
from recipe.files import check_entry, files_below, write_json
from recipe.records import read
from recipe.run.attempts import Owner, set_aside
from recipe.run.evidence import CLAIM, RESULT


def holder(folder: Path) -> Owner | None:
    """The trial that a stage's folder belongs to; None for a local one."""
    return read(Owner, folder / CLAIM, f"the claim of stage {folder.name}") if (folder / CLAIM).exists() else None


def claim(folder: Path, owner: Owner | None, resumable: bool) -> bool:
    """Make the stage's folder ours. False if an earlier run of this very trial has finished the stage.

    Raises:
        Refused: the folder is somebody else's, or used and not to be taken up.
    """
    if _created(folder, owner):
        return True
    check_entry(folder)
    held_by = holder(folder)
    if held_by not in (None, owner):
        raise Refused(
            f"{folder} belongs to experiment {held_by.experiment}, trial {held_by.trial}; let that go on, or, once "
            f"it has ended, remove {CLAIM} there to hand the folder on"
        )
    finished = (folder / RESULT).exists()
    if resumable and not finished:
        files_below(folder)  # what goes on writes and removes there, never behind a link
        if held_by != owner:  # handed on
            write_json(folder / CLAIM, asdict(owner))
        return True
    if held_by is None:
        raise Refused(f"{folder} is used already; prepare a new run, or continue with the driver's --resume")
    if finished:
        return False
    set_aside(folder, owner=owner)
    return claim(folder, owner, resumable)


def _created(folder: Path, owner: Owner | None) -> bool:
    """Whether ``folder`` is new; it appears together with its claim."""
    if owner is None:
        try:
            folder.mkdir()
        except FileExistsError:
            return False
        return True
    fresh = folder.with_name(f".{folder.name}.trial-{owner.trial}")
    write_json(fresh / CLAIM, asdict(owner))
    try:
        fresh.rename(folder)
    except OSError:  # there is a folder, and it is not empty
        shutil.rmtree(fresh)
        return False
    return True


def release(folder: Path) -> None:
    """Give up a folder in which nothing was written: a stage that was refused leaves the right order possible."""
    if all(path.name == CLAIM for path in folder.iterdir()):
        shutil.rmtree(folder)
