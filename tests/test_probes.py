"""The documented table of what it earns not to do the task is what the families' scripts earn."""

import pytest

from recipe.task import FAMILIES
from runs import ROOT
from tools import probes


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_but_the_task_succeeds_or_earns_as_much(name):
    (_, won, most), *others = probes.rows(name)
    assert won and len(others) > 5
    assert all(not success and reward < most for _, success, reward in others)


def test_the_document_is_up_to_date():
    assert (ROOT / "docs" / "probes.md").read_text() == probes.text(), "python -m tools.probes > docs/probes.md"
