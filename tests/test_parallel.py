"""One process a GPU: what the processes tell each other, and GRPO over two of them, here on a CPU.

With streams of their own (``agent.decoder: engine``) the rollouts of two processes are those of one. Sums are taken in
another order, so that losses, gradients and weights may differ in the last places.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from recipe import config, grpo
from recipe.errors import CheckFailed, Refused
from recipe.files import tree_digests, write_json
from recipe.run import cluster, processes
from recipe.run import plan as plans
from recipe.run.cluster import Runtime
from recipe.run.evidence import TRAINER
from recipe.run.stage import Stage
from recipe.training import checkpoints as resume
from recipe.verify import replay
from runs import ROOT, settings

STEPS = 3
RESAMPLED = {
    "steps": 2, "num_generations": 2, "batch_size": 2, "resample": True, "resample_tasks": 3, "validation_every": 0
}  # fmt: skip


def torchrun(*command) -> subprocess.CompletedProcess:
    """Two processes of a script, or of a module after ``-m``."""
    torch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*torch, *map(str, command)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def told(done: subprocess.CompletedProcess) -> list[str]:
    """The lines that end a stage, whatever torchrun says after them."""
    lines = done.stderr.replace("\r", "\n").splitlines()
    return [line[line.index(mark) :] for line in lines for mark in ("refused: ", "check failed: ") if mark in line]


def frozen(practice: Path, folder: Path, **grpo) -> plans.Plan:
    values = settings(practice)
    values["agent"] = {"decoder": "engine"}
    values["grpo"] |= {"steps": STEPS, "validation_every": STEPS, "gradient_checkpointing": True, **grpo}
    return plans.prepare(practice / "checkpoint", practice / "retention-baseline", config.resolve(values), folder)


@pytest.fixture(scope="module")
def two(practice, tmp_path_factory) -> plans.Plan:
    """The plan of a run whose grpo stage two processes have finished."""
    plan = frozen(practice, tmp_path_factory.mktemp("two") / "run")
    done = torchrun("-m", "experiments.grpo", "--plan", plan.run / "plan.json")
    assert done.returncode == 0, done.stderr[-3000:]
    return plan


@pytest.fixture(scope="module")
def disturbed(practice, tmp_path_factory) -> tuple[plans.Plan, plans.Plan, plans.Plan, subprocess.CompletedProcess]:
    """Three such plans after tests/under_torchrun.py: paused at every step, the second of them one that passes over
    groups, and broken in one process."""
    folder = tmp_path_factory.mktemp("disturbed")
    paused, broken = (frozen(practice, folder / name) for name in ("paused", "broken"))
    resampled = frozen(practice, folder / "resampled", **RESAMPLED)
    done = torchrun("tests/under_torchrun.py", *(one.run / "plan.json" for one in (paused, resampled, broken)))
    return paused, resampled, broken, done


def steps(run: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((run / "grpo" / "steps").iterdir())]


def evidence(run: Path) -> dict[str, str]:
    return {name: sha for name, sha in tree_digests(run / "grpo").items() if name != "result.json"}


# ---- one process, or none yet


def test_one_process_is_its_own_chief_and_needs_no_torch():
    code = (
        "import sys; from recipe.run import processes\n"
        "with processes.joined():\n"
        "    found = processes.gather(lambda: 1), processes.all_ranks(lambda: 2), processes.main_rank(lambda: 3)\n"
        "assert found == ([1], 2, 3) and processes.is_main() and processes.share([4, 5]) == [4, 5]\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_failure_of_the_only_process_is_its_own():
    def failing():
        raise CheckFailed("here")

    for shared in (processes.gather, processes.all_ranks, processes.main_rank):
        with pytest.raises(CheckFailed, match="here"):
            shared(failing)


@pytest.mark.parametrize(
    ("failure", "left"), [(None, True), (Refused("no"), True), (CheckFailed("no"), True), (RuntimeError("no"), False)]
)
def test_the_processes_part_in_order_unless_one_of_them_broke(monkeypatch, failure, left):
    """A group that nobody leaves aborts the interpreter's exit; one that others wait in would be waited for."""
    import torch

    calls = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "")  # put back what joined() sets
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: calls.append(backend))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("left"))
    with nullcontext() if failure is None else pytest.raises(type(failure)):
        with processes.joined():
            if failure:
                raise failure
    assert calls == (["gloo", "left"] if left else ["gloo"])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_even_and_in_order(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", str(size))
    shares = []
    for rank in range(size):
        monkeypatch.setenv("RANK", str(rank))
        shares.append(processes.share(list("abcde")))
    assert sum(shares, []) == list("abcde")
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_checkpoint_of_two_processes_is_not_resumed_by_one(two, tmp_path):
    stage = Stage("grpo", plans.Plan(two.frozen, two.splits, tmp_path), Runtime({}, *[lambda *_: None] * 3))
    saved = stage.folder / TRAINER / "checkpoint-2"
    for rank in range(2):
        write_json(saved / f"rng_state_{rank}.pth", rank)
    write_json(saved.with_suffix(".json"), {"step": 2, "files": tree_digests(saved)})
    write_json(stage.folder / "steps" / "step-0003.json", {})
    with pytest.raises(Refused, match=r"saved by 2 processes \(slots\) and this is 1"):
        resume.latest(stage)
    assert saved.is_dir() and (stage.folder / "steps" / "step-0003.json").exists()


# ---- two


def test_two_processes_sample_the_rollouts_of_one(two, practice, tmp_path):
    plan = frozen(practice, tmp_path / "one")
    (plan.run / "grpo").mkdir()
    assert grpo.train(Stage("grpo", plan, Runtime({}, lambda *_: None, lambda: False, lambda *_: None))) is not None
    alone, shared = steps(plan.run), steps(two.run)
    assert len(shared) == STEPS and shared[0]["rollouts"] == alone[0]["rollouts"]
    order = [[rollout["task_id"] for rollout in step["rollouts"]] for step in (*alone, *shared)]
    assert order[:STEPS] == order[STEPS:]
    first = shared[0]["metrics"]
    per_process = ("entropy", "kl")  # TRL averages the processes' means
    # Each batch shape has its own; below, that it is no more.
    rounding = ("logprob_gap_mean", "logprob_gap_quantile", "logprob_gap_max")
    expected = {name: value for name, value in alone[0]["metrics"].items() if name not in (*per_process, *rounding)}
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert first.keys() == alone[0]["metrics"].keys()
    assert all(0 <= step["metrics"]["logprob_gap_max"] < 1e-4 for step in (*alone, *shared))


def test_the_evidence_of_two_processes_is_accepted(two):
    replayed = []
    replay.training(two, replay.Reader.of(two.checkpoint, two.family), lambda: replayed.append(1))
    assert len(replayed) == STEPS * two.config.grpo.batch_size + 2 * len(two.splits["development"])  # steps 0 and 3
    result = json.loads((two.run / "grpo" / "result.json").read_text())
    assert result["failure"] is None and result["machine"]["processes"] == 2


def test_pausing_two_processes_changes_nothing(two, disturbed):
    paused, *_, done = disturbed
    assert evidence(paused.run) == evidence(two.run), done.stderr[-3000:]


def test_two_processes_pass_over_the_groups_that_one_passes_over(disturbed, practice, tmp_path):
    """Each holds one rollout of every group: which is mixed, none of them sees alone."""
    _, resampled, _, done = disturbed
    plan = frozen(practice, tmp_path / "one", **RESAMPLED)
    (plan.run / "grpo").mkdir()
    assert grpo.train(Stage("grpo", plan, Runtime({}, lambda *_: None, lambda: False, lambda *_: None))) is not None
    alone, shared = steps(plan.run), steps(resampled.run)
    assert len(shared) == RESAMPLED["steps"], done.stderr[-3000:]
    assert shared[0]["rollouts"] == alone[0]["rollouts"] and shared[0]["dropped"] == alone[0]["dropped"]
    assert any(step["dropped"] for step in shared)
    replay.training(resampled, replay.Reader.of(resampled.checkpoint, resampled.family))


def test_a_failure_beside_the_chief_is_recorded_by_the_chief(disturbed):
    *_, broken, done = disturbed
    assert done.returncode == 1
    [line] = told(done)
    assert "the disk with the records is gone" in line and f"evidence kept in {broken.run / 'grpo'}" in line
    result = json.loads((broken.run / "grpo" / "result.json").read_text())
    assert "the disk with the records is gone" in result["failure"]


@pytest.mark.parametrize(
    ("stage", "slots", "size", "reason"),
    [("grpo", 3, 3, "cannot divide 4 rollouts a step among 3 GPUs"),
     ("baseline", 1, 2, "baseline uses one GPU and was given 2"),
     ("report", 2, 1, "report uses one GPU and was given 2"),
     ("retention_baseline", 2, 1, "retention_baseline uses one GPU and was given 2")],
)  # fmt: skip
def test_gpus_that_a_stage_cannot_use_are_refused(two, monkeypatch, capsys, stage, slots, size, reason):
    import runpy
    from contextlib import nullcontext

    before = tree_digests(two.run)
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setattr(cluster, "slots", lambda: slots)
    monkeypatch.setattr(processes, "joined", nullcontext)
    monkeypatch.setattr(processes, "main_rank", lambda work: work())
    monkeypatch.setattr(sys, "argv", [stage, "--plan", str(two.run / "plan.json")])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"experiments.{stage}", run_name="__main__")
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("refused: ") and reason in line
    assert tree_digests(two.run) == before
