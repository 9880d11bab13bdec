"""Every setting that a number depends on: defined once, typed, on its narrowest owner.

:func:`resolve` turns a user's YAML into a :class:`Config`; the plan freezes the result whole.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from recipe.errors import Refused
from recipe.policy import PRECISIONS, Sampling, decoder_choice
from recipe.records import read_yaml
from recipe.settings import build, differences, one_of, or_zero, up_to
from recipe.task import FAMILIES, family
from recipe.task.family import Family


@dataclass(frozen=True)
class Agent:
    """The protocol of a rollout, the same in training and evaluation."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 768  # of the completion, observations and glue included
    max_tool_iterations: int = 3
    decoder: str = decoder_choice()
    seed: int = or_zero(42)


@dataclass(frozen=True)
class Grpo:
    """Optimisation. Whatever TRL or transformers would default to is stated when it matters."""

    steps: int = 32
    num_generations: int = 4  # rollouts a group
    batch_size: int = 4  # rollouts an optimizer step, so one task a step
    learning_rate: float = 1e-5
    lr_schedule: str = one_of("constant", "linear", "cosine")
    warmup_steps: int = or_zero(0)
    kl: float = or_zero(0.02)  # beta; the reference is the starting checkpoint with the adapter disabled
    loss_type: str = one_of("dapo", "grpo", "bnpo", "dr_grpo")  # token-level sum over the step's policy tokens
    scale_rewards: str = one_of("group", "batch", "none")  # advantages divided by the group's standard deviation
    clip: float = 0.2  # epsilon; without effect while strictly on-policy, where the ratio is 1
    max_grad_norm: float = 1.0
    optimizer: str = one_of("adamw_torch", "adamw_torch_fused")
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = or_zero(0.0)
    lora_rank: int = 16
    lora_alpha: int = 32
    gradient_checkpointing: bool = True
    checkpoint_every: int = or_zero(8)  # steps between checkpoints to resume from; 0: only when paused
    validation_every: int = or_zero(8)  # steps between evaluations on the development split, from step 0; 0: none
    validation_samples: int = up_to(1_000, 4)  # rollouts a development task: for a curve, no verdict
    # Which step's adapter becomes the candidate. The last one is fixed before anything is seen, so that the training is
    # measured as it was planned; and 32 tasks hardly tell a pilot's four checkpoints apart, so that a choice among them
    # would follow their noise. `development` is for a training so long that it may get worse again.
    select: str = one_of("last", "development")
    # A step whose group has equal rewards teaches nothing but KL. With `resample` a step samples several tasks' groups
    # in one batch of the engine and trains on the first mixed one, or, if none is, on the first. Off by default: it
    # chooses tasks by what the policy makes of them, so that training sees those more often of which it is unsure.
    resample: bool = False
    resample_tasks: int = up_to(64, 4)  # tasks a step then has to choose from, frozen; 32 steps need the 128 there are
    # How far, in nats a token, the engine's log-probabilities may lie from the trainer's: the mean over all tokens of
    # the run, and the largest of the steps' 99.9 % quantiles. In BF16 on an H200 they were 0.014 on average and 0.08 at
    # most (a 0.6B of random weights, tools/bench/rollout_h200.json), in float32 on a CPU below 1e-4. The bounds are
    # three and six times that: room for other models. A sampler of another temperature lies beyond; weights that are a
    # small step behind do not, which drawing the tokens again tells (recipe.verify.sampling).
    max_gap_mean: float = 0.05
    max_gap_quantile: float = 0.5
    seed: int = or_zero(42)

    @property
    def candidates(self) -> int:
        """Tasks that are drawn for a group, one of which it is of."""
        return self.resample_tasks if self.resample else 1


@dataclass(frozen=True)
class Evaluation:
    """Measurements. ``precision`` is that of the weights when baseline, candidate and retention are measured.

    It is float32 because the starting weights lie on BF16's grid and an update of a pilot's size is smaller than that
    grid's spacing: loaded as BF16, the candidate would be the baseline again.

    With 16 samples a task, 32 tasks detect a gain of 10 points with 80 % power, with one sample of 35
    (:mod:`recipe.statistics.design`). Beyond that it is more tasks that help.
    """

    precision: str = one_of("float32", "bfloat16")
    samples_per_task: int = up_to(1_000, 16)
    batch_size: int = 32


@dataclass(frozen=True)
class Merge:
    """Largest mean KL divergence (nats a token) of the merged policy from base + adapter, on frozen inputs."""

    max_kl: float = 1e-3


@dataclass(frozen=True)
class Retention:
    """The loss of solved items that is tolerable, in points: hundredths of the items.

    Retention is shown where the whole interval of the loss lies below it; with 64 items that takes 6 at the least.
    """

    margin: float = 10.0


@dataclass(frozen=True)
class Tasks:
    """Sizes of the splits and the seed that they are drawn from."""

    seed: int = or_zero(20_260)
    train: int = up_to(100_000, 128)
    development: int = up_to(100_000, 32)
    test: int = up_to(100_000, 32)


@dataclass(frozen=True)
class Rules:
    """What a rollout is played by."""

    family: Family
    agent: Agent
    weights: object  # of the family's training reward


@dataclass(frozen=True)
class Config:
    """The whole of it. ``precision`` is that of the base weights in training; the adapter is always float32.

    ``reward`` has the fields of the family's own ``weights``, and the family's ``defaults`` stand in for those here.
    """

    task: str = one_of(*FAMILIES)
    reward: object = None
    tasks: Tasks = field(default_factory=Tasks)
    agent: Agent = field(default_factory=Agent)
    grpo: Grpo = field(default_factory=Grpo)
    evaluation: Evaluation = field(default_factory=Evaluation)
    merge: Merge = field(default_factory=Merge)
    retention: Retention = field(default_factory=Retention)
    precision: str = one_of(*PRECISIONS)
    deterministic: bool = True  # sums in a fixed order (recipe.determinism): the same bytes on the same machine

    @property
    def rules(self) -> Rules:
        return Rules(family(self.task), self.agent, self.reward)


def read(path: Path | None) -> dict | None:
    """Overrides from a YAML file; None without one."""
    return None if path is None else read_yaml(dict | None, path, "the configuration")


def resolve(overrides: dict | None) -> Config:
    """Config from nested overrides of the defaults.

    Raises:
        Refused: an unknown key (named, with the known ones), a wrong type, or a value out of range.
    """
    config = complete({} if overrides is None else overrides)
    grpo = config.grpo
    if grpo.batch_size % grpo.num_generations:
        raise Refused("configuration: grpo.batch_size must be a multiple of grpo.num_generations")
    if grpo.num_generations < 2:
        raise Refused("configuration: grpo.num_generations must be at least 2: a group of one has no advantage")
    if grpo.steps * grpo.batch_size // grpo.num_generations * grpo.candidates > config.tasks.train:
        tried = f" with grpo.resample_tasks={grpo.resample_tasks}" if grpo.resample else ""
        raise Refused(
            f"configuration: grpo.steps={grpo.steps}{tried} needs more than the tasks.train={config.tasks.train} "
            "tasks; a task is trained on at most once"
        )
    if grpo.resample and (grpo.batch_size != grpo.num_generations or config.agent.decoder != "engine"):
        raise Refused(
            "configuration: grpo.resample takes one group a step (grpo.batch_size = grpo.num_generations) and "
            "agent.decoder: engine, whose rollouts are the same however many are sampled at once"
        )
    if grpo.resample and grpo.resample_tasks < 2:
        raise Refused("configuration: grpo.resample takes at least 2 grpo.resample_tasks to choose from")
    if grpo.select == "development":
        validations = grpo.steps // grpo.validation_every if grpo.validation_every else 0
        if validations < 2:
            raise Refused(
                f"configuration: grpo.select=development has {validations} validated steps to choose from, fewer "
                f"than 2; set grpo.validation_every to at most half of grpo.steps={grpo.steps}"
            )
        if config.tasks.development < 2:
            raise Refused("configuration: grpo.select=development needs at least 2 tasks in tasks.development")
    if config.retention.margin >= 100:
        raise Refused(f"configuration: retention.margin is in points and below 100, not {config.retention.margin}")
    return config


def complete(values: dict) -> Config:
    """Config of plain values over the defaults, those of its family included. Raises as :func:`resolve` does."""
    if not isinstance(values, dict):
        raise Refused("configuration: the file must be a mapping")
    name = build(Config, {key: value for key, value in values.items() if key == "task"}).task
    chosen = family(name)
    merged = {**chosen.defaults, **values}
    for owner in chosen.defaults.keys() & values.keys():
        if isinstance(values[owner], dict):
            merged[owner] = {**chosen.defaults[owner], **values[owner]}
    weights = build(chosen.weights, merged.pop("reward", {}), "reward.")
    return replace(build(Config, merged), reward=weights)


def deviations(config: Config) -> dict[str, object]:
    """Settings that differ from the defaults of its family, as ``{"grpo.steps": 8}``."""
    return differences(asdict(config), asdict(complete({"task": config.task})))
