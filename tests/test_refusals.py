"""Nothing altered passes: frozen inputs are named before a stage runs, evidence is named before a summary is written."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe import config, report
from recipe.errors import CheckFailed, Refused
from recipe.files import tree_digests, write_json
from recipe.policy import checkpoint
from recipe.records import read_json
from recipe.run import plan as plans
from recipe.run import repository
from recipe.run.sources import OWN, is_source, nothing_in_the_way, package_sources
from runs import ROOT, prepared, rebound, settings, stage_process
from tampering import REMOVED, another, edit, flip, reforge, reseal, rewrite_attempts


@pytest.fixture
def copied(run, tmp_path) -> Path:
    """A copy of the finished run that a test may spoil."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture
def private(practice, tmp_path) -> Path:
    """A run prepared from inputs of its own, which a test may spoil."""
    shutil.copytree(practice, tmp_path / "practice")
    return prepared(tmp_path / "practice", tmp_path / "run")


def report_of(run: Path) -> None:
    plan = plans.load(run / "plan.json")
    report.write(report.verified(plan), report.stated(plan), run.parent / "again")


def test_the_untouched_copy_is_accepted(copied):
    report_of(copied)


@pytest.mark.parametrize(
    "file",
    ["checkpoint/model.safetensors", "checkpoint/tokenizer.json", "checkpoint/tokenizer_config.json",
     "checkpoint/config.json", "retention-baseline/outputs.jsonl", "retention-baseline/retention.json"],
)  # fmt: skip
def test_one_byte_of_a_frozen_input_is_refused_by_name(private, tmp_path, file):
    flip(tmp_path / "practice" / file, -2)
    with pytest.raises(Refused, match=Path(file).name):
        plans.load(private / "plan.json")


@pytest.mark.parametrize("file", ["plan.json", "tasks.json"])
def test_one_digit_of_the_plan_or_tasks_is_refused_by_name(private, file):
    text = (private / file).read_text()
    place = max(text.rfind(digit) for digit in "123456789")
    (private / file).write_text(text[:place] + ("8" if text[place] != "8" else "9") + text[place + 1 :])
    with pytest.raises(Refused, match=file):
        plans.load(private / "plan.json")


def test_new_and_missing_files_of_the_checkpoint_are_refused(private, tmp_path):
    extra = tmp_path / "practice" / "checkpoint" / "extra.txt"
    extra.write_text("x")
    with pytest.raises(Refused, match="extra.txt is new"):
        plans.load(private / "plan.json")
    extra.unlink()
    (tmp_path / "practice" / "checkpoint" / "config.json").unlink()
    with pytest.raises(Refused, match="config.json is missing"):
        plans.load(private / "plan.json")


def test_a_changed_source_module_is_refused_by_name(private):
    sources = dict(read_json(private / "plan.json", "plan")["sources"])
    reforge(private, sources={**sources, "recipe/orders/judge.py": "0" * 64})
    with pytest.raises(Refused, match="recipe/orders/judge.py is changed"):
        plans.load(private / "plan.json")


def test_a_changed_trainer_module_is_refused_by_name(private):
    trainer = dict(read_json(private / "plan.json", "plan")["trainer"])
    reforge(private, trainer={**trainer, "trl/trainer/grpo_trainer.py": "0" * 64})
    with pytest.raises(Refused, match="grpo_trainer.py is changed"):
        plans.load(private / "plan.json")


def test_another_package_version_is_refused_by_name(private):
    versions = dict(read_json(private / "plan.json", "plan")["versions"])
    reforge(private, versions={**versions, "trl": "0.28.0"})
    with pytest.raises(Refused, match="trl is changed"):
        plans.load(private / "plan.json")


def test_words_of_the_plan_that_do_not_follow_are_refused_by_name(private):
    document = read_json(private / "plan.json", "plan")
    for name, value in {
        "practice": not document["practice"],
        "deviations": {},
        "config": {**document["config"], "more": 1},
        "tasks": "0" * 64,
    }.items():
        reforge(private, **{name: value})
        with pytest.raises(Refused, match=f"{name} does not follow|unknown key {name}|unknown key more"):
            plans.load(private / "plan.json")
        reforge(private, **{name: document[name]})
    assert plans.load(private / "plan.json").id == document["plan_id"]


def test_left_out_tasks_are_refused_with_digests_that_fit(private):
    tasks = read_json(private / "tasks.json", "tasks")
    tasks["test"].pop()
    write_json(private / "tasks.json", tasks)
    reforge(private, tasks=plans.digest(tasks))
    with pytest.raises(Refused, match="tasks does not follow from the configuration"):
        plans.load(private / "plan.json")


def test_another_layout_is_refused(private):
    reforge(private, layout=0)
    with pytest.raises(Refused, match="layout 0"):
        plans.load(private / "plan.json")


def test_a_plan_that_is_not_practice_needs_a_gpu(private):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    document = read_json(private / "plan.json", "plan")
    unmarked = shutil.copytree(document["checkpoint"]["path"], private.parent / "unmarked")
    (unmarked / "practice.json").unlink()
    reforge(private, practice=False, checkpoint={"path": str(unmarked), **checkpoint.identity(unmarked)})
    done = stage_process("baseline", private)
    assert done.returncode == 2 and "no CUDA GPU" in done.stderr
    assert not (private / "baseline").exists()


def test_a_plan_whose_rollouts_exceed_the_models_positions_is_refused(practice, tmp_path):
    """Past them TRL takes its overlong path, which gives observations loss."""
    values = {**settings(practice), "agent": {"max_tokens": 4096}}
    with pytest.raises(Refused, match="exceed the checkpoint's 4096 positions"):
        plans.prepare(
            practice / "checkpoint", practice / "retention-baseline", config.resolve(values), tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


# ---- what the inputs must not be, and where the run must not go


@pytest.mark.parametrize("inside", ["checkpoint", "retention-baseline"])
def test_a_run_inside_what_it_rests_on_is_refused(private, tmp_path, inside):
    (tmp_path / "link").symlink_to(tmp_path / "practice" / inside)
    before = tree_digests(tmp_path / "practice")
    for output in (tmp_path / "practice" / inside / "runs" / "one", tmp_path / "link" / "one"):
        with pytest.raises(Refused, match=f"lies inside the {inside.replace('-', ' ')} .*{inside}, whose digest"):
            prepared(tmp_path / "practice", output)
    assert tree_digests(tmp_path / "practice") == before


def with_template(old: str, new: str):
    def change(folder: Path) -> None:
        path = folder / "chat_template.jinja"
        template = path.read_text()
        assert old in template
        path.write_text(template.replace(old, new, 1))

    return change


def with_added_token(token: str):
    def change(folder: Path) -> None:
        document = json.loads((folder / "tokenizer.json").read_text())
        new = {**document["added_tokens"][0], "id": 1033, "content": token, "special": False, "normalized": False}
        document["added_tokens"].append(new)
        (folder / "tokenizer.json").write_text(json.dumps(document))
        settings = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        embedding = weights["model.embed_tokens.weight"]
        weights["model.embed_tokens.weight"] = torch.cat([embedding, embedding[:7]])
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 1040}))

    return change


def replaced(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def with_token_beyond(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"].append({**document["added_tokens"][0], "id": 1033, "content": "<|new|>"})
    (folder / "tokenizer.json").write_text(json.dumps(document))


def with_bom(name: str):
    return lambda folder: (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())


SYSTEM = "<|im_start|>system\\n"
UNFIT = {
    "a template with today's date": (with_template(SYSTEM, SYSTEM + "' + strftime_now('%d.%m.%Y') + '"), "prints the date"),
    "a template that draws": (with_template("{%- if", "{%- set x = [1, 2] | random %}{%- if"), "draws at random"),
    "a template with an error": (with_template("{%- if", "{%- if if"), "chat template cannot render"),
    "an added token in a record": (with_added_token('"menge"'), "added token '\"menge\"' is a part of what the tools answer"),
    "an added token in an error": (with_added_token("Fehler"), "added token 'Fehler' is a part of what the tools answer"),
    "an added token in a rare error": (with_added_token("verschachtelt"), "added token 'verschachtelt' is a part"),
    "an added digit": (with_added_token("7"), "added token '7' is a part"),
    "an added number": (with_added_token("90210"), "added token '90210' is a part of .*a calculated number"),
    "a tokenizer of another model": (with_token_beyond, "with id 1033, config.json a vocabulary of 1033"),
    "a tokenizer that is a list": (replaced("tokenizer.json", b"[]"), "tokenizer in .* cannot be loaded"),
    "a tokenizer cut off": (replaced("tokenizer.json", b'{"version": "1.0", "trunc'), "tokenizer in .* cannot be loaded"),
    "a tokenizer's settings with a BOM": (with_bom("tokenizer_config.json"), "tokenizer in .* cannot be loaded"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_tokenizer_or_template_that_does_not_fit_is_one_line(practice, tmp_path, kind):
    change, named = UNFIT[kind]
    shutil.copytree(practice, tmp_path / "practice")
    change(tmp_path / "practice" / "checkpoint")
    rebound(tmp_path / "practice")
    with pytest.raises(Refused, match=named) as refused:
        prepared(tmp_path / "practice", tmp_path / "run")
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_an_added_token_that_nothing_answers_is_accepted(practice, tmp_path):
    shutil.copytree(practice, tmp_path / "practice")
    with_added_token("<|vision|>")(tmp_path / "practice" / "checkpoint")
    rebound(tmp_path / "practice")
    assert (prepared(tmp_path / "practice", tmp_path / "run") / "plan.json").is_file()


@pytest.fixture
def committed(tmp_path) -> Path:
    """A git checkout of this package's sources as they are now."""
    folder = tmp_path / "checkout"
    for name in package_sources():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "recipe" / "report.py").write_text("# read by people, frozen by none")
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", folder, *command], check=True)
    return folder


def test_sources_that_differ_or_were_deleted_since_the_commit_are_named(committed):
    sources = package_sources()
    assert repository.state(committed, sources, is_source, True)["uncommitted"] == []
    changed = {**sources, "recipe/merge.py": "0" * 64}
    assert repository.state(committed, changed, is_source, True)["uncommitted"] == ["recipe/merge.py"]
    changed.pop("recipe/grpo.py")
    assert repository.state(committed, changed, is_source, True)["uncommitted"] == ["recipe/grpo.py", "recipe/merge.py"]


def test_a_plan_from_a_checkout_with_a_deleted_source_is_refused(practice, tmp_path, committed, monkeypatch):
    shutil.copytree(practice, tmp_path / "practice")
    (tmp_path / "practice" / "checkpoint" / "practice.json").unlink()
    rebound(tmp_path / "practice")
    sources = package_sources()
    sources.pop("recipe/merge.py")
    monkeypatch.setattr(plans, "package_sources", lambda: sources)
    given = (tmp_path / "practice" / "checkpoint", tmp_path / "practice" / "retention-baseline")
    with pytest.raises(Refused, match="recipe/merge.py is in the last commit, but deleted here; commit that"):
        plans.prepare(*given, config.resolve(settings(practice)), tmp_path / "run", committed)


FIELDS = ("task_id", "prompt_ids", "ids", "mask", "spans", "turns", "events", "outcome", "reward", "sample")


@pytest.mark.parametrize("stage", ["baseline", "candidate"])
@pytest.mark.parametrize("field", FIELDS)
def test_one_field_of_an_evaluation_is_refused_by_name(copied, stage, field):
    edit(copied / stage / "rollouts.jsonl", f"3/{field}", another)
    with pytest.raises(Refused, match="rollouts.jsonl is not the one"):
        report_of(copied)
    reseal(copied / stage)
    # Other spans are another rollout, whose ids then do not fit: the first field that differs is named.
    with pytest.raises(CheckFailed, match=rf"{stage}/rollouts.jsonl record 3.*{'spans' if field == 'spans' else f'field {field}'}"):
        report_of(copied)


@pytest.mark.parametrize("field", (*FIELDS[:-1], "advantage"))
def test_one_field_of_a_training_rollout_is_refused_by_name(copied, field):
    edit(copied / "grpo" / "steps" / "step-0002.json", f"rollouts/1/{field}", another)
    reseal(copied / "grpo")
    with pytest.raises(CheckFailed, match=rf"step-0002.json.*{'spans' if field == 'spans' else f'field {field}'}"):
        report_of(copied)


def test_every_event_turn_and_outcome_entry_is_checked(copied):
    path = copied / "baseline" / "rollouts.jsonl"
    untouched = path.read_bytes()
    row, record = next((n, r) for n, r in enumerate(map(json.loads, untouched.splitlines())) if r["events"])
    for field, part in (("events/0", record["events"][0]), ("turns/0", record["turns"][0]), ("outcome", record["outcome"])):
        for key in part:
            path.write_bytes(untouched)
            edit(path, f"{row}/{field}/{key}", another)
            reseal(copied / "baseline")
            with pytest.raises(CheckFailed, match=f"field {field.split('/')[0]}"):
                report_of(copied)


def spoil_metric(run):
    edit(run / "candidate" / "result.json", "metrics/strict_success", another)
    rewrite_attempts(run)


def spoil_training_metric(run):
    edit(run / "grpo" / "result.json", "metrics/mixed_groups", another)
    rewrite_attempts(run)


def spoil_step_order(run):
    one, two = (run / "grpo" / "steps" / f"step-000{number}.json" for number in (1, 2))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    edit(one, "step", 1)
    edit(two, "step", 2)
    reseal(run / "grpo")


def spoil_missing_step(run):
    (run / "grpo" / "steps" / "step-0003.json").unlink()
    reseal(run / "grpo")


def spoil_missing_item(run):
    edit(run / "candidate" / "rollouts.jsonl", "7", REMOVED)
    reseal(run / "candidate")


def spoil_learning_rate(run):
    edit(run / "grpo" / "steps" / "step-0005.json", "metrics/learning_rate", lambda rate: 3 * rate)
    reseal(run / "grpo")


def spoil_protocol(run):
    edit(run / "grpo" / "protocol.json", "loss.kl", 0.0)
    reseal(run / "grpo")


def spoil_validation(run):
    edit(run / "grpo" / "validation" / "step-0004.jsonl", "0/reward", another)
    reseal(run / "grpo")


def spoil_adapter(run):
    flip(run / "grpo" / "adapter" / "adapter_model.safetensors", -1)
    reseal(run / "grpo")


def spoil_merged_weights(run):
    flip(run / "merge" / "checkpoint" / "model.safetensors", -1)
    reseal(run / "merge")


def spoil_retention(run):
    edit(run / "retention" / "outputs.jsonl", "0/correct", another)
    reseal(run / "retention")


def spoil_another_plan(run):
    edit(run / "baseline" / "result.json", "plan_id", "0" * 64)


SPOILERS = {
    spoil_metric: "stage candidate: metric strict_success",
    spoil_training_metric: "stage grpo: metric mixed_groups",
    spoil_step_order: "frozen order",
    spoil_missing_step: "grpo/steps",
    spoil_learning_rate: "step-0005.json: metric learning_rate is 0.003, the schedule gives 0.001",
    spoil_protocol: "grpo/protocol.json: loss.kl is 0.0, not 0.02",
    spoil_missing_item: "15 records for the 16 frozen items",
    spoil_validation: "validation/step-0004.jsonl.*field reward",
    spoil_adapter: "v_proj.weight has .* where base . adapter give",
    spoil_merged_weights: "merge/checkpoint/model.safetensors: model.* where the base has|base . adapter give",
    spoil_retention: "field correct",
    spoil_another_plan: "belongs to plan",
}


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_altered_evidence_is_refused_and_no_summary_is_written(copied, spoil):
    spoil(copied)
    with pytest.raises((CheckFailed, Refused), match=SPOILERS[spoil]):
        report_of(copied)
    assert not (copied.parent / "again").exists()


def test_a_finished_run_is_reported_by_later_code(copied):
    """Sources that have changed since decide nothing any more; the recorded commit must hold those that did."""
    sources = dict(read_json(copied / "plan.json", "plan")["sources"])
    reforge(copied, sources={**sources, "recipe/orders/judge.py": "0" * 64})
    with pytest.raises(Refused, match="recipe/orders/judge.py is changed .* frozen from .* at commit .*: start that, or prepare"):
        plans.load(copied / "plan.json")
    assert plans.load(copied / "plan.json", check_sources=False).id


def test_plots_report_and_practice_are_no_frozen_sources_and_all_else_is():
    frozen = set(package_sources())
    code = {path.relative_to(ROOT).as_posix() for folder in ("recipe", "experiments") for path in (ROOT / folder).rglob("*.py")}
    assert {path for path in code - frozen if not path.startswith("recipe/practice/")} == {
        "experiments/report.py", "recipe/progress.py", "recipe/report.py",
        *(path for path in code if path.startswith("recipe/verify/")),
    }  # fmt: skip
    assert {"recipe/policy/engine/linear.py", "recipe/orders/judge.py", "recipe/run/evidence.py"} <= frozen <= code


@pytest.mark.parametrize("name", ["tqdm/__init__.py", "numpy.py", "torch.so"])
def test_a_module_in_the_root_of_the_checkout_is_refused(monkeypatch, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    for own in (*OWN, "runs"):
        (tmp_path / own).mkdir()
        (tmp_path / own / "__init__.py").touch() if own != "runs" else None
    monkeypatch.setattr("recipe.run.sources.ROOT", tmp_path)
    with pytest.raises(Refused, match=f"{name.split('/')[0]} would come before an installed module"):
        nothing_in_the_way()


@pytest.mark.parametrize(
    ("commit", "line"),
    [("HEAD", "sources: .* in commit HEAD is not the one"), ("0" * 40, "git said no to commit 000000000000 of .*: fatal: ")],
    ids=["other sources", "no such commit"],
)
def test_sources_that_the_recorded_commit_does_not_prove_fail_the_report(copied, commit, line):
    if not (ROOT / ".git").exists():
        pytest.skip("the tests run outside of a git checkout")
    plan = plans.load(copied / "plan.json")
    state, sources = plans.Repository(str(ROOT), commit, []), {**plan.frozen.sources, "recipe/errors.py": "0" * 64}
    plan = replace(plan, frozen=replace(plan.frozen, repository=state, sources=sources))
    with pytest.raises((CheckFailed, Refused), match=line):
        report.verified(plan)
