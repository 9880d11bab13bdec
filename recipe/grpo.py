"""GRPO on the policy's own tool use, from the frozen order of tasks to an adapter with its evidence.

Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300) as TRL implements it: one task a group, one
group a step, advantages from the group's own rewards, KL to the starting checkpoint (the adapter disabled).
Strictly on-policy: each batch of rollouts is used for one optimizer step, so the probability ratio is 1.

The stage writes::

    grpo/steps/step-0001.json        the rollouts of a step, with reward and advantage, and the step's metrics
    grpo/validation/step-0008.jsonl  rollouts on the development split at the frozen interval; step 0: before training
    grpo/protocol.json               what reached TRL, PEFT and the optimizer (recipe.training.readback)
    grpo/adapter/                    the LoRA adapter after the last step, or the one that ``grpo.select`` chose
    grpo/trainer/checkpoint-8/       what training goes on from at the frozen interval (recipe.training.checkpoints)

Over several GPUs (:mod:`recipe.run.processes`) each process samples and learns from its rows of the batch, and
gradients are averaged; a batch, its groups and its evidence are the same. ``kl`` and ``entropy`` are then means over
processes.

It fails, evidence kept, unless some group had mixed rewards, gradients were nonzero and the adapter changed, and unless
what the engine sampled from was the policy that was trained (``grpo.max_gap_mean``, ``grpo.max_gap_quantile``).
"""

import shutil
import time
from dataclasses import asdict
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig

from recipe import determinism, evaluation
from recipe.config import Config, Grpo
from recipe.errors import CheckFailed
from recipe.files import digest, follow_umask, tree_digests, write_json, write_lines
from recipe.policy import checkpoint
from recipe.records import parse, read
from recipe.rollout import agent_chat
from recipe.run import evidence, processes
from recipe.run.evidence import Evaluated, RolloutRecord, Step, Trained
from recipe.run.result import Done
from recipe.run.stage import Stage
from recipe.training import adapter, checkpoints, selection
from recipe.training.protocol import validated
from recipe.training.readback import Readback
from recipe.training.trainer import AgenticGRPOTrainer, dataset_row
from recipe.training.trl_chat import raw_span_tokenizer


def train(stage: Stage) -> Done | None:
    """Train the starting checkpoint's adapter; the whole of the grpo stage. None when it was paused."""
    plan, config = stage.plan, stage.plan.config
    determinism.settle(config.deterministic)
    set_seed(config.grpo.seed)  # the adapter's initial weights come from the ambient generator
    model = checkpoint.load_model(plan.checkpoint, config.precision, checkpoint.device())
    tokenizer = checkpoint.load_tokenizer(plan.checkpoint)
    chat = agent_chat(tokenizer, config.rules.family)
    resumed_from, step = processes.main_rank(lambda: checkpoints.latest(stage))
    processes.main_rank(lambda: checkpoints.cut_back(stage, step))
    processes.main_rank(lambda: stage.began(step))
    recorder, saver = Recorder(stage, step), checkpoints.Saver(stage)
    callbacks = [recorder, *([Validation(stage, chat)] if config.grpo.validation_every else []), saver]
    order, tried = plan.training_order, config.grpo.candidates
    tasks = [order[first : first + tried] for first in range(0, len(order), tried)]
    trainer = AgenticGRPOTrainer(
        model=model,
        processing_class=raw_span_tokenizer(tokenizer, chat.tools),
        args=arguments(config, stage.folder / evidence.TRAINER),
        train_dataset=Dataset.from_list([dataset_row(candidates[0]) for candidates in tasks]),
        candidates=tasks,
        peft_config=lora(config.grpo),
        rules=config.rules,
        on_rollouts=recorder.hold,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Readback(stage, trainer))
    trainer.train(resume_from_checkpoint=resumed_from and str(resumed_from))
    if saver.paused:
        return processes.main_rank(lambda: stage.paused(trainer.state.global_step))
    return processes.main_rank(lambda: keep_adapter(stage, trainer.model, recorder.steps))


def lora(grpo: Grpo) -> LoraConfig:
    """The adapter: on every linear layer but the head."""
    return LoraConfig(
        r=grpo.lora_rank,
        lora_alpha=grpo.lora_alpha,
        lora_dropout=0.0,  # dropout would be active while sampling
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def arguments(config: Config, folder: Path) -> GRPOConfig:
    """TRL's arguments from the frozen settings."""
    grpo, agent, bf16 = config.grpo, config.agent, config.precision == "bfloat16"
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=grpo.steps,
        num_generations=grpo.num_generations,
        per_device_train_batch_size=grpo.batch_size // processes.size(),
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        shuffle_dataset=False,  # the dataset is in the frozen order already
        beta=grpo.kl,
        loss_type=grpo.loss_type,
        scale_rewards=grpo.scale_rewards,
        epsilon=grpo.clip,
        importance_sampling_level="token",
        mask_truncated_completions=False,
        disable_dropout=True,
        max_completion_length=agent.max_tokens,
        max_tool_calling_iterations=agent.max_tool_iterations,
        temperature=agent.sampling.temperature,
        top_p=agent.sampling.top_p,
        top_k=agent.sampling.top_k,
        min_p=agent.sampling.min_p,
        repetition_penalty=1.0,
        learning_rate=grpo.learning_rate,
        lr_scheduler_type=_scheduler(grpo),
        warmup_steps=grpo.warmup_steps,
        optim=grpo.optimizer,
        adam_beta1=grpo.adam_beta1,
        adam_beta2=grpo.adam_beta2,
        adam_epsilon=grpo.adam_epsilon,
        weight_decay=grpo.weight_decay,
        max_grad_norm=grpo.max_grad_norm,
        bf16=bf16,  # with the base loaded in bf16: adapters and log-probabilities stay float32
        gradient_checkpointing=grpo.gradient_checkpointing,
        seed=grpo.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,  # the filter would log a loss of 0 while the weights become NaN
        save_strategy="no",  # recipe.training.checkpoints says when
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),  # without it several processes on CPUs would not be one training
        ddp_find_unused_parameters=False,  # every weight of the adapter is in every forward pass
    )


def _scheduler(grpo: Grpo) -> str:
    """The schedule as transformers calls it, whose plain ``constant`` has no warm-up."""
    return "constant_with_warmup" if grpo.lr_schedule == "constant" and grpo.warmup_steps else grpo.lr_schedule


# TRL's log keys that the evidence keeps; all of them are reproducible (no times).
_KEPT = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "kl",
    "entropy": "entropy",
    "logprob_gap/mean": "logprob_gap_mean",  # of the engine from the trainer's forward pass
    "logprob_gap/quantile": "logprob_gap_quantile",
    "logprob_gap/max": "logprob_gap_max",
}


class Recorder(TrainerCallback):
    """Writes one file a step, once the step is whole, and stops training on gradients that are not finite."""

    def __init__(self, stage: Stage, done: int):
        self._stage = stage
        self._held: list[Trained] = []
        self._dropped: list[RolloutRecord] = []
        self._start = time.perf_counter()
        self._progress = stage.progress(stage.plan.config.grpo.steps, "step", done=done)
        self.steps = [evidence.read_step(self._path(step)) for step in range(1, done + 1)]

    def _path(self, step: int) -> Path:
        return self._stage.folder / evidence.STEPS / evidence.step_name(step)

    def hold(self, rollouts, advantages, dropped) -> None:
        """Keep a scored batch and the groups dropped for it, the parts of all processes, until its step ends."""
        own = [
            rollout.record(Trained, advantage=advantage)
            for rollout, advantage in zip(rollouts, advantages, strict=True)
        ]
        self._held = [record for part in processes.gather(lambda: own) for record in part]
        apart = [[rollout.record() for rollout in group] for group in dropped]
        parts = processes.gather(lambda: apart)
        self._dropped = [record for group in zip(*parts) for part in group for record in part]

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        # Gradients are averaged by now: all processes see the same, and stop together.
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                raise CheckFailed(f"step {state.global_step + 1}: the gradient of {name} is not finite")

    def on_log(self, args, state, control, logs, **_):
        if "loss" not in logs or not processes.is_main():  # without a loss: the closing summary of a run
            return
        step = state.global_step
        size = self._stage.plan.config.grpo.num_generations
        metrics = {ours: float(logs[theirs]) for theirs, ours in _KEPT.items() if theirs in logs}
        derived = evidence.step_metrics(self._held, size, self._dropped)
        record = Step(step, self._held, {**metrics, **derived}, self._dropped)
        write_json(self._path(step), asdict(record))
        self.steps.append(record)
        now = time.perf_counter()
        tokens = sum(rollout.outcome["tokens"] for rollout in self._held)
        speed = {"tokens_per_second": tokens / (now - self._start), "step_seconds": now - self._start}
        self._stage.report("training", step, {**record.metrics, **speed})
        self._start = now
        self._progress.update(reward=f"{record.metrics['reward']:.2f}")

    def on_train_end(self, args, state, control, **_):
        self._progress.close()


class Validation(TrainerCallback):
    """Evaluates the policy on the development split before the first step and every ``validation_every`` steps.

    Rollouts draw from streams of their own, so that validating leaves training's random state as it was.
    """

    def __init__(self, stage: Stage, chat):
        self._stage, self._chat = stage, chat

    def on_step_begin(self, args, state, control, model, **_):
        if state.global_step == 0:  # the protocol has been read back by now; a resumed training is past this
            self._validate(0, model)

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step in validated(self._stage.plan.config.grpo):
            self._validate(state.global_step, model)

    def _validate(self, step: int, model) -> None:
        model.eval()
        records = [record for part in processes.gather(lambda: self._share(model)) for record in part]
        model.train()
        if processes.is_main():
            path = self._stage.folder / evidence.VALIDATION / evidence.validation_name(step)
            write_lines(path, map(asdict, records))
            self._stage.report("validation", step, evidence.aggregate(records))

    def _share(self, model) -> list[Evaluated]:
        """The records that fall to this process; none where there are more processes than tasks."""
        config, tasks = self._stage.plan.config, processes.share(self._stage.plan.splits["development"])
        if not tasks:
            return []
        samples, rows = config.grpo.validation_samples, config.evaluation.batch_size
        return evaluation.evaluate(model, self._chat, tasks, config.rules, samples, rows)


def save_adapter(model, folder: Path) -> None:
    """Write the adapter so that equal adapters are equal files.

    PEFT lists its target modules in hash order, and adds a README.md, a form that nobody has filled in.
    """
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    follow_umask(folder)
    path = folder / adapter.CONFIG
    settings = read(dict, path, "the adapter's configuration")
    modules = parse(list[str], settings.get("target_modules"), str(path), "target_modules")
    write_json(path, {**settings, "target_modules": sorted(modules)})


def keep_adapter(stage: Stage, model, steps: list[Step]) -> Done:
    """Keep the adapter, here and on a cluster, and judge the run that made it."""
    grpo, folder = stage.plan.config.grpo, stage.folder / "adapter"
    solved = selection.read(stage.folder, grpo)
    save_adapter(model, folder)
    if grpo.select == "development":
        chosen = f"checkpoint-{selection.selected(grpo, solved)}"
        shutil.copyfile(stage.folder / evidence.TRAINER / chosen / adapter.WEIGHTS, folder / adapter.WEIGHTS)
    metadata = {"plan_id": stage.plan.id, "adapter": digest(tree_digests(folder))}
    stage.store(folder, grpo.steps, metadata)
    checkpoints.finish(stage)
    return judged(grpo, steps, solved, not adapter.neutral(load_file(folder / adapter.WEIGHTS)))


def judged(grpo: Grpo, steps: list[Step], solved: selection.Solved, changed: bool) -> Done:
    """Aggregate a run and hold it against the gates: whether anything was learned from, and on-policy."""
    metrics = {**evidence.training_metrics(steps), **selection.metrics(grpo, solved)}
    gates = evidence.training_gates(metrics, changed, grpo)
    failed = [name for name, passed in gates.items() if not passed]
    failure = f"GRPO's training does not count: {', '.join(failed)} did not hold" if failed else None
    return Done(metrics, gates, failure)
