"""What the task set promises, and that a set which breaks a promise is refused by name."""

import re
from dataclasses import replace
from itertools import combinations

import pytest

from recipe.config import complete
from recipe.errors import Refused
from recipe.orders import FAMILY
from recipe.orders.tasks import FIRST_CALL, RULES, WORDINGS, Order

SIZES = {"train": 128, "development": 32, "test": 32}


def generate(seed: int, sizes: dict = SIZES) -> dict:
    return FAMILY.generate(seed, sizes)


def load(records: dict) -> dict:
    return FAMILY.load(records, "tasks.json")


check = FAMILY.check


@pytest.fixture(scope="module")
def splits():
    return generate(7)


def _numbers(task: Order) -> set[int]:
    return {int(run) for message in task.messages() for run in re.findall(r"\d+", message["content"])}


def test_sizes(splits):
    assert {split: len(tasks) for split, tasks in splits.items()} == SIZES
    sizes = complete({}).tasks
    assert (sizes.train, sizes.development, sizes.test) == tuple(SIZES.values())
    small = generate(7, {"train": 8, "development": 2, "test": 3})
    assert [len(tasks) for tasks in small.values()] == [8, 2, 3]


@pytest.mark.parametrize("field", ["record_id", "task_id"])
def test_identifiers_are_unique_over_all_splits(splits, field):
    values = [getattr(task, field) for tasks in splits.values() for task in tasks]
    assert len(set(values)) == len(values) == sum(SIZES.values())


def test_wordings_are_disjoint_and_every_one_is_used(splits):
    used = {
        split: {task.question.replace(task.record_id, "{record_id}") for task in tasks}
        for split, tasks in splits.items()
    }
    for split, wordings in used.items():
        assert len(wordings) == len(WORDINGS[split]) > 1
    for one, other in combinations(used.values(), 2):
        assert not one & other


def test_no_wording_has_a_digit_or_two_identifiers():
    for wording in [RULES, FIRST_CALL, *(wording for wordings in WORDINGS.values() for wording in wordings)]:
        assert not re.search(r"\d", wording)
    for wordings in WORDINGS.values():
        assert all(wording.count("{record_id}") == 1 for wording in wordings)


@pytest.mark.parametrize("field", ["quantity", "unit_price"])
def test_numeric_ranges_overlap(splits, field):
    values = {split: [getattr(task, field) for task in tasks] for split, tasks in splits.items()}
    for one, other in combinations(values.values(), 2):
        assert max(min(one), min(other)) < min(max(one), max(other))


@pytest.mark.parametrize("seed", range(5))
def test_no_prompt_shows_a_hidden_number(seed):
    for tasks in generate(seed).values():
        for task in tasks:
            assert not _numbers(task) & {task.quantity, task.unit_price, task.total}
            assert all(str(value) not in task.question for value in (task.unit_price, task.total))


def test_prompt_gives_the_first_call_and_not_the_expression(splits):
    for tasks in splits.values():
        for task in tasks:
            text = "\n".join(message["content"] for message in task.messages())
            assert f'{{"name": "lookup", "arguments": {{"record_id": "{task.record_id}"}}}}' in text
            assert "*" not in text and "mal" not in text.split()
            assert [message["role"] for message in task.messages()] == ["system", "user"]


def test_seed_alone_decides(splits):
    assert generate(7) == splits
    other = generate(8)
    assert not {task.record_id for task in other["test"]} & {task.record_id for task in splits["test"]}


def test_splits_differ_in_their_draws(splits):
    pairs = [[(task.quantity, task.unit_price) for task in splits[split]][:32] for split in SIZES]
    assert pairs[0] != pairs[1] != pairs[2]


def test_records_load_again(splits):
    records = {split: [task.record() for task in tasks] for split, tasks in splits.items()}
    assert load(records) == splits


def _with_first_test_task(splits, **changes):
    return splits | {"test": [replace(splits["test"][0], **changes), *splits["test"][1:]]}


def test_identifier_used_twice_is_refused(splits):
    taken = splits["train"][5]
    with pytest.raises(Refused, match=f"test-000.*train-005.*{taken.record_id}"):
        check(_with_first_test_task(splits, record_id=taken.record_id))


def test_task_id_used_twice_is_refused(splits):
    with pytest.raises(Refused, match="test-001"):
        check(_with_first_test_task(splits, task_id="test-001"))


@pytest.mark.parametrize("fact", ["quantity", "unit_price", "total"])
def test_leaked_number_is_refused(splits, fact):
    first = splits["test"][0]
    with pytest.raises(Refused, match="test-000 shows"):
        check(_with_first_test_task(splits, question=f"{first.question} Etwa {getattr(first, fact)}?"))


def test_number_inside_the_identifier_counts_as_leaked(splits):
    task = Order("test-000", "Was kostet BCD-17F?", "BCD-17F", 17, 100)
    with pytest.raises(Refused, match="test-000 shows"):
        check({"test": [task]})


def test_wording_of_another_split_is_refused(splits):
    first, other = splits["test"][0], splits["train"][0]
    question = other.question.replace(other.record_id, first.record_id)
    with pytest.raises(Refused, match="test-000 uses a wording of the train split"):
        check(_with_first_test_task(splits, question=question))


def test_load_checks_again(splits):
    records = {split: [task.record() for task in tasks] for split, tasks in splits.items()}
    records["development"][3]["record_id"] = records["train"][0]["record_id"]
    with pytest.raises(Refused, match="development-003"):
        load(records)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"quantity": True}, r"development\[3\]\.quantity must be int, not True"), ({"quantity": 12.0}, "must be int"),
     ({"record_id": None}, "must be str"), ({"more": 1}, "key .*more is unknown")],
)  # fmt: skip
def test_a_field_of_another_type_is_refused_by_name(splits, change, reason):
    records = {split: [task.record() for task in tasks] for split, tasks in splits.items()}
    records["development"][3] |= change
    with pytest.raises(Refused, match=reason):
        load(records)
