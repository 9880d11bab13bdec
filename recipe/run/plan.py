"""What was frozen: everything that a number of this run rests on, by SHA-256, under one plan id.

A run folder begins with two files::

    plan.json     configuration, digests of all inputs and sources, versions, commit; the plan id covers it all
    tasks.json    the three splits, hidden facts included

Every stage loads the plan through :func:`load`, which refuses a changed input and names the file.
"""

import random
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata, util
from pathlib import Path

from recipe.config import Config, build, deviations
from recipe.errors import Refused
from recipe.files import digest, file_digest, tree_digests, write_json
from recipe.mgsm import baseline
from recipe.orders import tasks
from recipe.policy import checkpoint
from recipe.records import read_json
from recipe.run import repository

LAYOUT = 1
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")

# The installed modules that decide what is sampled, scored and optimised.
TRAINER_SOURCES = {
    "trl": (
        "trainer/grpo_trainer.py", "trainer/grpo_config.py", "trainer/base_trainer.py", "trainer/utils.py",
        "chat_template_utils.py", "data_utils.py", "models/utils.py",
    ),
    "transformers": (
        "trainer.py", "trainer_callback.py", "training_args.py", "optimization.py", "tokenization_utils_base.py",
        "cache_utils.py", "generation/utils.py", "generation/logits_process.py", "models/qwen3/modeling_qwen3.py",
    ),
    "peft": ("peft_model.py", "tuners/lora/model.py", "tuners/lora/layer.py"),
    "accelerate": ("accelerator.py",),
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A loaded plan: its document, its splits, and the run folder that it stands in."""

    document: dict
    splits: dict[str, list[tasks.Task]]
    run: Path

    @property
    def id(self) -> str:
        return self.document["plan_id"]

    @property
    def practice(self) -> bool:
        """Whether the checkpoint is a practice one; such a run is never reported as a pilot."""
        return self.document["practice"]

    @cached_property
    def config(self) -> Config:
        return build(Config, self.document["config"])

    @property
    def checkpoint(self) -> Path:
        return Path(self.document["checkpoint"]["path"])

    @property
    def retention_baseline(self) -> Path:
        return Path(self.document["retention_baseline"]["path"])

    @cached_property
    def training_order(self) -> list[tasks.Task]:
        """The tasks that training consumes, in order: a seeded draw without repetition, one group each."""
        grpo = self.config.grpo
        groups = grpo.steps * grpo.batch_size // grpo.num_generations
        return random.Random(f"{grpo.seed}/order").sample(self.splits["train"], groups)

    @property
    def kind(self) -> str:
        """``practice``; ``pilot`` under the default protocol; else ``custom``."""
        if self.practice:
            return "practice"
        return "custom" if self.document["deviations"] else "pilot"


def prepare(
    model: Path,
    recorded: Path,
    config: Config,
    output: Path,
    checkout: Path = ROOT,
    repeated: bool = False,
) -> Plan:
    """Freeze a plan into the new folder ``output``.

    Args:
        checkout: the git checkout whose commit the plan records; this code may be a copy of it without a history.
        repeated: accept an ``output`` that holds this very plan, where a lost machine makes a cluster prepare again.

    Raises:
        Refused: an input that is missing or does not fit, uncommitted sources, or an ``output`` that exists.
    """
    output = Path(output).resolve()
    if output.exists() and not repeated:
        raise Refused(f"the run folder is used already: {output}; choose a new one")
    model = Path(model).resolve()
    identity = checkpoint.identity(model)
    practice = (model / "practice.json").is_file()
    retention = baseline.load(Path(recorded).resolve())
    if retention.checkpoint != identity["digest"]:
        raise Refused(
            f"the retention baseline {retention.folder} was recorded for another checkpoint "
            f"({retention.checkpoint[:12]}…, not {identity['digest'][:12]}…); record one for {model} with "
            "experiments.retention_baseline"
        )
    sizes = asdict(config.tasks)
    splits = tasks.generate(sizes.pop("seed"), sizes)
    _check_chat(model, splits, config)
    sources = package_sources()
    state = repository.state(Path(checkout).resolve(), sources)
    if state["commit"] is None and not practice:
        raise Refused(f"no commit of {state['path']}: the plan records one; prepare from a git checkout, with git installed")
    if state["uncommitted"] and not practice:
        raise Refused(f"{state['uncommitted'][0]} differs from the last commit; commit it, then prepare again")

    records = {split: [task.record() for task in entries] for split, entries in splits.items()}
    document = {
        "layout": LAYOUT,
        "practice": practice,
        "config": asdict(config),
        "deviations": deviations(config),
        "checkpoint": {"path": str(model), **identity},
        "retention_baseline": {"path": str(retention.folder), "files": tree_digests(retention.folder)},
        "tasks": digest(records),
        "sources": sources,
        "trainer": trainer_sources(),
        "versions": versions(),
        "repository": state,
    }
    document["plan_id"] = digest(document)
    if output.exists():
        if not (output / "plan.json").is_file() or read_json(output / "plan.json", "the plan") != document:
            raise Refused(f"the run folder is used already, and not by this plan: {output}; choose a new one")
        return Plan(document, splits, output)
    partial = output.with_name(f".{output.name}.partial")
    write_json(partial / "tasks.json", records)
    write_json(partial / "plan.json", document)
    partial.rename(output)  # a run folder is a whole one
    return Plan(document, splits, output)


def load(path: Path, check_inputs: bool = True) -> Plan:
    """Load a plan and prove that nothing it rests on has changed.

    Raises:
        Refused: another layout version, an altered plan, or a changed input; names the file.
    """
    path = Path(path).resolve()
    document = read_json(path, "the plan")
    if not isinstance(document, dict) or document.get("layout") != LAYOUT:
        found = document.get("layout") if isinstance(document, dict) else None
        raise Refused(f"{path} has layout {found}, this package reads layout {LAYOUT}; prepare a new plan")
    if document.get("plan_id") != digest({key: value for key, value in document.items() if key != "plan_id"}):
        raise Refused(f"{path} was altered after it was frozen; prepare a new plan")
    records = read_json(path.parent / "tasks.json", "the task file")
    if digest(records) != document["tasks"]:
        raise Refused(f"{path.parent / 'tasks.json'} was altered after it was frozen")
    plan = Plan(document, tasks.load(records), path.parent)
    if check_inputs:
        _unchanged("package source", ROOT, document["sources"], package_sources())
        _unchanged("installed trainer module", Path("site-packages"), document["trainer"], trainer_sources())
        _unchanged("package version of", Path(), document["versions"], versions())
        _unchanged("checkpoint file", plan.checkpoint, document["checkpoint"]["files"], tree_digests(plan.checkpoint))
        recorded = document["retention_baseline"]["files"]
        _unchanged("retention evidence", plan.retention_baseline, recorded, tree_digests(plan.retention_baseline))
    return plan


def _unchanged(what: str, root: Path, frozen: dict[str, str], found: dict[str, str]) -> None:
    for name in sorted(frozen.keys() | found.keys()):
        if frozen.get(name) != found.get(name):
            state = "missing" if name not in found else "new" if name not in frozen else "changed"
            raise Refused(f"{what} {root / name} is {state} since the plan was frozen; prepare a new plan")


def package_sources() -> dict[str, str]:
    """Digests of this package's own code, by path below the repository root."""
    folders = ("recipe", "experiments")
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): file_digest(path) for path in paths}


def trainer_sources() -> dict[str, str]:
    """Digests of the installed modules in :data:`TRAINER_SOURCES`, found without importing them."""
    found = {}
    for package, names in TRAINER_SOURCES.items():
        spec = util.find_spec(package)
        if spec is None:
            raise Refused(f"{package} is not installed; see the README for the two environments")
        root = Path(spec.origin).parent
        for name in names:
            if (root / name).is_file():
                found[f"{package}/{name}"] = file_digest(root / name)
    return found


def versions() -> dict[str, str]:
    """Version of Python (major.minor) and of every package that takes part."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise Refused(f"{package} is not installed; see the README for the two environments") from None
    return found


def _check_chat(model: Path, splits: dict[str, list[tasks.Task]], config: Config) -> None:
    """The raw-span contract on a real task of this plan, and room for every rollout, before anything runs."""
    from recipe.policy import agent_chat, rollout_context

    chat = agent_chat(checkpoint.load_tokenizer(model))
    task = splits["train"][0]
    chat.check(task.messages(), f'{{"menge": {task.quantity}, "einzelpreis": {task.unit_price}}}')
    # Beyond the model's positions TRL cuts a rollout differently, and gives observations loss.
    positions = read_json(model / "config.json", "the checkpoint's configuration").get("max_position_embeddings", 0)
    context = rollout_context(chat, config.agent, (task for tasks_ in splits.values() for task in tasks_))
    if context > positions:
        raise Refused(
            f"prompts of up to {context - config.agent.max_tokens} tokens and "
            f"agent.max_tokens={config.agent.max_tokens} exceed the checkpoint's {positions} positions; lower "
            "agent.max_tokens"
        )
