"""The trained adapter folded into its base: a standalone checkpoint, checked after it was written.

It is written in float32. The base's weights lie on BF16's grid; an update of a pilot's size (32 steps at 1e-5) is
smaller than half that grid's spacing for most weights, so that a BF16 sum would round back to the base. The stage
reports how much of the update BF16 would lose (``bf16_update_error``).

Everything but the weights is the base's own: its tokenizer, its templates, its generation settings byte by byte, and
its config.json with the type of the weights changed and, where transformers 5 wrote it, the rotary embedding said once
more as older readers look for it. What a trainer leaves beside a model (optimizers, its checkpoints) stays behind.

The check reads the written checkpoint back and compares its next-token distributions with those of base + adapter
on frozen inputs (baseline rollouts), in float32.
"""

import shutil
from pathlib import Path

import torch
from peft import PeftModel

from recipe import determinism
from recipe.files import file_digest, follow_umask, write_bytes
from recipe.policy import checkpoint, configuration
from recipe.run.evidence import ROLLOUTS, merge_gates, read_rollouts
from recipe.run.result import Done
from recipe.run.stage import Stage

INPUTS = 8  # baseline rollouts that the comparison reads


def merge(stage: Stage) -> Done:
    """Merge the grpo stage's adapter; the whole of the merge stage."""
    plan = stage.plan
    determinism.settle(plan.config.deterministic)
    adapter = plan.run / "grpo" / "adapter"
    inputs = frozen_inputs(plan.run / "baseline" / ROLLOUTS)
    target = stage.folder / "checkpoint"

    with stage.progress(3, "part") as progress:
        write(plan.checkpoint, adapter, target)
        progress.update()
        device = checkpoint.device()
        base = checkpoint.load_model(plan.checkpoint, "float32", device)
        tuned = PeftModel.from_pretrained(base, adapter).eval()
        wanted = [log_probabilities(tuned, ids) for ids in inputs]
        progress.update()
        merged = checkpoint.load_model(target, "float32", device)
        metrics = compare(wanted, [log_probabilities(merged, ids) for ids in inputs])
        metrics["update_error"] = update_error(tuned, merged, torch.float32)
        metrics["bf16_update_error"] = update_error(tuned, merged, torch.bfloat16)
        progress.update()

    gates = merge_gates(metrics, plan.config.merge.max_kl, unchanged_files(plan.checkpoint, target))
    failed = [name for name, passed in gates.items() if not passed]
    if stage.runtime.keep_merged:
        stage.store(target, 1, {"plan_id": plan.id, "merged_checkpoint": checkpoint.identity(target)["digest"]})
    failure = f"the merged checkpoint is not base + adapter: {', '.join(failed)} did not hold" if failed else None
    return Done(metrics, gates, failure)


def frozen_inputs(path: Path) -> list[list[int]]:
    """Token rows (prompt and completion) of the first baseline rollouts."""
    records = read_rollouts(path, "the baseline's rollouts")
    return [record.prompt_ids + record.ids for record in records[:INPUTS]]


def write(base: Path, adapter: Path, target: Path) -> None:
    """Write the merged checkpoint to ``target``."""
    settings = configuration.merged_content(base)
    model = PeftModel.from_pretrained(checkpoint.load_model(base, "float32", "cpu"), adapter).merge_and_unload()
    temporary = target.with_name("checkpoint.partial")
    model.save_pretrained(temporary)
    (temporary / "generation_config.json").unlink(missing_ok=True)  # the loaded model's, which is empty
    for name in checkpoint.carried(base):
        (temporary / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(base / name, temporary / name)
    write_bytes(temporary / configuration.CONFIG, settings)
    follow_umask(temporary)
    temporary.rename(target)


def unchanged_files(base: Path, target: Path) -> bool:
    return all(file_digest(base / name) == file_digest(target / name) for name in checkpoint.carried(base))


@torch.inference_mode()
def log_probabilities(model, ids: list[int]):
    """(T, V) next-token log-probabilities of one row, in float32."""
    return model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float().log_softmax(-1).cpu()


def compare(wanted: list, found: list) -> dict[str, float]:
    """Differences of two policies over the same positions: KL in nats a token, and the largest single one."""
    # Summed in float64: two equal policies differ by rounding alone, which float32 sums would turn negative.
    kl = torch.cat([(w.double().exp() * (w.double() - f.double())).sum(-1) for w, f in zip(wanted, found)])
    largest = max(float((w - f).abs().max()) for w, f in zip(wanted, found))
    agree = torch.cat([w.argmax(-1) == f.argmax(-1) for w, f in zip(wanted, found)])
    return {
        "mean_kl": abs(float(kl.mean())),
        "max_log_probability_difference": largest,
        "same_best_token": float(agree.float().mean()),
    }


@torch.inference_mode()
def update_error(tuned, merged, precision: torch.dtype) -> float:
    """Relative Frobenius error of the adapter's update in the merged weights, were they held in ``precision``.

    1 means that the update is gone.
    """
    weights = dict(merged.named_parameters())
    lost = total = 0.0
    for name, layer in tuned.base_model.model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            update = layer.get_delta_weight("default").float()
            written = weights[f"{name}.weight"].to(precision).float() - layer.base_layer.weight
            lost += float((written - update).square().sum())
            total += float(update.square().sum())
    return (lost / total) ** 0.5 if total else 0.0
