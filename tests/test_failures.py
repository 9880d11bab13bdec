"""Where rollouts fail: each has exactly one kind, read from events and outcome alone, and pairs move as they do."""

from collections import Counter
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.policy.chat import parse_turn
from recipe.records import parse
from recipe.run.evidence import Evaluated, read_rollouts
from recipe.run.plan import load_run
from recipe.task import FAMILIES, family
from recipe.task.environment import begin_turn, events, execute
from recipe.task.failure import ANSWER, CUT, ORDER, SOLVED, UNREADABLE, kind, kinds
from recipe.task.scripts import answer, call
from recipe.verify.failures import Failures, failures
from recipe.verify.markdown import failing

SIZES = {"train": 2, "development": 1, "test": 3}
TASKS = {name: family(name).generate(3, SIZES)["test"] for name in FAMILIES}


def played(name: str, task, turns: list[str], cut: bool = False):
    """Events and outcome of a policy that says ``turns``, the last of them cut off or not; and what it said."""
    made, said = family(name).environment(), []
    made.reset(task.record())
    for number, visible in enumerate(turns):
        turn = parse_turn(visible, finished=not (cut and number == len(turns) - 1))
        said.append(turn)
        begin_turn(made, number)
        for one in turn.calls:
            execute(made, one.name, one.arguments)
        if not turn.calls:
            break
    ended = cut and len(said) == len(turns)
    return events(made), family(name).judge(task, said, events(made), hit_cap=ended, tokens=9), said


def kind_of(name: str, task, turns: list[str], cut: bool = False) -> str:
    seen, outcome, _ = played(name, task, turns, cut)
    return kind(family(name), task, seen, asdict(outcome))


def record(name: str, task, turns: list[str], sample: int = 0, cut: bool = False) -> Evaluated:
    seen, outcome, _ = played(name, task, turns, cut)
    return Evaluated(task.task_id, [], [], [], [], [], list(seen), asdict(outcome), 0.0, sample)


# ---- one rollout

ORDER_TASK = TASKS["orders"][0]
LOOK = call("lookup", record_id=ORDER_TASK.record_id)
MULTIPLY = call("calculator", expression=f"{ORDER_TASK.quantity} * {ORDER_TASK.unit_price}")
INVENTED = call("calculator", expression="10 * 100")
RIGHT = answer(ORDER_TASK.total)


@pytest.mark.parametrize(
    ("turns", "cut", "wanted"),
    [
        ([LOOK, MULTIPLY, RIGHT], False, SOLVED),
        ([LOOK, MULTIPLY, answer(1)], False, ANSWER),
        ([LOOK, MULTIPLY, "Fertig."], False, UNREADABLE),
        ([LOOK, MULTIPLY, "Das"], True, CUT),
        ([LOOK, MULTIPLY, LOOK], False, UNREADABLE),  # calls to the end
        ([RIGHT], False, "no lookup"),
        ([MULTIPLY, RIGHT], False, "no lookup"),  # however its numbers were found
        (["Ich denke"], True, CUT),  # nothing was omitted that there was room for
        ([call("lookup", record_id="B"), RIGHT], False, "wrong record"),
        ([call("lookup", record_id="B"), "Ich"], True, "wrong record"),  # this went wrong before the end
        ([LOOK, RIGHT], False, "no calculation"),
        ([LOOK, "Also"], True, CUT),
        ([LOOK, INVENTED, RIGHT], False, "calculation not from retrieved values"),
        ([LOOK, call("calculator", expression="3 mal 4"), RIGHT], False, "calculation not from retrieved values"),
        ([f"{LOOK}\n{MULTIPLY}", RIGHT], False, ORDER),
        ([MULTIPLY, LOOK, RIGHT], False, ORDER),
        ([f"{LOOK}\n{INVENTED}", RIGHT], False, "calculation not from retrieved values"),
    ],
)
def test_the_kind_is_the_first_milestone_that_was_missed(turns, cut, wanted):
    assert kind_of("orders", ORDER_TASK, turns, cut) == wanted


def test_an_invoice_misread_at_first_is_not_its_articles():
    task = TASKS["invoices"][0]
    swapped, look = call("lookup", record_id="B"), call("lookup", record_id=task.invoice_id)
    assert kind_of("invoices", task, [swapped, look, answer(1)]) == "article not looked up"
    assert kind_of("invoices", task, [look, swapped, answer(1)]) == "wrong record"


@pytest.mark.parametrize("name", FAMILIES)
@given(st.data())
def test_every_rollout_has_one_kind_and_is_solved_only_by_a_strict_success(name, data):
    """Turns of the family's own scripts, in any order, however they end."""
    one, task = family(name), data.draw(st.sampled_from(TASKS[name]))
    scripts = [script(task) for script in (one.careful, *(probe.script for probe in one.probes))]
    pool = [visible for script in scripts for _, visible in script]
    start = data.draw(st.sampled_from(scripts))
    turns = [visible for _, visible in start[: data.draw(st.integers(0, len(start)))]]
    turns += data.draw(st.lists(st.sampled_from(pool), min_size=not turns, max_size=4))
    seen, outcome, said = played(name, task, turns, data.draw(st.booleans()))
    found = kind(one, task, seen, asdict(outcome))
    assert found in kinds(one)
    assert (found == SOLVED) == outcome.strict_success
    if all(getattr(outcome, milestone) for milestone in one.milestones):
        assert found in (SOLVED, ORDER, CUT, UNREADABLE, ANSWER)
    else:
        assert found not in (SOLVED, UNREADABLE, ANSWER)
    alone = one.judge(task, (), seen, hit_cap=False, tokens=0)  # milestones follow from the events alone
    assert all(getattr(alone, milestone) == getattr(outcome, milestone) for milestone in one.milestones)


# ---- two evaluations

UNSOLVED = ([RIGHT], [LOOK, RIGHT], [LOOK, INVENTED, RIGHT], [MULTIPLY, LOOK, RIGHT], [LOOK, MULTIPLY, answer(1)])


@given(st.lists(st.tuples(*[st.sampled_from([*UNSOLVED, [LOOK, MULTIPLY, RIGHT]])] * 2), min_size=1, max_size=8))
def test_counts_and_moves_add_up(pairs):
    baseline, candidate = (
        [record("orders", ORDER_TASK, pair[side], sample) for sample, pair in enumerate(pairs)] for side in (0, 1)
    )
    found = failures(family("orders"), [ORDER_TASK], baseline, candidate[::-1])
    assert [one.name for one in found.kinds] == list(kinds(family("orders")))
    for side, records in (("baseline", baseline), ("candidate", candidate)):
        counts = {one.name: getattr(one, side) for one in found.kinds}
        assert sum(counts.values()) == len(pairs)
        assert counts[SOLVED] == sum(record.outcome["strict_success"] for record in records)
    for which, side in (("before", "baseline"), ("after", "candidate")):
        sums = Counter()
        for move in found.moves:
            assert move.rollouts > 0
            sums[getattr(move, which)] += move.rollouts
        assert all(sums[one.name] == getattr(one, side) for one in found.kinds)
    assert parse(Failures, asdict(found), "summary.json", "failures") == found


def test_rollouts_without_a_counterpart_are_no_pairs():
    one = record("orders", ORDER_TASK, [RIGHT])
    with pytest.raises(ValueError, match="no counterpart"):
        failures(family("orders"), [ORDER_TASK], [one], [replace(one, sample=1)])
    with pytest.raises(ValueError, match="twice"):
        failures(family("orders"), [ORDER_TASK], [one, one], [one])


def test_the_tables_name_what_happened():
    baseline = [record("orders", ORDER_TASK, turns, number) for number, turns in enumerate(([RIGHT], [RIGHT], [LOOK, RIGHT]))]
    after = ([LOOK, RIGHT], [RIGHT], [LOOK, MULTIPLY, RIGHT])
    candidate = [record("orders", ORDER_TASK, turns, number) for number, turns in enumerate(after)]
    text = "\n".join(failing(failures(family("orders"), [ORDER_TASK], baseline, candidate)))
    assert text == (
        "| | baseline | candidate |\n|---|---:|---:|\n"
        "| no lookup | 2 | 1 |\n| no calculation | 1 | 1 |\n| solved | 0 | 1 |\n\n"
        "What became of each rollout of the baseline (rows) in the candidate (columns), by task and sample:\n\n"
        "| | no lookup | no calculation | solved |\n|---|---:|---:|---:|\n"
        "| no lookup | 1 | 1 |  |\n| no calculation |  |  | 1 |\n| solved |  |  |  |"
    )


def test_a_finished_runs_rollouts_are_paired(run):
    plan = load_run(run, check_inputs=False)
    sides = [read_rollouts(run / stage / "rollouts.jsonl", stage) for stage in ("baseline", "candidate")]
    found = failures(plan.family, plan.splits["test"], *sides)
    solved = found.kinds[-1]
    assert [solved.baseline, solved.candidate] == [sum(one.outcome["strict_success"] for one in side) for side in sides]
    assert sum(move.rollouts for move in found.moves) == len(sides[0])
