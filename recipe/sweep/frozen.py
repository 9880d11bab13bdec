"""``space.json``: a sweep, frozen before its first trial under one id.

It has the space, the rule that will choose, and the plan that all trials share: inputs, sources, versions, and the
configuration without what the trials differ in. A sweep's folder::

    space.json            this
    shared/               preflight and development baseline of the starting checkpoint, by the digest of what they rest on
    trials/trial-7/       a run folder a trial, without a test split
    sweep.json            at the end: the trials and the choice (recipe.sweep.table)
    sweep.html            the same, for people
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from recipe.config import resolve
from recipe.errors import Refused
from recipe.files import canonical, digest, real, write_json
from recipe.records import Form, Sha256, parse, read
from recipe.run import plan as plans
from recipe.run.attempts import START
from recipe.run.plan import PLAN, Plan
from recipe.run.sources import ROOT
from recipe.sweep import choice, space
from recipe.sweep.records import Trial
from recipe.sweep.space import Space

LAYOUT = 1
NAME = "space.json"
TRIALS = "trials"
TrialName = Annotated[str, Form("a trial's folder like trial-7", r"trial-[1-9]\d{0,8}")]


@dataclass(frozen=True)
class Frozen:
    """``space.json``. ``config`` are the overrides that all trials share; the id covers all but itself.

    ``base`` is the plan of a trial without hyperparameters of its own.
    """

    layout: int
    sweep_id: Sha256
    config: dict
    space: Space
    rule: str
    base: plans.Frozen


@dataclass(frozen=True)
class Sweep:
    """A loaded sweep and the folder that it stands in."""

    frozen: Frozen
    folder: Path

    @property
    def id(self) -> str:
        return self.frozen.sweep_id

    @property
    def space(self) -> Space:
        return self.frozen.space

    def run(self, name: str) -> Path:
        """The folder of a trial."""
        return self.folder / TRIALS / name

    def plan(self, hyperparameters: Mapping[str, Any], where: str) -> plans.Frozen:
        """What the plan of a trial with these settings freezes.

        Raises:
            Refused: they lie outside the space.
        """
        given = self.space.admits(hyperparameters, where)
        config = resolve(space.merged(self.frozen.config, self.space.overrides(given)))
        return plans.of_trial(self.frozen.base, config, Trial(self.id, given))

    def trial(self, name: str) -> Plan:
        """The plan of a trial as it was frozen; what it rests on is not compared.

        Raises:
            Refused: it is missing, altered, or not the one that its settings give in this sweep.
        """
        plan = plans.load_run(self.run(name), check_inputs=False)
        if plan.frozen.trial is None or plan.frozen.trial.sweep != self.id:
            raise Refused(f"{plan.run} is no trial of the sweep {self.folder}")
        wanted = self.plan(plan.frozen.trial.hyperparameters, str(plan.run / PLAN))
        if replace(wanted, nonce=plan.frozen.nonce) != plan.frozen:
            raise Refused(f"{plan.run / PLAN} does not follow from {self.folder / NAME}")
        return plan


def freeze(
    model: Path,
    recorded: Path,
    config: dict,
    space_document: dict,
    where: str,
    output: Path,
    checkout: Path = ROOT,
) -> Sweep:
    """Freeze a sweep into the new folder ``output``.

    Args:
        recorded: the checkpoint's retention baseline, which the full run will need.
        config: nested overrides that all trials share.
        space_document: the YAML's ``hyperparameters`` and ``searcher``, which ``where`` names.

    Raises:
        Refused: as :func:`recipe.sweep.space.of` and :func:`recipe.run.plan.prepare`.
    """
    output = real(output)
    if os.path.lexists(output):
        raise Refused(f"the sweep's folder is used already: {output}; choose a new one")
    tried = space.of(space_document, config, where)
    shared = resolve(space.merged(config, space.nested(tried.constants)))
    base = plans.resolved(model, recorded, shared, output, checkout, Trial(START, {}))
    document = {"layout": LAYOUT, "config": config, "space": asdict(tried), "rule": choice.RULE, "base": asdict(base)}
    sweep_id = _id(document)
    base = plans.of_trial(base, shared, Trial(sweep_id, {}))
    frozen = parse(Frozen, {**document, "sweep_id": sweep_id, "base": asdict(base)}, NAME)
    for point in tried.grid() if tried.searcher["name"] == "grid" else []:
        Sweep(frozen, output).plan(point, where)
    partial = output.with_name(f".{output.name}.partial")
    write_json(partial / NAME, asdict(frozen))
    (partial / TRIALS).mkdir(exist_ok=True)
    partial.rename(output)
    return Sweep(frozen, output)


def load(folder: Path) -> Sweep:
    """The sweep of a folder.

    Raises:
        Refused: there is none, it was altered, or it is not what its configuration and space give.
    """
    folder = real(folder)
    path = folder / NAME
    frozen = read(Frozen, path, "the sweep", (LAYOUT, "freeze a new sweep"))
    if frozen.sweep_id != _id(asdict(frozen)):
        raise Refused(f"{path} was altered after it was frozen; freeze a new sweep")
    if frozen.rule != choice.RULE:
        raise Refused(f"{path} was frozen with another rule; use the commit that froze it")
    document = {
        "hyperparameters": {**frozen.space.constants, **frozen.space.parameters}, "searcher": frozen.space.searcher
    }  # fmt: skip
    shared = resolve(space.merged(frozen.config, space.nested(frozen.space.constants)))
    wanted = plans.of_trial(frozen.base, shared, Trial(frozen.sweep_id, {}))
    again = space.of(document, frozen.config, str(path))
    if again != frozen.space or canonical(asdict(replace(wanted, nonce=frozen.base.nonce))) != canonical(
        asdict(frozen.base)
    ):
        raise Refused(f"{path} is not what its configuration and space give; freeze a new sweep")
    return Sweep(frozen, folder)


def _id(document: dict) -> str:
    """SHA-256 of all that a sweep freezes, but for its own id."""
    own = ("plan_id", "nonce", "trial")
    base = {key: value for key, value in document["base"].items() if key not in own}
    return digest({**{key: value for key, value in document.items() if key != "sweep_id"}, "base": base})
