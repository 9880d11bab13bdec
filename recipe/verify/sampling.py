"""Who sampled: every recorded token is drawn again from the checkpoint that is said to have drawn it.

The number that draws a token is a function of (seed, item, sample) and of how many tokens the item's policy drew
before (:class:`recipe.policy.decoding.RandomStream`). So a checkpoint, an item and a seed have one rollout, and no more
than the checkpoint is needed to tell it from any other: one forward pass over the recorded ids gives the distribution
at every place of the policy's own, the decoder's processors are applied to it, and the recorded token must be the one
on which its number falls.

What is proved, each by the weights that are claimed::

    baseline, retention before     the starting checkpoint
    candidate, retention after     merge/checkpoint
    validation 0                   the starting checkpoint in the precision of training
    validation N                   the same, with the adapter of step N
    training 1                     the starting checkpoint as it is: a new adapter adds nothing
    training N+1                   with the adapter of step N, wherever that was kept (see :func:`training_steps`)

**Verdicts.** *Matched*: the number lies in the token's interval of the cumulative distribution as computed here.
Another device or another batch rounds otherwise, and moves intervals and the edges of top-k, top-p and min-p a little.
*Undecided*: some logits within :data:`BOUND` of those computed here draw the token; :func:`recipe.verify.draws.explains` says
which tokens those keep for certain and which perhaps, and how far the interval's ends can move. *Contradicted*: none do. A claim
holds while both stay within their allowed shares (:func:`check`).

**What it shows.** The records are what these weights draw under the frozen seed, up to the undecided. A text that is
fixed before the numbers are known (typed by hand, or the gold answer) passes with the probability that the checkpoint
gives it, at most the product of the largest ones: for the practice policy, which is nearly sure of all it says, e^-1.4
a rollout and e^-44 for its 32. Whoever knows the numbers but samples with other weights passes wherever the two
cumulative distributions agree around them: nearly always where both are sure, so that weights which hardly differ
are told apart by many tokens alone. The practice candidate contradicts 14 of the 32 baseline rollouts: a rollout alone
proves little, an evaluation much. Whoever has the claimed weights can choose only where the bound leaves a choice (at
none of the practice baseline's 1,567 tokens in float32, at 2.6 % under BF16's bound), and only as often as may be
undecided.

**What it cannot show.** That the weights were trained as recorded, and that they are older than the records: weights
may be made for what is to be claimed. That the seed was not chosen, or a plan not run under many seeds before one was
kept: each gives honest draws. How often something was repeated: every repetition draws the same. Training under
``agent.decoder: native``, where TRL's ``generate`` draws from the ambient generator, and training steps before which no
adapter was kept: only running them again shows those.

**Beside the literature.** TOPLOC (Ong et al. 2025, arXiv:2501.16007) has the sampling side record a digest of its
activations, 258 bytes for 32 tokens, and compares it with those of a prefill. It needs no shared randomness and sees
other weights or another precision even where the text would be the same; that a token was drawn fairly from the
distribution it does not show. Here nothing is recorded in addition, because the streams are frozen: the tokens are the
commitment and the draw itself is proved, but weights that draw the same tokens are the same to it. That is the idea of
Token-DiFR (Karvonen et al. 2025, arXiv:2511.20621), which scores the divergence from a reference under a shared seed;
here each draw has a verdict under a stated bound, since nearly all are exact.

It is for records that the replay has accepted (:mod:`recipe.verify.replay`): that a record is whole, that its prompt is
its task's, and that nothing goes on after an end token is shown there and not here.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.errors import CheckFailed, one_line
from recipe.mgsm import baseline
from recipe.mgsm.baseline import Output
from recipe.policy import Sampling, checkpoint
from recipe.policy.chat import Chat
from recipe.policy.decoding import RandomStream
from recipe.records import read_lines
from recipe.run.evidence import (
    ROLLOUTS,
    STEPS,
    TRAINER,
    VALIDATION,
    Evaluated,
    RolloutRecord,
    read_rollouts,
    read_step,
    step_name,
    validation_name,
)
from recipe.run.plan import Plan
from recipe.training.adapter import WEIGHTS
from recipe.training.protocol import kept, validated
from recipe.verify.draws import redraw

if TYPE_CHECKING:
    import numpy as np

# How far a logit may lie from the one computed here, by the type of the weights. Float32: on a CPU, token by token and
# a batch at once differ by 3e-5 at most, with 3 layers and with 28; another device sums in another order, no coarser.
# BF16: two of its spacings between 16 and 32, where the largest logits of a Qwen3 lie. Token by token and a batch at
# once differ by up to 0.125, which is two spacings below 16; the draws themselves needed 0.035.
BOUND = {"float32": 1e-3, "bfloat16": 0.25}
# What is allowed is what a forger who has the weights may steer: one token can turn a rollout. Undecided tokens, as a
# share of a claim's and at least one. In float32 honest samples had none in 37,000. In BF16 the practice policy's
# rollouts had up to 2 in 1,000, and a text of which it is unsure, at temperature 1, 5 in 270.
UNDECIDED = {"float32": 0.002, "bfloat16": 0.05}
# Contradicted tokens, as a share of a claim's, so that a small claim has none. Float32 has no outliers. In BF16 a deep
# model's large activations are now and then rounded another way; practice policies had none in 62,000 tokens, on a CPU
# and on an H200, and other weights 1 in 1,000 and more. Beyond FAR times the bound none is allowed in either.
CONTRADICTED = {"float32": 0.0, "bfloat16": 0.0004}
FAR = 4

TOKENS = 1 << 13  # of a forward pass, padding included
LOGITS = 1 << 24  # looked at together: 110 places of Qwen3's vocabulary


@dataclass(frozen=True)
class Drawn:
    """What became of one claim's tokens. ``tokens`` = ``matched`` + ``undecided`` + ``contradicted``.

    ``foreign`` of the contradicted ones are not drawn within :data:`FAR` times the bound either. ``distance`` is the
    largest difference of logits that an undecided token needed; ``first`` names the first contradicted token.
    """

    tokens: int
    matched: int
    undecided: int
    contradicted: int
    foreign: int
    rollouts: int
    contradicted_rollouts: int
    distance: float
    precision: str
    first: str | None

    def possible(self) -> bool:
        """Whether these can be the counts of one claim."""
        none = self.contradicted == 0
        return (
            self.precision in BOUND
            and min(self.matched, self.undecided, self.foreign) >= 0
            and self.matched + self.undecided + self.contradicted == self.tokens
            and self.foreign <= self.contradicted
            and (not none) <= self.contradicted_rollouts <= min(self.contradicted, self.rollouts)
            and (self.first is None) == none
            and 0 <= self.distance <= BOUND[self.precision] * (self.undecided > 0)
        )


@dataclass(frozen=True)
class Row:
    """One conversation: all its ids, the places of the policy's own, and the number that drew each of those."""

    name: str
    ids: list[int]
    places: list[int]
    numbers: "np.ndarray"


@dataclass(frozen=True)
class Policy:
    """A ``Qwen3ForCausalLM``, the type that its weights were loaded in, and whether an adapter lies on them."""

    model: object
    precision: str
    adapted: bool = False

    def as_sampled(self):
        """The context that it sampled in: accelerate's autocast, which the decoding engine computes adapters like."""
        import torch

        mixed = self.adapted and self.precision == "bfloat16"
        return torch.autocast(self.model.device.type, torch.bfloat16) if mixed else nullcontext()


def prove(plan: Plan, told: Callable[[], object] = lambda: None) -> dict[str, Drawn]:
    """Draw again all that a finished run sampled from streams, by claim; ``told`` is called after each rollout.

    Raises:
        CheckFailed: records that are no rollouts of the model's, an adapter that is none of the plan's, or logits that
            are not numbers; names them. What the tokens say is for :func:`check`.
    """
    merged, outputs = plan.run / "merge" / "checkpoint", plan.run / "retention" / baseline.OUTPUTS
    answered = read_lines(Output, outputs, "the candidate's retention outputs")
    return {
        **_evaluated(plan, plan.checkpoint, "baseline", ("retention before", plan.recorded.outputs), told),
        **_evaluated(plan, merged, "candidate", ("retention after", answered), told),
        **trained(plan, told),
    }


def check(found: dict[str, Drawn]) -> None:
    """Hold every claim against the allowed shares.

    Raises:
        CheckFailed: names the claim, the counts, and the first token that the checkpoint does not draw.
    """
    for name, drawn in found.items():
        allowed = {
            "foreign": 0,
            "contradicted": int(CONTRADICTED[drawn.precision] * drawn.tokens),
            "undecided": max(1, int(UNDECIDED[drawn.precision] * drawn.tokens)),
        }
        for what, most in allowed.items():
            if (count := getattr(drawn, what)) > most:
                first = f"; the first is {drawn.first}" if drawn.first else ""
                spread = f"contradicted in {drawn.contradicted_rollouts} of {drawn.rollouts} rollouts"
                raise CheckFailed(
                    f"sampling: {name}: the checkpoint does not draw this, {spread}: {count} of {drawn.tokens} tokens "
                    f"are {what}, at most {most} may be{first}"
                )


def claims(plan: Plan) -> dict[str, dict]:
    """``tokens``, ``rollouts`` and ``precision`` of each claim of a finished run, by its records and its plan."""

    def sampled(records: Sequence[RolloutRecord]) -> tuple[int, int]:
        return sum(len(span) for record in records for span in record.spans), len(records)

    grpo, folder = plan.config.grpo, plan.run / "grpo"
    answered = read_lines(Output, plan.run / "retention" / baseline.OUTPUTS, "the candidate's retention outputs")
    found: dict[str, tuple[int, int]] = {}
    for stage, name, outputs in (
        ("baseline", "retention before", plan.recorded.outputs), ("candidate", "retention after", answered),
    ):  # fmt: skip
        found[stage] = sampled(read_rollouts(plan.run / stage / ROLLOUTS, f"the rollouts of stage {stage}"))
        found[name] = sum(len(output.ids) for output in outputs), len(outputs)
    for step in range(grpo.steps + 1):
        if step in validated(grpo):
            path = folder / VALIDATION / validation_name(step)
            found[f"validation {step}"] = sampled(read_rollouts(path, "a validation"))
        if step + 1 in training_steps(plan):
            found[f"training {step + 1}"] = sampled(read_step(folder / STEPS / step_name(step + 1)).sampled)
    trained = {name for name in found if name.startswith(("validation", "training"))}
    measured = plan.config.evaluation.precision
    return {
        name: {"tokens": tokens, "rollouts": rollouts, "precision": plan.config.precision if name in trained else measured}
        for name, (tokens, rollouts) in found.items()
    }


def training_steps(plan: Plan) -> list[int]:
    """The training steps that can be proved: those that follow known weights, with streams of their own."""
    if plan.config.agent.decoder != "engine":
        return []
    grpo = plan.config.grpo
    return [1, *(step + 1 for step in kept(grpo) if step < grpo.steps)]


def _evaluated(plan: Plan, path: Path, stage: str, retention: tuple[str, Sequence[Output]], told) -> dict[str, Drawn]:
    """An agent evaluation and a retention evaluation of the checkpoint at ``path``."""
    precision, (retained, outputs) = plan.config.evaluation.precision, retention
    policy = Policy(checkpoint.load_model(path, precision, checkpoint.device()), precision)
    records = read_rollouts(plan.run / stage / ROLLOUTS, f"the rollouts of stage {stage}")
    answers = _answers(plan.recorded, Chat(checkpoint.load_tokenizer(path)), outputs, retained)
    return {
        stage: weigh(policy, _samples(plan, records, stage), plan.config.agent.sampling, told),
        retained: weigh(policy, answers, plan.recorded.protocol.sampling, told),
    }


def trained(plan: Plan, told: Callable[[], object] = lambda: None) -> dict[str, Drawn]:
    """Validations and training steps, in the order in which they were sampled. Raises as :func:`prove`."""
    grpo, folder, sampling = plan.config.grpo, plan.run / "grpo", plan.config.agent.sampling
    due, proved = validated(grpo), training_steps(plan)
    found: dict[str, Drawn] = {}
    if not due and not proved:
        return found

    from peft import get_peft_model

    from recipe.grpo import lora

    def validation(step: int, policy: Policy) -> None:
        name, path = f"validation {step}", folder / VALIDATION / validation_name(step)
        found[name] = weigh(policy, _samples(plan, read_rollouts(path, "a validation"), name), sampling, told)

    def training(step: int, policy: Policy) -> None:
        name, records = f"training {step}", read_step(folder / STEPS / step_name(step)).sampled
        numbers = [place % grpo.num_generations for place in range(len(records))]
        found[name] = weigh(policy, _rollouts(plan, records, numbers, name), sampling, told)

    base = checkpoint.load_model(plan.checkpoint, plan.config.precision, checkpoint.device())
    untrained = Policy(base, plan.config.precision)
    if due:
        validation(0, untrained)
    if proved:
        training(1, untrained)
    tuned = get_peft_model(base, lora(grpo)).eval()  # its layers are put into ``base`` itself
    policy = Policy(base, plan.config.precision, adapted=True)
    for step in range(1, grpo.steps + 1):
        if step not in due and step + 1 not in proved:
            continue
        where = folder / TRAINER / f"checkpoint-{step}" if step in kept(grpo) else folder / "adapter"
        adapt(tuned, where / WEIGHTS)
        if step in due:
            validation(step, policy)
        if step + 1 in proved:
            training(step + 1, policy)
    return found


def adapt(tuned, path: Path) -> None:
    """Put the adapter in a file into a PEFT model.

    Raises:
        CheckFailed: it is no adapter of this form.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckFailed(f"sampling: {path} is not to be read as an adapter: {one_line(error)}") from error
    wanted, found = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (get_peft_model_state_dict(tuned), weights)
    )
    if found != wanted:  # PEFT would leave those of the step before in place
        name = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise CheckFailed(f"sampling: {path} is no adapter of this plan: {name[:120]} is missing, unknown or misshapen")
    set_peft_model_state_dict(tuned, weights)


def _samples(plan: Plan, records: Sequence[Evaluated], where: str) -> list[Row]:
    return _rollouts(plan, records, [record.sample for record in records], where)


def _rollouts(plan: Plan, records: Sequence[RolloutRecord], samples: Sequence[int], where: str) -> list[Row]:
    rows = []
    for number, (record, sample) in enumerate(zip(records, samples, strict=True)):
        places = [place for place, own in enumerate(record.mask, len(record.prompt_ids)) if own]
        numbers = RandomStream(plan.config.agent.seed, record.task_id, sample).ahead(len(places))
        rows.append(Row(f"{where} record {number} ({record.task_id})", record.prompt_ids + record.ids, places, numbers))
    return rows


def _answers(run: baseline.RetentionBaseline, chat: Chat, outputs: Sequence[Output], where: str) -> list[Row]:
    if [output.id for output in outputs] != [item.id for item in run.items]:
        raise CheckFailed(f"sampling: {where}: the outputs are not those of the retention baseline's items")
    rows = []
    for item, output in zip(run.items, outputs):
        prompt = chat.prompt(run.protocol.messages(item.question))
        numbers = RandomStream(run.protocol.seed, item.id, 0).ahead(len(output.ids))
        places = list(range(len(prompt), len(prompt) + len(output.ids)))
        rows.append(Row(f"{where} {item.id}", prompt + output.ids, places, numbers))
    return rows


def weigh(policy: Policy, rows: Sequence[Row], sampling: Sampling, told: Callable[[], object] = lambda: None) -> Drawn:
    """Draw every token of ``rows`` again. Raises as :func:`prove`."""
    vocabulary = policy.model.config.vocab_size
    for row in rows:
        if not row.places or not 0 < row.places[0] <= row.places[-1] < len(row.ids):
            raise CheckFailed(f"sampling: {row.name} is no rollout: nothing in it was sampled after a prompt")
        if not 0 <= min(row.ids) <= max(row.ids) < vocabulary:
            raise CheckFailed(f"sampling: {row.name} holds an id outside the model's vocabulary of {vocabulary}")
    bound, counts, distance = BOUND[policy.precision], Counter(), 0.0
    first: dict[int, int] = {}
    for batch, *verdicts in _verdicts(policy, rows, sampling, bound):
        for number, exact, needed in zip(batch, *verdicts):
            outside = needed > bound
            counts += Counter(
                tokens=len(exact),
                matched=int(exact.sum()),
                undecided=int((~exact & ~outside).sum()),
                contradicted=int(outside.sum()),
                foreign=int(needed.isinf().sum()),
                contradicted_rollouts=int(outside.any()),
            )
            distance = max(distance, float(needed.masked_fill(outside, 0.0).max()))
            if outside.any():
                first[number] = int(outside.nonzero()[0])
            told()
    named = min(first, default=None)
    return Drawn(
        tokens=counts["tokens"],
        matched=counts["matched"],
        undecided=counts["undecided"],
        contradicted=counts["contradicted"],
        foreign=counts["foreign"],
        rollouts=len(rows),
        contradicted_rollouts=counts["contradicted_rollouts"],
        distance=distance,
        precision=policy.precision,
        first=None if named is None else f"{rows[named].name}, its sampled token {first[named]}",
    )


def _verdicts(policy: Policy, rows: Sequence[Row], sampling: Sampling, bound: float) -> Iterator[tuple]:
    """(numbers of rows, verdicts of each, differences of each), as :func:`redraw` gives them, batch by batch."""
    import torch

    model, size = policy.model, max(1, LOGITS // policy.model.config.vocab_size)
    for batch in _batches(rows):
        width = len(rows[batch[0]].ids)
        # Padding stands behind a row, where no token of it looks; logits are made for the policy's own places alone.
        ids = torch.tensor([rows[number].ids + [0] * (width - len(rows[number].ids)) for number in batch])
        row = torch.tensor([place for place, number in enumerate(batch) for _ in rows[number].places])
        place = torch.tensor([place for number in batch for place in rows[number].places])
        uniform = torch.cat([torch.from_numpy(rows[number].numbers) for number in batch])
        parts = []
        with torch.inference_mode(), policy.as_sampled():
            hidden = model.model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
            hidden = hidden[row.to(model.device), place.to(model.device) - 1]
            for part, drawn, numbers in zip(hidden.split(size), ids[row, place].split(size), uniform.split(size)):
                logits = model.lm_head(part).float()
                if not torch.isfinite(logits).all():
                    raise CheckFailed("sampling: the model's logits are not finite: its weights are broken")
                drawn, numbers = drawn.to(logits.device), numbers.to(logits.device)
                verdicts = redraw(logits, drawn, numbers, sampling, FAR * bound)
                parts.append([verdict.cpu() for verdict in verdicts])
        lengths = [len(rows[number].places) for number in batch]
        yield batch, *(torch.cat(verdicts).split(lengths) for verdicts in zip(*parts))


def _batches(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Numbers of rows of similar length, the longest first."""
    batch: list[int] = []
    for number in sorted(range(len(rows)), key=lambda number: -len(rows[number].ids)):
        if batch and (len(batch) + 1) * len(rows[batch[0]].ids) > TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
