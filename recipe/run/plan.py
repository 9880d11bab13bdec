"""Plan of a run: everything that its numbers rest on, frozen by SHA-256 under one plan id.

A run folder begins with two files::

    plan.json     configuration, digests of all inputs and sources, versions, commit; the plan id covers it all
    tasks.json    the three splits, hidden facts included; a sweep's trial has no test split

Every stage loads the plan through :func:`load`, which refuses a changed input and names the file.
"""

import os
import random
import secrets
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from recipe.config import Config, complete, deviations
from recipe.errors import Refused
from recipe.files import canonical, check_entry, digest, real, tree_digests, write_json
from recipe.mgsm import baseline
from recipe.policy import checkpoint, configuration
from recipe.records import Absolute, Commit, Form, Inside, Sha256, parse, read
from recipe.run import repository
from recipe.run.sources import ROOT, is_source, nothing_in_the_way, package_sources, trainer_sources, versions
from recipe.statistics import verdict
from recipe.statistics.verdict import Decided
from recipe.sweep.records import Chosen, Trial
from recipe.task.family import Family, Task

LAYOUT = 4
PLAN, TASKS = "plan.json", "tasks.json"
PRACTICE = "practice.json"  # marks a practice checkpoint
TEST = "test"  # the split that a sweep does without
MEASURED = "retention_baseline."  # begins the names of deviations that the retention baseline was recorded under
Nonce = Annotated[str, Form("16 lower hex digits", "[0-9a-f]{16}")]

@dataclass(frozen=True)
class Tree:
    """A folder outside the run: where it was, and the SHA-256 of each file. ``digest`` is that of ``files``."""

    path: Absolute
    digest: Sha256
    files: dict[Inside, Sha256]


@dataclass(frozen=True)
class Repository:
    """The checkout: its commit, None outside one, and the sources that differ from that."""

    path: Absolute
    commit: Commit | None
    uncommitted: list[Inside]


@dataclass(frozen=True)
class Frozen:
    """``plan.json``. ``tasks`` is the SHA-256 of ``tasks.json``.

    ``nonce`` is drawn anew for each run and not covered by the plan id: equal inputs have equal ids, and two runs of
    one plan are two. ``trial`` says which trial of a sweep this is, ``chosen`` which sweep the settings were chosen by.
    """

    layout: int
    plan_id: Sha256
    nonce: Nonce
    practice: bool
    config: dict
    deviations: dict
    decided: Decided
    checkpoint: Tree
    retention_baseline: Tree
    tasks: Sha256
    sources: dict[Inside, Sha256]
    trainer: dict[Inside, Sha256]
    versions: dict[str, str]
    repository: Repository
    trial: Trial | None
    chosen: Chosen | None


@dataclass(frozen=True)
class Plan:
    """A loaded plan: what was frozen, its splits, and the run folder that it stands in."""

    frozen: Frozen
    splits: dict[str, list[Task]]
    run: Path

    @property
    def id(self) -> str:
        return self.frozen.plan_id

    @property
    def practice(self) -> bool:
        """Whether the checkpoint is a practice one; such a run is never reported as a pilot."""
        return self.frozen.practice

    @cached_property
    def config(self) -> Config:
        return complete(self.frozen.config)

    @property
    def family(self) -> Family:
        return self.config.rules.family

    @property
    def checkpoint(self) -> Path:
        return Path(self.frozen.checkpoint.path)

    @property
    def retention_baseline(self) -> Path:
        return Path(self.frozen.retention_baseline.path)

    @cached_property
    def recorded(self) -> baseline.RetentionBaseline:
        """The retention baseline, read and checked."""
        return baseline.load(self.retention_baseline)

    @cached_property
    def training_order(self) -> list[Task]:
        """The tasks that training consumes, in order: a seeded draw without repetition, one group each.

        Under ``grpo.resample`` a step has ``resample_tasks`` of them to choose from, one after another.
        """
        grpo = self.config.grpo
        groups = grpo.steps * grpo.batch_size // grpo.num_generations
        return random.Random(f"{grpo.seed}/order").sample(self.splits["train"], groups * grpo.candidates)

    def announcement(self) -> list[str]:
        """What was frozen, and what it can show, for the one who froze it."""
        from recipe.statistics import prospect

        decided, questions = self.frozen.decided, self.recorded.counts["items"]
        return [
            f"{self.kind} plan {self.id[:16]} frozen in {self.run / PLAN}",
            *prospect.lines(decided.items, decided.samples, questions, decided.margin),
        ]

    @property
    def kind(self) -> str:
        """``practice``; ``trial`` of a sweep; ``pilot`` under the default protocol; else ``custom``."""
        if self.practice:
            return "practice"
        if self.frozen.trial is not None:
            return "trial"
        return "custom" if self.frozen.deviations else "pilot"


def prepare(
    model: Path,
    recorded: Path,
    config: Config,
    output: Path,
    checkout: Path = ROOT,
    repeated: bool = False,
    chosen: Chosen | None = None,
) -> Plan:
    """Freeze a plan into the new folder ``output``.

    Args:
        recorded: the checkpoint's retention baseline.
        checkout: the git checkout whose commit the plan records; this code may be a copy of it without a history.
        repeated: accept an ``output`` that holds this very plan, where a lost machine makes a cluster prepare again.
        chosen: the sweep that the configuration was chosen by.

    Raises:
        Refused: an input that is missing or does not fit, uncommitted sources, or an ``output`` that exists.
    """
    output = real(output)
    if output.exists() and not repeated:
        raise Refused(f"the run folder is used already: {output}; choose a new one")
    return freeze(resolved(model, recorded, config, output, checkout, chosen=chosen), output)


def resolved(
    model: Path,
    recorded: Path,
    config: Config,
    output: Path,
    checkout: Path = ROOT,
    trial: Trial | None = None,
    chosen: Chosen | None = None,
) -> Frozen:
    """What :func:`prepare` would freeze. Nothing is written. Raises as that does."""
    model, recorded = real(model), real(recorded)
    for what, folder in (("checkpoint", model), ("retention baseline", recorded)):
        if output.is_relative_to(folder):
            raise Refused(f"the run folder {output} lies inside the {what} {folder}, whose digest it would change")
    identity = checkpoint.identity(model)
    practice = PRACTICE in identity["files"]
    retention = baseline.load(recorded)
    if retention.checkpoint != identity["digest"]:
        raise Refused(
            f"the retention baseline {retention.folder} was recorded for another checkpoint "
            f"({retention.checkpoint[:12]}…, not {identity['digest'][:12]}…); record one for {model} with "
            "experiments.retention_baseline"
        )
    _check_retention(retention, config)
    splits = _generated(config, trial)
    _check_chat(model, splits, config)
    sources = package_sources()
    state = repository.state(Path(checkout).resolve(), sources, is_source, required=not practice)
    if state["uncommitted"] and not practice:
        path = state["uncommitted"][0]
        how = "differs from the last commit" if path in sources else "is in the last commit, but deleted here"
        raise Refused(f"{path} {how}; commit that, then prepare again")

    evidence = tree_digests(retention.folder)
    document = {
        "layout": LAYOUT,
        "practice": practice,
        "config": asdict(config),
        "deviations": deviations(config) | _deviations(retention),
        "decided": asdict(_decided(config)),
        "checkpoint": {"path": str(model), **identity},
        "retention_baseline": {"path": str(retention.folder), "digest": digest(evidence), "files": evidence},
        "tasks": digest(_records(splits)),
        "sources": sources,
        "trainer": trainer_sources(),
        "versions": versions(),
        "repository": state,
        "trial": None if trial is None else asdict(trial),
        "chosen": None if chosen is None else asdict(chosen),
    }
    return _numbered(document)


def of_trial(base: Frozen, config: Config, trial: Trial) -> Frozen:
    """The plan of one trial of a sweep: that of the whole sweep under the trial's own configuration."""
    document = asdict(base) | {
        "config": asdict(config),
        "deviations": deviations(config) | _measured(base),
        "decided": asdict(_decided(config)),
        "tasks": digest(_records(_generated(config, trial))),
        "trial": asdict(trial),
    }
    return _numbered(document)


def _numbered(document: dict) -> Frozen:
    return parse(Frozen, document | {"plan_id": id_of(document), "nonce": secrets.token_hex(8)}, PLAN)


def freeze(frozen: Frozen, output: Path) -> Plan:
    """Write a plan and its tasks into the folder ``output``, whole, unless it holds this very plan.

    Raises:
        Refused: an ``output`` that holds anything else.
    """
    plan = Plan(frozen, _generated(complete(frozen.config), frozen.trial), output)
    if output.exists():
        there = read(Frozen, output / PLAN, "the plan") if (output / PLAN).is_file() else None
        if there is None or replace(frozen, nonce=there.nonce) != there:
            raise Refused(f"the run folder is used already, and not by this plan: {output}; choose a new one")
        return replace(plan, frozen=there)
    partial = output.with_name(f".{output.name}.partial")
    write_json(partial / TASKS, _records(plan.splits))
    write_json(partial / PLAN, asdict(frozen))
    partial.rename(output)  # a run folder is a whole one
    return plan


def load(path: Path, check_inputs: bool = True, check_sources: bool | None = None) -> Plan:
    """Load a plan and prove that nothing it rests on has changed.

    Args:
        check_inputs: whether the checkpoint and its retention baseline must be as they were.
        check_sources: whether this code must be what was frozen, as it must where a number comes from; what reads
            finished evidence asks the recorded commit instead (:mod:`recipe.run.repository`). As ``check_inputs``, if
            not given.

    What follows from the configuration (deviations, tasks), the retention baseline (its deviations, with
    ``check_inputs``) or the checkpoint's files (practice) is derived again: the plan's own word for it is only
    compared. ``path`` may be a link to a plan; the run is the folder that the plan itself lies in, of files and real
    folders alone.

    Raises:
        Refused: another layout version, an altered plan, a changed input, or a link in the run folder; names the file.
    """
    path = real(path)
    frozen = read(Frozen, path, "the plan", (LAYOUT, "prepare a new plan"))
    document = asdict(frozen)
    if frozen.plan_id != id_of(document):
        raise Refused(f"{path} was altered after it was frozen; prepare a new plan")
    config = complete(frozen.config)
    splits = _generated(config, frozen.trial)
    derived = {
        "config": asdict(config),
        "deviations": deviations(config) | _measured(frozen),
        "decided": asdict(_decided(config)),
        "practice": PRACTICE in frozen.checkpoint.files,
        "tasks": digest(_records(splits)),
    }
    for name, value in derived.items():
        if canonical(document[name]) != canonical(value):
            raise Refused(f"{path}: {name} does not follow from the configuration and the checkpoint; prepare a new plan")
    for tree in (frozen.checkpoint, frozen.retention_baseline):
        if tree.digest != digest(tree.files):
            raise Refused(f"{path}: the digest of {tree.path} is not that of its files; prepare a new plan")
    if digest(read(dict, path.parent / TASKS, "the task file")) != frozen.tasks:
        raise Refused(f"{path.parent / TASKS} was altered after it was frozen")
    for name in sorted(os.listdir(path.parent)):
        check_entry(path.parent / name)
    plan = Plan(frozen, splits, path.parent)
    if check_inputs if check_sources is None else check_sources:
        nothing_in_the_way()
        state = frozen.repository
        this = f"this is {ROOT}, the plan was frozen from {state.path} at commit {(state.commit or 'none')[:12]}: start that"
        _unchanged("package source", ROOT, frozen.sources, package_sources(), f"{this}, or prepare a new plan")
        _unchanged("installed trainer module", Path("site-packages"), frozen.trainer, trainer_sources())
        _unchanged("package version of", Path(), frozen.versions, versions())
    if check_inputs:
        for what, tree, linked in (
            ("checkpoint file", frozen.checkpoint, True), ("retention evidence", frozen.retention_baseline, False)
        ):  # fmt: skip
            if not Path(tree.path).is_dir():
                raise Refused(
                    f"{path}: {tree.path} is not to be seen here; a container sees what its configuration's bind_mounts name"
                )
            check_tree(what, tree, linked)
        check_retention(plan)
    return plan


def check_tree(what: str, tree: Tree, linked: bool) -> None:
    """That a folder is as it was frozen; ``linked`` as in :func:`recipe.files.files_below`. Raises :class:`Refused`."""
    _unchanged(what, Path(tree.path), tree.files, tree_digests(real(Path(tree.path)), linked))


def check_retention(plan: Plan) -> None:
    """That the retention baseline can be lost against, and that the plan says what it was recorded under.

    Raises:
        Refused: names what does not fit.
    """
    _check_retention(plan.recorded, plan.config)
    if canonical(_measured(plan.frozen)) != canonical(_deviations(plan.recorded)):
        raise Refused(f"{plan.run / PLAN}: deviations does not follow from the retention baseline; prepare a new plan")


def id_of(document: dict) -> str:
    """The plan id: SHA-256 of all that ``plan.json`` says, but for the id itself and the run's nonce."""
    return digest({key: value for key, value in document.items() if key not in ("plan_id", "nonce")})


def load_run(run: Path, check_inputs: bool = True, check_sources: bool | None = None) -> Plan:
    """The plan of a run folder. Arguments and errors as :func:`load`, but the plan must lie in that very folder."""
    check_entry(run / PLAN)
    return load(run / PLAN, check_inputs, check_sources)


def _measured(frozen: Frozen) -> dict[str, object]:
    """The deviations that the retention baseline was recorded under."""
    return {name: value for name, value in frozen.deviations.items() if name.startswith(MEASURED)}


def _deviations(retention: baseline.RetentionBaseline) -> dict[str, object]:
    return {f"{MEASURED}{name}": value for name, value in baseline.deviations(retention).items()}


def _check_retention(recorded: baseline.RetentionBaseline, config: Config) -> None:
    """That the candidate can be compared with its retention baseline, and can fail to keep up with it."""
    wanted, margin = config.evaluation.precision, config.retention.margin
    items, correct = recorded.counts["items"], recorded.counts["correct"]
    if recorded.precision != wanted:
        raise Refused(
            f"the retention baseline {recorded.folder} was recorded in {recorded.precision}, but evaluation.precision is "
            f"{wanted}; record it with --precision {wanted}"
        )
    has = f"retention.margin={margin:g} points, and the retention baseline {recorded.folder} has"
    if not verdict.can_be_missed(items, correct, margin / 100):
        raise Refused(
            f"retention would be shown whatever happens: {has} {correct} correct of {items} to lose; lower the margin or "
            "record more items"
        )
    if not verdict.can_be_shown(items, margin / 100):
        raise Refused(
            f"retention can never be shown: {has} {items} items, whose interval is wider if not one changes; raise the "
            "margin or record more items"
        )


def _decided(config: Config) -> Decided:
    return verdict.decided(config.tasks.test, config.evaluation.samples_per_task, config.retention.margin)


def _generated(config: Config, trial: Trial | None) -> dict[str, list[Task]]:
    """The splits; a trial's test split is not even drawn."""
    sizes = asdict(config.tasks)
    seed = sizes.pop("seed")
    if trial is not None:
        sizes.pop(TEST)
    return config.rules.family.generate(seed, sizes)


def _records(splits: dict[str, list[Task]]) -> dict[str, list[dict]]:
    return {split: [task.record() for task in tasks] for split, tasks in splits.items()}


def _unchanged(
    what: str, root: Path, frozen: dict[str, str], found: dict[str, str], mend: str = "prepare a new plan"
) -> None:
    for name in sorted(frozen.keys() | found.keys()):
        if frozen.get(name) != found.get(name):
            state = "missing" if name not in found else "new" if name not in frozen else "changed"
            raise Refused(f"{what} {root / name} is {state} since the plan was frozen; {mend}")


def _check_chat(model: Path, splits: dict[str, list[Task]], config: Config) -> None:
    """The raw-span contract on a real task of this plan, and room for every rollout, before anything runs."""
    from recipe.rollout import agent_chat, observations, rollout_context

    settings = configuration.load(model)
    if config.agent.decoder == "engine":
        settings.check_engine("agent.decoder")
    checkpoint.check_settings(model)
    tokenizer = checkpoint.load_tokenizer(model)
    checkpoint.check_vocabulary(tokenizer, settings, model)
    family, task = config.rules.family, splits["train"][0]
    chat = agent_chat(tokenizer, family)
    chat.check(task.messages(), family.example(task))
    chat.check_observations(text for entries in splits.values() for task in entries for text in observations(family, task))
    # Beyond the model's positions TRL cuts a rollout differently, and gives observations loss.
    positions = settings.max_position_embeddings
    context = rollout_context(chat, config.agent, (task for tasks_ in splits.values() for task in tasks_))
    if context > positions:
        raise Refused(
            f"prompts of up to {context - config.agent.max_tokens} tokens and "
            f"agent.max_tokens={config.agent.max_tokens} exceed the checkpoint's {positions} positions; lower "
            "agent.max_tokens"
        )
