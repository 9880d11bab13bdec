"""A sweep's pure parts: the space as a YAML has it, the rule of choice, and what the searcher hears of a trial."""

from types import SimpleNamespace

import pytest
import yaml

from recipe.errors import Refused
from recipe.run import cluster
from recipe.sweep import choice, space
from recipe.sweep.choice import Tried
from runs import ROOT
from tools.driver import sweep

GRID = {
    "hyperparameters": {
        "grpo": {"learning_rate": {"type": "categorical", "vals": ["1e-4", 0.001]}},
        "seed": {"type": "int", "minval": 1, "maxval": 2, "count": 2},
    },
    "searcher": {"name": "grid", "max_concurrent_trials": 2},
}
POINTS = [{"grpo.learning_rate": rate, "grpo.seed": seed} for rate in (1e-4, 1e-3) for seed in (1, 2)]


# ---- the space


def refused(hyperparameters: dict, **searcher) -> str:
    document = {"hyperparameters": hyperparameters, "searcher": {**GRID["searcher"], **searcher}}
    with pytest.raises(Refused) as refusal:
        space.of(document, {}, "space.yaml")
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_space_is_read_in_determined_s_own_form():
    found = space.of(GRID, {}, "space.yaml")
    assert found.grid() == POINTS
    dotted = {"grpo.learning_rate": GRID["hyperparameters"]["grpo"]["learning_rate"], "grpo.kl": 0}
    found = space.of({**GRID, "hyperparameters": dotted}, {}, "space.yaml")
    assert [*found.parameters] == ["grpo.learning_rate"] and found.constants == {"grpo.kl": 0.0}
    assert found.overrides({"grpo.learning_rate": 1e-4}) == {"grpo": {"kl": 0.0, "learning_rate": 1e-4}}


def test_the_shipped_space_is_one():
    shipped = yaml.safe_load((ROOT / "determined_configs" / "sweep.yaml").read_text())
    assert len(space.of(shipped, {}, "sweep.yaml").grid()) == 6


@pytest.mark.parametrize(
    ("parameter", "points"),
    [
        ({"type": "log", "base": 10, "minval": -5, "maxval": -3, "count": 3}, [1e-5, 1e-4, 1e-3]),
        ({"type": "double", "minval": 0.0, "maxval": 0.1, "count": 3}, [0.0, 0.05, 0.1]),
        ({"type": "double", "minval": 0.0, "maxval": 0.1, "count": 1}, [0.05]),
    ],
)
def test_a_grid_has_the_points_that_the_masters_make(parameter, points):
    found = space.of({**GRID, "hyperparameters": {"grpo.kl": parameter}}, {}, "space.yaml")
    assert [point["grpo.kl"] for point in found.grid()] == pytest.approx(points)


@pytest.mark.parametrize(
    ("hyperparameters", "words"),
    [
        ({"grpo.learning_rat": {"type": "categorical", "vals": [1]}}, "unknown configuration key grpo.learning_rat; did you mean grpo.learning_rate?"),
        ({"learning_rate": 0.1}, "did you mean grpo.learning_rate?"),
        ({"grpo": {"stepps": 8}}, "did you mean grpo.steps?"),
        ({"sed": 1}, "did you mean seed?"),
        ({"tasks.seed": {"type": "categorical", "vals": [1, 2]}}, "tasks.seed decides what is measured"),
        ({"agent": {"max_tokens": 8}}, "agent.max_tokens decides what is measured"),
        ({"grpo.validation_every": 4}, "decides what is measured or when"),
        ({"grpo.kl": {"type": "doubel", "minval": 0, "maxval": 1}}, "grpo.kl.type must be one of"),
        ({"grpo.kl": {"type": "double", "minval": 0, "maxval": 1}}, "grpo.kl.count is missing"),
        ({"grpo.kl": {"type": "double", "minval": 1, "maxval": 0, "count": 2}}, "minval must be less than maxval"),
        ({"grpo.kl": {"type": "categorical", "vals": []}}, "must be different values"),
        ({"grpo.kl": {"type": "categorical", "vals": [0, 0.0]}}, "must be different values"),
        ({"grpo.kl": {"type": "categorical", "vals": [-1]}}, "grpo.kl is out of range: -1.0"),
        ({"grpo.kl": {"type": "categorical", "vals": ["much"]}}, "grpo.kl must be float, not 'much'"),
        ({"grpo.steps": {"type": "categorical", "vals": [9]}}, "grpo.steps=9 must be a multiple of grpo.validation_every=8"),
        ({"grpo.kl": 0.1}, "no hyperparameter varies"),
        ({"seed": {"type": "categorical", "vals": [1]}, "grpo.seed": 2}, "grpo.seed stands in the space twice"),
        ({"seed": {"type": "int", "minval": 1, "maxval": 9999, "count": 9999}}, "count from 1 to 1000"),
    ],
)  # fmt: skip
def test_what_no_trial_could_be_trained_or_compared_with_is_refused(hyperparameters, words):
    assert words in refused(hyperparameters)


def test_a_searcher_s_misspelt_setting_is_refused_with_the_nearest_name():
    varies = GRID["hyperparameters"]
    assert "did you mean max_concurrent_trials?" in refused(varies, max_concurent_trials=2)
    assert "searcher.name must be one of grid, random, adaptive_asha" in refused(varies, name="adaptive")
    assert "searcher.max_trials must be given" in refused(varies, name="random")


def test_each_version_gets_the_searcher_that_it_takes():
    document = {**GRID, "searcher": {"name": "adaptive_asha", "max_trials": 6, "stop_once": True}}
    halving, grid = (space.of(one, {}, "space.yaml") for one in (document, GRID))
    old, new = (sweep.searcher(halving, 32, version) for version in ("0.35.0", "0.38.1"))
    assert old["max_length"] == {"batches": 32} and "max_time" not in old and old["stop_once"]
    assert (new["time_metric"], new["max_time"]) == ("batches", 32) and not {"max_length", "stop_once"} & new.keys()
    assert {sweep.searcher(grid, 32, version)["max_length"]["batches"] for version in ("0.35.0", "0.38.1")} == {32}


# ---- the rule


def tried(name: str, rate: float, rates: list[float], seed: int = 1, **more) -> Tried:
    plain = {"step": 4, "steps": 4, "failed": False, "kl": rate, "learning_rate": rate}
    return Tried(name, {"grpo.learning_rate": rate, "grpo.seed": seed}, rates, **{**plain, **more})


HALF, LESS, NONE = [1.0, 0.0] * 8, [1.0, 0.0] * 7 + [0.0, 0.0], [0.0] * 16


def test_within_one_standard_error_the_smaller_change_is_chosen():
    found = choice.choose([tried("a", 0.3, HALF), tried("b", 0.2, LESS), tried("c", 0.1, NONE)])
    assert found.best == {"grpo.learning_rate": 0.3} and found.chosen == {"grpo.learning_rate": 0.2}
    assert [one.trials for one in found.configurations] == [["a"], ["b"], ["c"]]
    assert found.change == "mean KL of the last interval"
    without = choice.choose([tried("a", 0.3, HALF, kl=None), tried("b", 0.2, LESS)])
    assert without.change == "learning rate times steps" and without.chosen == {"grpo.learning_rate": 0.2}


def test_seeds_count_together_and_their_spread_apart_from_that_of_items():
    lucky = [tried("a", 0.3, [1.0] * 16, 1), tried("b", 0.3, NONE, 2)]
    steady = [tried("c", 0.2, HALF, 1), tried("d", 0.2, HALF, 2)]
    found = choice.choose([*lucky, *steady])
    both = {one.trials[0]: one for one in found.configurations}
    assert both["a"].mean == both["c"].mean == 0.5 and found.chosen == {"grpo.learning_rate": 0.2}
    assert both["a"].between_seeds == pytest.approx(0.5**0.5) and both["a"].between_items == 0.0
    assert both["c"].between_seeds == 0.0 and both["c"].between_items == pytest.approx(0.516, abs=1e-3)
    assert choice.choose(steady[:1]).configurations[0].between_seeds is None  # one seed says nothing of others


def test_the_stopped_count_and_the_failed_bar():
    stopped = tried("b", 0.3, NONE, 2, step=2)
    found = choice.choose([tried("a", 0.3, [1.0] * 16, 1), stopped, tried("c", 0.2, HALF, 1)])
    assert {one.trials[0]: one.mean for one in found.configurations} == {"a": 0.5, "c": 0.5}
    assert choice.choose([stopped]).configurations[0].barred == "none of its trials reached its last step"
    failed = [tried("a", 0.3, HALF, 1), tried("b", 0.3, HALF, 2, failed=True)]
    assert choice.choose(failed).chosen is None and choice.choose([*failed, tried("c", 0.1, NONE)]).chosen == {
        "grpo.learning_rate": 0.1
    }
    assert choice.choose([tried("a", 0.3, [])]).configurations[0].barred == "a was never measured"


# ---- the searcher's side of a trial


class Session:
    """A 0.35 master's operations, or a 0.38 master's ``answer`` that it has no such path."""

    state = "STATE_RUNNING"

    def __init__(self, *lengths: int, answer: int | None = None):
        self.lengths, self.answer, self.completed, self.acked, self.asked = list(lengths), answer, [], False, 0

    def get(self, path):
        self.asked += 1
        if path == "/api/v1/trials/7":
            return SimpleNamespace(json=lambda: {"trial": {"state": self.state}})
        if self.answer is not None:
            from determined.common.api.errors import APIException
            from requests import Response

            response = Response()
            response.status_code = self.answer
            raise APIException(response)
        length = self.lengths[0] if self.lengths else 0
        answer = {"completed": not self.lengths, "op": {"validateAfter": {"length": str(length)}}}
        return SimpleNamespace(json=lambda: answer)

    def post(self, path, json=None):
        if path.endswith("ack_preemption"):
            self.acked = True
            return
        assert path == "/api/v1/trials/7/searcher/completed_operation"
        self.completed.append((json["op"]["length"], json["searcherMetric"]))
        assert self.lengths.pop(0) == json["op"]["length"]


def test_lengths_are_completed_where_a_master_gives_them(monkeypatch):
    monkeypatch.setenv("DET_ALLOCATION_ID", "a.1")
    session = Session(4, 16, 40)
    search = cluster._Search(session, 7)
    search.measured(2, 0.1, False)
    assert session.completed == [] and not search.over
    search.measured(8, 0.2, False)
    search.measured(16, 0.3, False)
    assert session.completed == [(4, 0.2), (16, 0.3)] and not session.acked
    search.measured(32, 0.4, True)  # a searcher that adds its rungs up asks for more than there is
    assert session.completed[-1] == (40, 0.4) and search.over and session.acked


def test_without_a_next_length_the_trial_leaves(monkeypatch):
    monkeypatch.setenv("DET_ALLOCATION_ID", "a.1")
    session = Session(4)
    search = cluster._Search(session, 7)
    search.measured(4, 0.2, False)
    assert search.over and session.acked


def test_progress_after_the_last_length_is_no_crash():
    asked = []
    searcher = SimpleNamespace(operations=lambda *mode, auto_ack: asked.append(auto_ack) or iter(()))
    cluster._progress(SimpleNamespace(train=object(), searcher=searcher))(0.5)
    assert asked == [False]  # the trial itself says when it leaves


@pytest.mark.parametrize("answer", [404, 501])
def test_a_master_without_lengths_is_asked_whether_it_has_stopped_the_trial(answer):
    session = Session(answer=answer)
    search = cluster._Search(session, 7)
    search.measured(4, 0.2, False)
    search.measured(8, 0.2, True)
    assert session.asked == 1 and not search.stopped()
    session.state = "STATE_STOPPING_COMPLETED"  # all that a 0.38.1 master does of a trial that its searcher stops
    assert search.stopped() and search.stopped() and session.asked == 3


def test_another_answer_of_a_master_is_no_answer():
    from determined.common.api.errors import APIException

    with pytest.raises(APIException):
        cluster._Search(Session(answer=500), 7).measured(4, 0.2, False)
