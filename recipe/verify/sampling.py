"""Who sampled: every recorded token drawn again from the checkpoint that is said to have drawn it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.errors import CheckFailed, one_line
from recipe.mgsm import baseline
from recipe.mgsm.baseline import Output
from recipe.policy import Sampling, checkpoint
from recipe.policy.chat import Chat
from recipe.policy.decoding import RandomStream, warpers
from recipe.records import read_lines
from recipe.run.evidence import (
    ROLLOUTS,
    STEPS,
    VALIDATION,
    RolloutRecord,
    read_rollouts,
    read_step,
    step_name,
    validation_name,
)
from recipe.run.plan import Plan

if TYPE_CHECKING:
    import numpy as np

BOUND = {"float32": 1e-3, "bfloat16": 0.25}
UNDECIDED = {"float32": 0.005, "bfloat16": 0.1}
CONTRADICTED = {"float32": 0.0, "bfloat16": 0.01}

TOKENS = 1 << 13  # of a forward pass, padding included
NUMBERS = 1 << 24  # logits that are looked at together: 110 places of Qwen3's vocabulary


@dataclass(frozen=True)
class Drawn:
    tokens: int
    matched: int
    undecided: int
    contradicted: int
    rollouts: int
    rollouts_contradicted: int
    distance: float
    precision: str
    first: str | None


@dataclass(frozen=True)
class Row:
    """A conversation: all its ids, the places of the policy's own among them, and the number that drew each."""

    name: str
    ids: list[int]
    places: list[int]
    numbers: "np.ndarray"


def prove(plan: Plan, told: Callable[[], object] = lambda: None) -> dict[str, Drawn]:
    config = plan.config
    precision = config.evaluation.precision
    merged = plan.run / "merge" / "checkpoint"
    path = plan.run / "retention" / baseline.OUTPUTS
    after = read_lines(Output, path, "the candidate's retention outputs")
    sides = (
        ("baseline", "retention before", plan.checkpoint, plan.recorded.outputs),
        ("candidate", "retention after", merged, after),
    )
    found = {}
    for evaluated, retained, path, outputs in sides:
        model = checkpoint.load_model(path, precision, checkpoint.device())
        policy = Policy(model, precision)
        rows = _evaluated(plan, read_rollouts(plan.run / evaluated / ROLLOUTS, f"the rollouts of stage {evaluated}"), evaluated)
        found[evaluated] = weigh(policy, rows, config.agent.sampling, told)
        rows = _answered(plan, path, outputs, retained)
        found[retained] = weigh(policy, rows, plan.recorded.protocol.sampling, told)
        del model, policy
    return found | _trained(plan, told)


def _trained(plan: Plan, told) -> dict[str, Drawn]:
    from peft import get_peft_model

    from recipe.grpo import lora
    from recipe.training.checkpoints import ADAPTER, TRAINER, scheduled

    config, folder = plan.config, plan.run / "grpo"
    grpo, sampling, engine = config.grpo, config.agent.sampling, config.agent.decoder == "engine"
    base = checkpoint.load_model(plan.checkpoint, config.precision, checkpoint.device())
    found = {}

    def training(step: int, policy: Policy) -> None:
        records = read_step(folder / STEPS / step_name(step)).rollouts
        streams = [RandomStream(config.agent.seed, r.task_id, n % grpo.num_generations) for n, r in enumerate(records)]
        found[f"training {step}"] = weigh(policy, _rollouts(records, streams, f"training {step}"), sampling, told)

    if engine:
        training(1, Policy(base, config.precision))
    tuned = get_peft_model(base, lora(grpo)).eval()
    policy = Policy(base, config.precision, adapted=True)
    for step in (*scheduled(grpo), grpo.steps):
        last = step == grpo.steps
        validated = grpo.validation_every and step % grpo.validation_every == 0
        if not validated and (last or not engine):
            continue
        put(tuned, (folder / "adapter" if last else folder / TRAINER / f"checkpoint-{step}") / ADAPTER)
        if validated:
            records = read_rollouts(folder / VALIDATION / validation_name(step), "a validation")
            name = f"validation {step}"
            found[name] = weigh(policy, _evaluated(plan, records, name), sampling, told)
        if engine and not last:
            training(step + 1, policy)
    return found


def put(tuned, path: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckFailed(f"sampling: {path} is no adapter ({one_line(error)})") from error

    def shapes(tensors) -> dict:
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    if shapes(weights) != shapes(get_peft_model_state_dict(tuned)):
        raise CheckFailed(f"sampling: {path} is no adapter of this plan: its tensors have other names or shapes")
    set_peft_model_state_dict(tuned, weights)


def _evaluated(plan, records, where) -> list[Row]:
    streams = [RandomStream(plan.config.agent.seed, record.task_id, record.sample) for record in records]
    return _rollouts(records, streams, where)


def _rollouts(records, streams, where) -> list[Row]:
    rows = []
    for number, (record, stream) in enumerate(zip(records, streams)):
        places = [place for place, own in enumerate(record.mask, len(record.prompt_ids)) if own]
        name = f"{where} record {number} ({record.task_id})"
        rows.append(Row(name, record.prompt_ids + record.ids, places, stream.ahead(len(places))))
    return rows


def _answered(plan, path, outputs, where) -> list[Row]:
    run = plan.recorded
    chat = Chat(checkpoint.load_tokenizer(path))
    rows = []
    for item, output in zip(run.items, outputs, strict=True):
        prompt = chat.prompt(run.protocol.messages(item.question))
        stream = RandomStream(run.protocol.seed, item.id, 0)
        places = list(range(len(prompt), len(prompt) + len(output.ids)))
        rows.append(Row(f"{where} {item.id}", prompt + output.ids, places, stream.ahead(len(places))))
    return rows


class Policy:
    def __init__(self, model, precision: str, adapted: bool = False):
        self.model, self.precision, self.adapted = model, precision, adapted

    def autocast(self):
        import torch

        if not (self.adapted and self.precision == "bfloat16"):
            return nullcontext()
        return torch.autocast(self.model.device.type, torch.bfloat16)


def weigh(policy: Policy, rows: Sequence[Row], sampling: Sampling, told) -> Drawn:
    import torch

    bound = BOUND[policy.precision]
    model = policy.model
    vocabulary, device = model.config.vocab_size, model.device
    verdicts = {}
    for row in rows:
        if not row.places or row.places[0] < 1 or row.places[-1] >= len(row.ids):
            raise CheckFailed(f"sampling: {row.name}: is no rollout")
        if not all(0 <= token < vocabulary for token in row.ids):
            raise CheckFailed(f"sampling: {row.name}: holds a token that is not of the model's vocabulary of {vocabulary}")
    size = max(1, NUMBERS // vocabulary)
    for batch in batches(rows):
        width = max(len(row.ids) for row in batch)
        with torch.inference_mode(), policy.autocast():
            ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in batch], device=device)
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            of = torch.tensor([number for number, row in enumerate(batch) for _ in row.places], device=device)
            at = torch.tensor([place for row in batch for place in row.places], device=device)
            hidden, tokens = hidden[of, at - 1], ids[of, at]
            numbers = torch.tensor([u for row in batch for u in row.numbers.tolist()], dtype=torch.float64, device=device)
            parts = []
            for part in zip(hidden.split(size), tokens.split(size), numbers.split(size)):
                logits = model.lm_head(part[0]).float()
                if not torch.isfinite(logits).all():
                    raise CheckFailed("sampling: the model's logits are not finite")
                parts.append(distances(logits, *part[1:], sampling, bound))
        matched, distance = (torch.cat(part).split([len(row.places) for row in batch]) for part in zip(*parts))
        for row, *verdict in zip(batch, matched, distance):
            verdicts[row.name] = verdict
            told()
    matched = sum(int(m.sum()) for m, _ in verdicts.values())
    tokens = sum(len(m) for m, _ in verdicts.values())
    outside = {name: int(d.isinf().sum()) for name, (_, d) in verdicts.items()}
    largest = max((float(d[d.isfinite()].max()) for _, d in verdicts.values() if d.isfinite().any()), default=0.0)
    first = None
    for row in rows:
        if outside[row.name]:
            place = int(verdicts[row.name][1].isinf().nonzero()[0])
            first = f"{row.name}: token {place} of {len(row.places)}"
            break
    contradicted = sum(outside.values())
    return Drawn(tokens, matched, tokens - matched - contradicted, contradicted, len(rows), sum(map(bool, outside.values())), largest, policy.precision, first)


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0].ids) > TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def distances(logits, tokens, numbers, sampling: Sampling, bound: float):
    import torch

    tokens = tokens.unsqueeze(1)
    if sampling.temperature == 0:
        matched = logits.argmax(-1) == tokens.squeeze(1)
        distance = (logits.amax(-1) - logits.gather(1, tokens).squeeze(1)).double() / 2
        return matched.cpu(), torch.where(distance <= bound, distance, math.inf).cpu()
    cumulative = warpers(sampling)(None, logits).softmax(-1).double().cumsum(-1)
    high = cumulative.gather(1, tokens).squeeze(1)
    low = cumulative.gather(1, (tokens - 1).clamp(min=0)).squeeze(1).masked_fill(tokens.squeeze(1) == 0, 0.0)
    at = numbers * cumulative[:, -1]
    matched = (low <= at) & (at < high)
    distance = torch.zeros_like(numbers)
    if not matched.all():
        rest = ~matched
        distance[rest] = least(logits[rest], tokens[rest], numbers[rest], sampling, bound)
    return matched.cpu(), distance.cpu()


def least(logits, tokens, numbers, sampling, bound):
    """Bisection."""
    import torch

    scores = logits.double() / sampling.temperature
    numbers = numbers.unsqueeze(1)
    low = torch.zeros_like(numbers)
    high = torch.full_like(numbers, bound / sampling.temperature)
    explained = explains(scores, tokens, numbers, sampling, high)
    for _ in range(20):
        middle = (low + high) / 2
        enough = explains(scores, tokens, numbers, sampling, middle)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return (high * sampling.temperature).masked_fill(~explained, math.inf).squeeze(1)


def explains(scores, tokens, numbers, sampling: Sampling, width):
    import torch

    scores, order = scores.sort(-1, descending=True)
    weight = (scores - scores[:, :1]).exp()
    above_sure = torch.searchsorted(-scores, -(scores + 2 * width))
    above_maybe = torch.searchsorted(-scores, -(scores - 2 * width), right=True) - 1
    more, less = width.exp(), (-width).exp()
    possible = torch.ones_like(scores, dtype=torch.bool)
    certain = possible.clone()
    if sampling.top_k:
        possible, certain = above_sure < sampling.top_k, above_maybe < sampling.top_k
    if sampling.top_p < 1:
        most, surely = (torch.nn.functional.pad((weight * kept).cumsum(-1), (1, 0)) for kept in (possible, certain))
        above = surely.gather(1, above_sure) * less
        rest = (most[:, -1:] - most.gather(1, above_sure)) * more
        in_possible = possible & (above < sampling.top_p * (above + rest))
        above = (most.gather(1, above_maybe + 1) - weight * possible) * more
        rest = (surely[:, -1:] - surely.gather(1, above_maybe + 1) + weight) * less
        certain = certain & (above < sampling.top_p * (above + rest))
        possible = in_possible
    if sampling.min_p:
        floor = scores[:, :1] + math.log(sampling.min_p)
        possible = possible & (scores + 2 * width >= floor)
        certain = certain & (scores - 2 * width >= floor)
    least, most = weight * certain * less, weight * possible * more
    left, right, own = order < tokens, order > tokens, order == tokens

    def total(weights, side):
        return (weights * side).sum(-1, keepdim=True)

    mass = total(most, own)
    low = total(least, left)
    low = low / (low + mass + total(most, right))
    high = total(most, left) + mass
    high = high / (high + total(least, right))
    return (mass > 0) & (low <= numbers) & (numbers <= high)
