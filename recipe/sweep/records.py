"""What a plan says of the sweep that it belongs to, or was chosen by."""

from dataclasses import dataclass
from typing import Any

from recipe.records import Sha256


@dataclass(frozen=True)
class Trial:
    """In the plan of a trial: its sweep's id, and the settings that are its own, by dotted key."""

    sweep: Sha256
    hyperparameters: dict[str, Any]


@dataclass(frozen=True)
class Chosen:
    """In the plan of a full run: the sweep that its settings were chosen by.

    ``record`` is the SHA-256 of that sweep's ``sweep.json``, ``trials`` how many it compared, those that were stopped
    early or failed included; ``split`` where, and ``rule`` how, as it was frozen before the first of them.
    """

    sweep: Sha256
    record: Sha256
    trials: int
    split: str
    rule: str
    hyperparameters: dict[str, Any]
