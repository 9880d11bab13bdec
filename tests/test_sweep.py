"""A sweep: its frozen folder, its trials without a test split, the table and the promotion.

Training is played by a function that writes measurements; a real one, on a master, is in test_driver_on_master.py.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from recipe.errors import Refused
from recipe.files import write_json, write_lines
from recipe.records import read_json
from recipe.run import entrypoint
from recipe.run import plan as plans
from recipe.run.cluster import Runtime
from recipe.run.evidence import Evaluated, Step, Trained, aggregate, step_name, validation_name
from recipe.run.plan import PLAN, TASKS
from recipe.run.result import Done
from recipe.stages import NAMES
from recipe.sweep import choice, frozen, table, trial
from recipe.task import family
from runs import settings
from test_sweep_rules import GRID, POINTS
from tools.driver import sweep, sweep_commands, sweep_page

# ---- a sweep whose training is played


@pytest.fixture
def guarded_family(monkeypatch):
    """The family of the practice checkpoint, whose test split nobody may draw."""
    one, drawn = family("orders"), []
    draw = one.draw

    def guarded(split, number, rng):
        drawn.append(split)
        assert split != "test", "the test split was drawn"
        return draw(split, number, rng)

    object.__setattr__(one, "draw", guarded)
    yield drawn
    object.__setattr__(one, "draw", draw)


@pytest.fixture
def swept(practice, tmp_path) -> frozen.Sweep:
    """A frozen grid of four trials."""
    overrides = settings(practice, grpo={"steps": 4, "validation_every": 2})
    return frozen.freeze(
        practice / "checkpoint", practice / "retention-baseline", overrides, GRID, "space.yaml", tmp_path / "sweep"
    )


def measured(plan, solved: int) -> list[Evaluated]:
    """Development rollouts of which the first ``solved`` tasks succeed."""
    samples = plan.config.grpo.validation_samples
    return [
        Evaluated(
            task.task_id, [1], [1], [1], [[1]], [], [], {"strict_success": number < solved, "tokens": 1}, 0.0, sample
        )
        for number, task in enumerate(plan.splits["development"])
        for sample in range(samples)
    ]


def play(solved, steps: int | None = None, kl: float = 0.01, failure: str | None = None):
    """A training that measures development at step 0 and every other step, and solves ``solved(plan)`` in the end."""

    def train(stage):
        plan, folder = stage.plan, stage.folder
        stage.began(0)
        known = stage.baseline()
        for step in range(0, (steps or plan.config.grpo.steps) + 1):
            if step:
                record = Trained(
                    "train-000", [1], [1], [1], [[1]], [], [], {"strict_success": True, "tokens": 5}, 1.0, 0.0
                )
                write_json(
                    folder / "steps" / step_name(step), asdict(Step(step, [record], {"grad_norm": 1.0, "kl": kl}))
                )
            if step % 2 == 0:
                records = measured(plan, solved(plan) if step else 1)
                path = folder / "validation" / validation_name(step)
                if step == 0 and known is not None:
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(known)
                else:
                    write_lines(path, map(asdict, records))
                stage.report("validation", step, aggregate(records))
        if steps is not None:
            return stage.paused(steps)
        return Done({"steps": 4}, {}, failure)

    return train


def better_at(rate: float):
    return lambda plan: 3 if plan.config.grpo.learning_rate == rate else 1


def runtime(**more) -> Runtime:
    plain = dict(report=lambda *_: None, should_pause=lambda: False, store=lambda *_: None)
    return Runtime({}, **{**plain, **more})


def played(swept, train, points=POINTS) -> table.Table:
    for number, point in enumerate(points, 1):
        trial.run(swept, f"trial-{number}", point, runtime(), train)
    found = table.gather(swept, sweep.on_disk(swept), None)
    table.write(swept, found)
    return found


def test_no_code_path_of_a_sweep_draws_or_keeps_the_test_split(guarded_family, swept, capsys):
    played(swept, play(better_at(1e-3)))
    loaded = frozen.load(swept.folder)
    there, _ = table.load(loaded)
    sweep.finish(loaded, there, print)
    print(*sweep.status(loaded, pytest.fail), sep="\n")
    assert set(guarded_family) == {"train", "development"}
    written = [path for path in swept.folder.rglob("*") if path.is_file()]
    assert len([path for path in written if path.name == TASKS]) == len(POINTS)
    for path in written:
        assert b"test-0" not in path.read_bytes(), path  # the ids of its tasks
        if path.name == TASKS:
            assert read_json(path, "the tasks").keys() == {"train", "development"}
    plan = plans.load_run(swept.run("trial-1"))
    assert plan.splits.keys() == {"train", "development"} and plan.kind == "practice"
    assert (
        replace(plan.frozen, practice=False).trial
        and replace(plan, frozen=replace(plan.frozen, practice=False)).kind == "trial"
    )


def test_the_draw_is_guarded_at_all(guarded_family, practice, tmp_path):
    with pytest.raises(AssertionError, match="the test split was drawn"):
        plans.prepare(
            practice / "checkpoint",
            practice / "retention-baseline",
            plans.complete(settings(practice)),
            tmp_path / "run",
        )


def test_splits_do_not_depend_on_whether_the_test_split_is_drawn(swept):
    plan = plans.freeze(swept.plan(POINTS[0], "here"), swept.run("trial-1"))
    whole = plans._generated(plan.config, None)
    assert {name: whole[name] for name in plan.splits} == plan.splits and whole["test"]


@pytest.mark.parametrize("stage", NAMES)
def test_no_stage_takes_a_trial_s_plan(swept, stage, monkeypatch, capsys):
    plan = plans.freeze(swept.plan(POINTS[0], "here"), swept.run("trial-1"))
    monkeypatch.setattr("sys.argv", [stage, "--plan", str(plan.run / PLAN)])
    with pytest.raises(SystemExit) as ended:
        entrypoint.main(stage, "", lambda stage: pytest.fail("it ran"))
    assert ended.value.code == 2 and "which has no test split" in capsys.readouterr().err


def test_a_trial_with_a_test_split_is_no_plan(swept):
    plan = plans.freeze(swept.plan(POINTS[0], "here"), swept.run("trial-1"))
    tasks = read_json(plan.run / TASKS, "the tasks")
    write_json(
        plan.run / TASKS, {**tasks, "test": [task.record() for task in plans._generated(plan.config, None)["test"]]}
    )
    with pytest.raises(Refused, match="tasks.json was altered"):
        plans.load_run(plan.run)


def test_preflight_and_baseline_are_done_once_and_shared_by_digest(swept, monkeypatch):
    from recipe import preflight

    checks, check = [], preflight.check
    monkeypatch.setattr(preflight, "check", lambda stage: checks.append(stage.name) or check(stage))
    measurements = []
    train = play(better_at(1e-3))

    def counted(stage):
        measurements.append(stage.baseline() is None)
        return train(stage)

    played(swept, counted)
    assert checks == ["preflight"] and measurements == [True, False, False, False]
    firsts = {
        (swept.run(f"trial-{number}") / "grpo" / "validation" / "step-0000.jsonl").read_bytes()
        for number in range(1, 5)
    }
    assert len(firsts) == 1
    (shared,) = (swept.folder / "shared").glob("development-*.jsonl")
    assert shared.read_bytes() in firsts


def test_a_trial_waits_for_the_one_that_measures_the_baseline_and_leaves_if_asked(swept):
    plan = plans.freeze(swept.plan(POINTS[0], "here"), swept.run("trial-1"))
    first, second = (trial._Baseline(plan, swept.folder / "shared") for _ in range(2))
    assert first.taken(pytest.fail)
    assert not second.taken(lambda: True)
    with first:
        pass  # its process ended
    assert second.taken(pytest.fail)


def test_reports_carry_the_time_and_lengths_are_told_but_the_last_only_at_the_end(swept):
    reports, told = [], []

    def report(group, step, metrics):
        reports.append((group, step, metrics))

    def measured(step, metric, last):
        assert last == (swept.run("trial-1") / "grpo" / "result.json").exists()
        told.append((step, metric, last))

    trial.run(swept, "trial-1", POINTS[0], runtime(report=report, measured=measured), play(lambda plan: 2))
    assert [step for group, step, _ in reports] == [0, 2, 4]
    assert all(metrics["batches"] == step and trial.METRIC in metrics for _, step, metrics in reports)
    assert told == [(2, 0.5, False), (4, 0.5, True)]


def test_hyperparameters_outside_the_frozen_space_are_refused(swept):
    for point, words in (
        ({**POINTS[0], "grpo.learning_rate": 0.5}, "grpo.learning_rate=0.5 lies outside"),
        ({"grpo.seed": 1}, "grpo.learning_rate is missing"),
        ({**POINTS[0], "grpo.kl": 0.1}, "grpo.kl is none of this sweep's"),
    ):
        with pytest.raises(Refused, match=words):
            swept.plan(point, "trial-1")


def test_a_sweep_that_was_altered_is_refused(swept):
    path = swept.folder / frozen.NAME
    document = json.loads(path.read_text())
    write_json(path, {**document, "rule": "the best"})
    with pytest.raises(Refused, match="was altered after it was frozen"):
        frozen.load(swept.folder)
    write_json(path, {**document, "space": {**document["space"], "constants": {"grpo.kl": 0.5}}})
    with pytest.raises(Refused, match="altered"):
        frozen.load(swept.folder)


# ---- the table and what follows


def test_a_grid_runs_here_one_process_after_another_and_goes_on_after_a_stop(swept, monkeypatch, capsys):
    stopped = [True]

    def process(command, log):
        assert command[2:4] == ["experiments.sweep", "--sweep"] or command[1:3] == ["-m", "experiments.sweep"]
        number = int(command[-1])
        steps = 2 if number == 3 and stopped.pop() else None
        trial.run(swept, f"trial-{number}", POINTS[number - 1], runtime(), play(better_at(1e-3), steps))
        return sweep.process.Ended(0, None, None)

    monkeypatch.setattr(sweep.process, "run", process)
    assert sweep.local(swept, print) == 0 and not (swept.folder / table.NAME).exists()
    assert "trial-3: paused; the same command goes on" in capsys.readouterr().out
    stopped.append(False)
    assert sweep.local(swept, print) == 0
    said = capsys.readouterr().out
    assert (
        said.count(": done\n") == 2
        and "chosen among 4 trials on development: learning_rate=0.001 (mean 0.750 over 2 seeds)" in said
    )
    assert table.load(swept)[0].over


def test_the_record_is_derived_again(swept):
    found = played(swept, play(better_at(1e-3)))
    assert table.load(swept)[0] == found
    document = read_json(swept.folder / table.NAME, "the record")
    document["trials"][0]["development"][-1]["success"] = 1.0
    write_json(swept.folder / table.NAME, document)
    with pytest.raises(Refused, match="trial trial-1 is not what its evidence gives"):
        table.load(swept)
    document = asdict(found)
    document["choice"]["chosen"] = {"grpo.learning_rate": 1e-4}
    write_json(swept.folder / table.NAME, document)
    with pytest.raises(Refused, match="choice is not what the trials give"):
        table.load(swept)


def test_stopped_and_failed_trials_are_told_apart_by_the_master_s_word(swept):
    trial.run(swept, "trial-1", POINTS[0], runtime(), play(better_at(1e-3), steps=2))
    trial.run(swept, "trial-2", POINTS[1], runtime(), play(better_at(1e-3), failure="it diverged"))
    known = [
        table.Known("trial-1", POINTS[0], "COMPLETED"), table.Known("trial-2", POINTS[1], "COMPLETED"),
        table.Known("trial-3", POINTS[2], "ERROR"), table.Known("trial-4", POINTS[3], None),
    ]  # fmt: skip
    found = table.gather(swept, known, None)
    assert [row.state for row in found.trials] == ["stopped early", "failed", "failed", "unfinished"]
    assert [(row.step, row.steps) for row in found.trials[:2]] == [(2, 4), (4, 4)]
    assert found.trials[1].failure == "it diverged" and not found.over
    assert found.choice.chosen is None
    assert {one.barred for one in found.choice.configurations} == {"trial-2 failed", "trial-3 failed"}


def test_a_trial_that_crashed_while_it_was_stopped_is_no_stopped_one(swept):
    """A 0.35 master calls it completed: what acknowledged the signal may leave as it likes."""

    def crash(stage):
        stage.began(0)
        raise KeyError

    with pytest.raises(KeyError):
        trial.run(swept, "trial-1", POINTS[0], runtime(), crash)
    (row,) = table.gather(swept, [table.Known("trial-1", POINTS[0], "COMPLETED")], None).trials
    assert (row.state, row.failure) == ("failed", "ended COMPLETED on the cluster, having neither finished nor saved")


def test_the_winner_s_plan_says_what_it_was_chosen_by(swept, tmp_path, capsys):
    with pytest.raises(Refused, match="it is written when all trials have ended"):
        sweep_commands.promote(swept.folder, tmp_path / "pilot")
    played(swept, play(better_at(1e-3)))
    sweep_commands.promote(swept.folder, tmp_path / "pilot")
    plan = plans.load(tmp_path / "pilot" / PLAN)
    chosen = plan.frozen.chosen
    assert (chosen.sweep, chosen.trials, chosen.split, chosen.rule) == (swept.id, 4, "development", choice.RULE)
    assert chosen.record == table.load(swept)[1] and chosen.hyperparameters == {"grpo.learning_rate": 1e-3}
    assert plan.frozen.trial is None and plan.splits["test"] and plan.config.grpo.learning_rate == 1e-3
    assert plan.config.grpo.seed == plans.complete({}).grpo.seed  # of the shared configuration, not the luckiest one
    assert "chosen among 4 trials on development" in capsys.readouterr().out


def test_the_page_shows_every_seed_and_opens_nothing(swept):
    found = played(swept, play(better_at(1e-3)))
    page = sweep_page.html(found, sweep.verdict(found)).decode()
    assert page.count('<circle class="seed"') == 4 and page.count('class="bar won"') == 3
    assert "default-src 'none'" in page and "http://" not in page and "<script" not in page and " style=" not in page
    assert "chosen among 4 trials on development" in page and "practice checkpoint" in page and choice.UNSEEN[0] in page


def test_the_command_line_refuses_in_one_line(practice, tmp_path, monkeypatch, capsys):
    from tools.driver.commands import main

    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump({**GRID, "hyperparameters": {"grpo.learning_rat": 1}}))
    inputs = ["--model", str(practice / "checkpoint"), "--retention-baseline", str(practice / "retention-baseline")]
    monkeypatch.setattr("sys.argv", ["driver", "sweep", *inputs, "--space", str(path), "--output", str(tmp_path / "s")])
    assert main() == 2  # before any master is asked
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: ") and "did you mean grpo.learning_rate?" in line and not (tmp_path / "s").exists()
    path.write_text(yaml.safe_dump({**GRID, "searcher": {"name": "random", "max_trials": 2}}))
    monkeypatch.setattr("sys.argv", [*__import__("sys").argv, "--local"])
    assert main() == 2 and "needs a master" in capsys.readouterr().err
    assert Path(tmp_path / "s").exists()


def test_another_input_than_the_frozen_one_is_named(swept, practice, tmp_path, monkeypatch, capsys):
    from tools.driver.commands import main

    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump({**GRID, "searcher": {"name": "grid"}}))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(swept.frozen.config))
    inputs = ["--model", str(practice / "checkpoint"), "--retention-baseline", str(practice / "retention-baseline")]
    argv = [
        "driver",
        "sweep",
        "--local",
        *inputs,
        "--config",
        str(config),
        "--space",
        str(path),
        "--output",
        str(swept.folder),
    ]
    monkeypatch.setattr("sys.argv", argv)
    assert main() == 2 and "was frozen with another --space" in capsys.readouterr().err
