"""Cost of a pilot in GPU minutes, decoded natively and by the engine.

All numbers come from one run on one GPU: the real trainer, evaluation, prompts and default configuration, on random
weights of the Qwen3 shapes:

    step         one GRPO step: rollouts of a group, reference, loss, backward, optimizer
    rest         of a step, all but its rollouts
    validation   the development split once by the policy in training: base in bfloat16, adapter active
    evaluation   the test split once, in float32, without adapter
    retention    one batch of questions without tools, in float32, without adapter

Random weights hardly ever end a turn, so that every row takes its whole budget: the minutes are upper bounds. The
engine is made anew for each measurement, as stages make it; a kernel's first compilation is counted where it falls.

Native decoding takes too long to wait for. It is measured over a few tokens, ``scaled_from_tokens`` says how many:
rollouts are scaled by tokens, the others by the difference of two budgets. The rest of a native step is the engine's,
the same code over as many tokens. Nothing is scaled in ``short``: whole steps of both decoders over the few tokens.

Not counted: starting processes, loading, merging, judging, reporting.

examples:
  python -m tools.bench.pilot --tokenizer Qwen3-1.7B --output tools/bench/pilot_h200.json
  python -m tools.bench.pilot --tokenizer Qwen3-1.7B --dry-run
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean

from recipe.config import Agent, Config, complete
from recipe.errors import Refused
from recipe.mgsm.baseline import LIMIT, Protocol
from recipe.training.protocol import validated
from tools.bench.clock import forget, now, peak_gib
from tools.bench.random_policy import SHAPES, build

STEPS = 3  # of the engine over the whole budget; the first one captures its graphs
SHORT_STEPS = 2  # of either decoder over a few tokens; the first one warms up
FEWEST = 2  # tokens; the smaller of the two budgets that native decoding is measured with
TINY = (64, 1, 2, 1, 128)


def measure(shape: tuple, config: Config, protocol: Protocol, tokenizer, few: int) -> dict:
    """Every part of one shape's pilot; native decoding over ``few`` tokens."""
    from recipe.evaluation import evaluate
    from recipe.rollout import agent_chat

    sizes = {"train": config.tasks.train, "development": config.tasks.development, "test": config.tasks.test}
    family = config.rules.family
    splits, chat = family.generate(config.tasks.seed, sizes), agent_chat(tokenizer, family)
    native, engine = (replace(config.agent, decoder=decoder) for decoder in ("native", "engine"))

    def rollouts(model, split: str):
        def work(agent: Agent) -> int:
            rules = replace(config.rules, agent=agent)
            records = evaluate(model, chat, splits[split], rules, samples=1, rows=config.evaluation.batch_size)
            return sum(record.outcome["tokens"] for record in records)

        return work

    parts = {"short": {}, "validation": {}, "evaluation": {}, "retention": {}}
    parts["steps"], policy = train(shape, replace(config, agent=engine), tokenizer, splits["train"], STEPS)
    parts["validation"]["engine"] = whole(rollouts(policy, "development"), engine)
    show("steps", parts["steps"])
    for agent in (engine, native):
        del policy
        brief = replace(config, agent=replace(agent, max_tokens=few))
        parts["short"][agent.decoder], policy = train(shape, brief, tokenizer, splits["train"], SHORT_STEPS)
    parts["validation"]["native"] = scaled(rollouts(policy, "development"), native, few)
    del policy
    show("short", parts["short"])
    show("validation", parts["validation"])
    forget()
    model = build(shape, config.evaluation.precision, adapter=False)
    asked = {"max_tokens": protocol.max_new_tokens, "sampling": protocol.sampling, "seed": protocol.seed}
    for part, work, changes in (
        ("evaluation", rollouts(model, "test"), {}),
        ("retention", retention(model, chat, protocol, splits["train"]), asked),
    ):
        parts[part]["engine"] = whole(work, replace(engine, **changes))
        parts[part]["native"] = scaled(work, replace(native, **changes), few)
        show(part, parts[part])
    return parts


def show(part: str, measured: dict) -> None:
    """At once, because a later part may not fit into the memory or the time that there is."""
    print(json.dumps({part: measured}), flush=True)


def train(shape: tuple, config: Config, tokenizer, tasks: list, steps: int) -> tuple[dict, object]:
    """Seconds and tokens of each of some steps of the real trainer, and the policy after them in ``eval()`` mode."""
    from datasets import Dataset
    from transformers import PrinterCallback

    from recipe import grpo
    from recipe.rollout import agent_chat
    from recipe.training.trainer import AgenticGRPOTrainer, dataset_row
    from recipe.training.trl_chat import raw_span_tokenizer

    forget()
    tokens, starts, ends = [], [], []
    config = replace(config, grpo=replace(config.grpo, steps=steps))
    with tempfile.TemporaryDirectory() as folder:
        trainer = AgenticGRPOTrainer(
            model=build(shape, config.precision, adapter=False),
            processing_class=raw_span_tokenizer(tokenizer, agent_chat(tokenizer, config.rules.family).tools),
            args=grpo.arguments(config, Path(folder)),
            train_dataset=Dataset.from_list([dataset_row(task) for task in tasks]),
            candidates=[[task] for task in tasks],
            peft_config=grpo.lora(config.grpo),
            rules=config.rules,
            on_rollouts=lambda group, *_: tokens.append(sum(rollout.outcome().tokens for rollout in group)),
        )
        trainer.remove_callback(PrinterCallback)
        generate = trainer._generate

        def generate_timed(prompts):
            starts.append(now())
            generated = generate(prompts)
            ends.append(now())
            return generated

        trainer._generate = generate_timed
        trainer.train()
        following = [*starts[1:], now()]  # a step lasts until the next one samples
    times = [
        {"step_s": over - start, "rollouts_s": end - start, "rest_s": over - end, "tokens": count}
        for start, end, over, count in zip(starts, ends, following, tokens, strict=True)
    ]
    return {"each": times, "peak_gib": peak_gib()}, trainer.model.eval()


def retention(model, chat, protocol: Protocol, tasks: list) -> Callable[[Agent], int]:
    """One batch of the retention protocol; for its length, one German question is as good as another."""
    from recipe.policy import make_decoder
    from recipe.policy.chat import Chat
    from recipe.policy.decoding import RandomStream

    batch = tasks[: protocol.batch_size]
    plain = Chat(chat.tokenizer)  # without the tools
    prompts = [plain.prompt(protocol.messages(task.question)) for task in batch]

    def work(agent: Agent) -> int:
        streams = [RandomStream(agent.seed, task.task_id, 0) for task in batch]
        context = max(map(len, prompts)) + agent.max_tokens
        decoder = make_decoder(agent.decoder, model, plain, agent.sampling, rows=len(batch), context=context)
        return sum(len(turn.ids) for turn in decoder.turns(prompts, [agent.max_tokens] * len(batch), streams))

    return work


def whole(work: Callable[[Agent], int], agent: Agent) -> dict:
    start = now()
    tokens = work(agent)
    return {"seconds": now() - start, "tokens": tokens}


def scaled(work: Callable[[Agent], int], agent: Agent, few: int) -> dict:
    """Seconds over ``agent.max_tokens``, from those over two smaller budgets."""
    least, most = (replace(agent, max_tokens=tokens) for tokens in (FEWEST, few))
    work(least)  # warms up
    start, end = whole(work, least)["seconds"], whole(work, most)["seconds"]
    token = (end - start) / (few - FEWEST)
    return {
        "seconds": start + token * (agent.max_tokens - FEWEST), "token_ms": 1000 * token, "scaled_from_tokens": few
    }  # fmt: skip


def pilot(parts: dict, config: Config, protocol: Protocol) -> list[dict]:
    """GPU minutes of each stage by either decoder, and of all together."""
    grpo, samples = config.grpo, config.evaluation.samples_per_task
    items, development = f"{config.tasks.test} tasks x {samples}", f"{config.tasks.development} tasks"
    validations = len(validated(grpo))
    batches = math.ceil(LIMIT / protocol.batch_size)
    seconds = {f"training: {grpo.steps} steps of {grpo.batch_size} rollouts": training_seconds(parts, grpo.steps)}
    for stage, part, times in (
        (
            f"validation: {validations} times {development} x {grpo.validation_samples}", "validation",
            validations * grpo.validation_samples,
        ),
        (f"baseline: {items}", "evaluation", samples),
        (f"candidate: {items}", "evaluation", samples),
        (f"retention: {LIMIT} questions, the candidate's", "retention", batches),
    ):
        seconds[stage] = {decoder: times * measured["seconds"] for decoder, measured in parts[part].items()}
    seconds["whole pilot"] = {
        decoder: sum(stage[decoder] for stage in seconds.values()) for decoder in ("native", "engine")
    }
    return [
        {
            "stage": stage, "native_minutes": by["native"] / 60, "engine_minutes": by["engine"] / 60,
            "native_to_engine": by["native"] / by["engine"],
        }
        for stage, by in seconds.items()
    ]  # fmt: skip


def training_seconds(parts: dict, steps: int) -> dict:
    first, *later = parts["steps"]["each"]
    brief = parts["short"]["native"]["each"][-1]
    rollouts = brief["rollouts_s"] * mean(step["tokens"] for step in later) / brief["tokens"]
    return {
        "engine": first["step_s"] + (steps - 1) * mean(step["step_s"] for step in later),
        "native": steps * (rollouts + mean(step["rest_s"] for step in later)),
    }


def table(name: str, parts: dict, few: int) -> str:
    lines = [f"{name + ': GPU minutes, upper bounds':<52}{'native':>9}{'engine':>9}{'ratio':>8}"]
    lines += [
        f"  {row['stage']:<50}{row['native_minutes']:>9.2f}{row['engine_minutes']:>9.2f}{row['native_to_engine']:>8.1f}"
        for row in parts["pilot"]
    ]
    native, engine = (parts["short"][decoder]["each"][-1]["step_s"] for decoder in ("native", "engine"))
    title = f"seconds of a step of {few} tokens a rollout, unscaled"
    return "\n".join([*lines, f"  {title:<50}{native:>9.2f}{engine:>9.2f}{native / engine:>8.1f}"])


def in_small(config: Config, protocol: Protocol) -> tuple[Config, Protocol]:
    """The same with budgets and batches for a CPU."""
    return replace(
        config,
        precision="float32",
        agent=replace(config.agent, max_tokens=12),
        tasks=replace(config.tasks, train=8, development=2, test=2),
    ), replace(protocol, max_new_tokens=12, batch_size=2)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.pilot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer of a Qwen3 model")
    parser.add_argument("--output", type=Path, help="write the aggregate here, as JSON")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.7B", "4B"])
    parser.add_argument("--native-tokens", type=int, default=48, help="that native decoding is measured over")
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny shape and budget, without a GPU too; the numbers mean nothing"
    )
    given = parser.parse_args(arguments)
    config, protocol, few = complete({}), Protocol(), given.native_tokens
    shapes = {name: SHAPES[name] for name in given.shapes}
    if given.dry_run:
        (config, protocol), few, shapes = in_small(config, protocol), 6, {"tiny": TINY}
    if not FEWEST < few <= min(config.agent.max_tokens, protocol.max_new_tokens):
        parser.error(f"--native-tokens {few}: more than {FEWEST} and at most the budget of a rollout")
    import torch

    from recipe.files import write_json
    from recipe.policy.checkpoint import device, load_tokenizer

    if device() == "cpu" and not given.dry_run:
        parser.error("there is no GPU here; --dry-run goes without")
    try:
        tokenizer = load_tokenizer(given.tokenizer)
    except Refused as refused:
        parser.error(str(refused))
    gpu = torch.cuda.get_device_name() if device() == "cuda" else None
    result = {"device": gpu, "torch": torch.__version__, "shapes": {}}
    for name, shape in shapes.items():
        parts = measure(shape, config, protocol, tokenizer, few)
        parts["pilot"] = pilot(parts, config, protocol)
        result["shapes"][name] = parts
        print(table(name, parts, few), flush=True)
        if given.output:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            write_json(given.output, result)


if __name__ == "__main__":
    main()
