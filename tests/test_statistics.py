"""Statistics against cases worked out by hand or published, scipy's own, and properties that they must have."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from recipe.statistics import design, paired, pairs, quantile, verdict
from tools.bench import coverage

QUICK = settings(max_examples=60, deadline=None)
Z2 = 1.959963984540054**2


@st.composite
def tables(draw, most: int = 60):
    """Items, gained, lost and solved by both."""
    items = draw(st.integers(1, most))
    gained = draw(st.integers(0, items))
    lost = draw(st.integers(0, items - gained))
    return items, gained, lost, draw(st.integers(0, items - gained - lost))


@st.composite
def counts(draw):
    """Successes before and after, and samples an item."""
    samples = draw(st.integers(1, 16))
    rows = draw(st.lists(st.tuples(*[st.integers(0, samples)] * 2), min_size=2, max_size=10))
    return [row[0] for row in rows], [row[1] for row in rows], samples


# ---- intervals of pairs


def test_published_interval_of_airway_patients():
    """Bentur et al. (2009) as in Fagerland, Lydersen and Laake (2014): 21 pairs, 1 and 7 discordant, 1 of both."""
    assert pairs.score(21, 1, 7) == pytest.approx((-0.517, -0.026), abs=5e-4)
    assert pairs.newcombe(21, 1, 7, 1) == pytest.approx((-0.507, -0.026), abs=5e-4)


def test_published_interval_of_complete_response():
    """Cavo et al. (2012): 59, 6, 16 and 80 of 161; the R package contingencytables tests -0.1186 to -0.0046."""
    assert pairs.newcombe(161, 6, 16, 59) == pytest.approx((-0.1186, -0.0046), abs=5e-5)


def test_the_score_interval_has_the_two_ends_that_its_test_just_rejects():
    """By the restricted likelihood itself: maximised numerically instead of by Tango's root."""
    for items, gained, lost in ((64, 2, 9), (32, 11, 3), (40, 0, 4)):
        for end in pairs.score(items, gained, lost):
            grid = np.linspace(max(0, -end), (1 - end) / 2, 400_001)[1:-1]
            with np.errstate(divide="ignore"):
                terms = lost * np.log(grid) if lost else 0 * grid
                terms = terms + (gained * np.log(grid + end) if gained else 0)
                terms = terms + (items - gained - lost) * np.log(1 - 2 * grid - end)
            share = grid[np.nanargmax(terms)]
            z = (gained - lost - items * end) / math.sqrt(items * (2 * share + end * (1 - end)))
            assert abs(z) == pytest.approx(1.96, abs=2e-3)


def test_where_nothing_moved_the_interval_is_wilsons_and_not_empty():
    assert pairs.score(64, 0, 0) == pytest.approx((-Z2 / (64 + Z2), Z2 / (64 + Z2)), abs=1e-6)
    assert paired.interval([3] * 32, [3] * 32, 4) == pytest.approx((-Z2 / (32 + Z2), Z2 / (32 + Z2)), abs=1e-6)


def test_where_all_moved_alike_the_rest_may_have_moved_to_the_other_bound():
    share = Z2 / (32 + Z2)
    assert paired.interval([0] * 32, [4] * 32, 4) == pytest.approx((1 - 2 * share, 1.0))
    assert paired.interval([0] * 32, [1] * 32, 1) == pytest.approx((1 - 2 * share, 1.0), abs=1e-6)
    assert paired.interval([4] * 32, [2] * 32, 4) == pytest.approx((-0.5 - share * 0.5, -0.5 + share * 1.5))


@QUICK
@given(tables())
def test_intervals_hold_the_difference_and_turn_with_the_sides(table):
    items, gained, lost, both = table
    for interval, extra in ((pairs.score, ()), (pairs.newcombe, (both,))):
        low, high = interval(items, gained, lost, *extra)
        assert -1 <= low <= (gained - lost) / items + 1e-9 and (gained - lost) / items - 1e-9 <= high <= 1
        assert interval(items, lost, gained, *extra) == pytest.approx((-high, -low), abs=1e-7)
        wide = interval(items, gained, lost, *extra, level=0.01)
        assert wide[0] <= low + 1e-9 and high - 1e-9 <= wide[1]


@QUICK
@given(tables(40))
def test_one_more_gained_moves_the_score_interval_up(table):
    items, gained, lost, _ = table
    if gained + lost < items:
        low, high = pairs.score(items, gained, lost)
        above = pairs.score(items, gained + 1, lost)
        assert above[0] >= low - 1e-7 and above[1] >= high - 1e-7


@pytest.mark.parametrize("table", [(0, 0, 0, 0), (4, 3, 2, 0), (4, -1, 0, 0), (4, 1, 1, 3), (4, 1, 1, -1)])
def test_what_is_no_table_is_refused(table):
    with pytest.raises(ValueError, match="are no table"):
        pairs.newcombe(*table)


def test_the_interval_of_one_sample_is_the_score_interval():
    before, after = [0] * 5 + [1] * 2 + [1] * 3, [1] * 5 + [0] * 2 + [1] * 3
    assert paired.interval(before, after, 1) == pairs.score(10, 5, 2) != pairs.score(10, 2, 5)


def test_the_interval_of_several_samples_is_students():
    before, after = [0, 1, 2, 4, 3], [2, 1, 4, 4, 2]
    moves = np.subtract(after, before) / 4
    low, high = stats.t.interval(0.95, 4, moves.mean(), stats.sem(moves))
    assert paired.interval(before, after, 4) == pytest.approx((low, high))


# ---- tests


@QUICK
@given(tables(40))
def test_the_flip_of_single_samples_is_the_exact_mcnemar_test(table):
    items, gained, lost, both = table
    before = [0] * gained + [1] * lost + [1] * both + [0] * (items - gained - lost - both)
    after = [1] * gained + [0] * lost + [1] * both + [0] * (items - gained - lost - both)
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert paired.sign_flip(before, after) == pytest.approx(expected)


@QUICK
@given(counts())
def test_the_flip_is_scipys_exact_permutation_test(case):
    before, after, _ = case
    if all(old == new for old, new in zip(before, after)):
        assert paired.sign_flip(before, after) == 1.0
        return
    found = stats.permutation_test(
        (np.array(before), np.array(after)), lambda x, y, axis: (y - x).sum(axis), permutation_type="samples",
        vectorized=True, n_resamples=5_000, alternative="two-sided",
    )  # fmt: skip
    assert paired.sign_flip(before, after) == pytest.approx(found.pvalue)
    assert paired.sign_flip(after, before) == pytest.approx(found.pvalue)


# ---- rates and variance


def test_rates_over_samples_by_hand():
    """Items of 4 samples with 0, 1 and 4 successes: of 6 pairs, 0, 3 and 6 have one success, and 0, 0 and 6 two."""
    items = [0, 1, 4]
    assert paired.avg_at_k(items, 4) == pytest.approx(5 / 12)
    assert paired.pass_at_k(items, 4, 2) == pytest.approx((0 + 3 / 6 + 1) / 3)
    assert paired.pass_hat_k(items, 4, 2) == pytest.approx((0 + 0 + 1) / 3)


@QUICK
@given(counts())
def test_one_of_k_is_no_rarer_than_the_mean_and_all_of_k_no_more_frequent(case):
    successes, _, samples = case
    mean = paired.avg_at_k(successes, samples)
    any_of = [paired.pass_at_k(successes, samples, k) for k in range(1, samples + 1)]
    all_of = [paired.pass_hat_k(successes, samples, k) for k in range(1, samples + 1)]
    assert any_of[0] == pytest.approx(mean) and all_of[0] == pytest.approx(mean)
    assert any_of == pytest.approx(sorted(any_of)) and all_of == pytest.approx(sorted(all_of, reverse=True))


def test_variance_by_hand():
    """Rates 0, 1/2 and 1 of 4 samples: within 4·¼ / 9, mean square of items 4·½ / 2 = 1."""
    between, within = paired.variance([0, 2, 4], 4)
    assert within == pytest.approx(1 / 9) and between == pytest.approx((1 - 1 / 9) / 4)
    assert paired.variance([0, 1], 1) is None and paired.variance([2], 4) is None
    assert paired.variance([2, 2, 2], 4) == pytest.approx((0, 1 / 3))


def test_counts_that_cannot_be_are_refused():
    for wrong in (([5], 4), ([-1], 4), ([], 4), ([0], 0)):
        with pytest.raises(ValueError):
            paired.avg_at_k(*wrong)
    with pytest.raises(ValueError):
        paired.pass_at_k([1], 4, 5)
    with pytest.raises(ValueError, match="2 items before, 1 after"):
        paired.interval([0, 1], [1], 1)


# ---- design


@pytest.mark.parametrize("samples, points", [(1, 35), (4, 18), (16, 10)])
def test_the_default_test_split_detects_what_was_promised(samples, points):
    assert design.smallest_gain(32, samples, 0.5) * 100 == pytest.approx(points, abs=0.5)


def test_the_power_of_several_samples_is_that_of_the_formula_by_hand():
    """V = 0.01 + (0.25 + 0.21 - 0.01) / 4 at p = 0.5, d = 0.2; noncentral t of 31 degrees."""
    shift = 0.2 * math.sqrt(32 / (0.01 + 0.45 / 4))
    edge = stats.t.ppf(0.975, 31)
    assert design.power(32, 4, 0.5, 0.2) == pytest.approx(stats.nct.sf(edge, 31, shift))
    assert design.power(32, 4, 0.5, 0.0) == pytest.approx(0.025) and design.power(32, 16, 0.5, 0.5) == 1


def test_the_power_of_one_sample_is_that_of_every_table():
    """All 6-item tables of gained and lost, by the multinomial and scipy's own test."""
    before, after = 0.3, 0.8
    both = before * after + 0.01
    shares = [after - both, before - both, 1 - after - before + 2 * both]
    chance = sum(
        stats.multinomial.pmf([gained, lost, 6 - gained - lost], 6, shares)
        for gained in range(7) for lost in range(gained)
        if lost + gained <= 6 and stats.binomtest(gained, gained + lost).pvalue <= 0.05
    )  # fmt: skip
    assert design.power(6, 1, before, after - before, spread=0.1) == pytest.approx(chance)


def test_more_samples_items_and_spread_detect_smaller_gains():
    gains = [design.smallest_gain(32, samples, 0.5) for samples in (1, 2, 4, 16, 64)]
    assert gains == sorted(gains, reverse=True)
    assert design.smallest_gain(128, 4, 0.5) < design.smallest_gain(32, 4, 0.5)
    assert design.smallest_gain(32, 4, 0.5, spread=0.3) < design.smallest_gain(32, 4, 0.5)
    assert design.smallest_gain(32, 1, 0.9) is None


def test_the_samples_of_a_gain_are_the_fewest():
    samples = design.samples_for(0.15, 32, 0.5)
    assert design.power(32, samples, 0.5, 0.15) >= 0.8 > design.power(32, samples - 1, 0.5, 0.15)
    assert design.samples_for(0.02, 32, 0.5) is None and design.samples_for(0.25, 32, 0.8) is None
    assert design.samples_for(0.45, 32, 0.5) == 1


def test_items_that_cannot_be_are_refused():
    for wrong in ({"success": 0.1, "spread": 0.4, "change": 0.1}, {"success": 0.9, "change": 0.2}):
        with pytest.raises(ValueError):
            design.power(32, 4, **wrong)
    assert all(row["spread"] ** 2 < row["success"] * (1 - row["success"]) for row in design.table(32))


def test_retention_that_a_design_can_show():
    """Nothing moving leaves z² / (n + z²): 5.7 points at 64 items, so that 5 can never be shown."""
    assert design.largest_shown_loss(64, 0.05, 0.0) is None and design.largest_shown_loss(64, 0.06, 0.0) == 0.0
    assert design.largest_shown_loss(64, 0.1, 3 / 64) == 1 / 64
    assert pairs.score(64, 1, 2)[0] > -0.1 > pairs.score(64, 0, 3)[0]


def test_chances_of_retention_are_sums_over_all_tables():
    found = design.retention_chances(5, 0.2, 0.6, margin=0.9)
    expected = sum(
        stats.multinomial.pmf([gained, lost, 5 - gained - lost], 5, [0.2, 0.4, 0.4])
        for gained in range(6) for lost in range(6 - gained) if pairs.score(5, gained, lost)[0] > -0.9
    )  # fmt: skip
    assert found["shown"] == pytest.approx(expected, abs=1e-6)
    lost_8 = design.retention_chances(8, 0.6, 0.8)["detected"]
    assert lost_8 == pytest.approx(sum(
        stats.multinomial.pmf([gained, lost, 8 - gained - lost], 8, [0.1, 0.7, 0.2])
        for gained in range(9) for lost in range(9 - gained) if pairs.score(8, gained, lost)[1] < 0
    ), abs=1e-6)  # fmt: skip
    loss = design.smallest_detected_loss(64, 0.2)
    assert design.retention_chances(64, loss, 0.2)["detected"] >= 0.8
    assert design.retention_chances(64, loss - 0.001, 0.2)["detected"] < 0.8


# ---- words


@pytest.mark.parametrize("interval, p, word", [
    ((0.01, 0.3), 0.05, "better"), ((0.01, 0.3), 0.051, "no difference detected"),
    ((0.0, 0.3), 0.001, "no difference detected"), ((-0.1, 0.3), 0.001, "no difference detected"),
    ((-0.3, -0.01), 0.02, "worse"), ((-0.3, 0.0), 0.02, "no difference detected"),
])  # fmt: skip
def test_the_word_of_the_agent_task_is_no_stronger_than_interval_and_test(interval, p, word):
    assert verdict.agent_task(sum(interval) / 2, interval, p) == word


@pytest.mark.parametrize("interval, word", [
    ((-0.09, 0.05), "shown"), ((-0.1, 0.05), "not shown"), ((-0.2, 0.0), "not shown"), ((-0.2, -0.01), "lost"),
    ((-0.09, -0.01), "shown"), ((-0.4, -0.2), "lost"), ((0.01, 0.2), "shown"),
])  # fmt: skip
def test_the_word_of_retention(interval, word):
    assert verdict.retention(sum(interval) / 2, interval, 0.1) == word


@pytest.mark.parametrize("difference, interval, p", [
    (0.5, (-0.1, 0.4), 0.1), (0.0, (0.1, 0.4), 0.01), (0.1, (0.3, -0.3), 0.1), (0.1, (-0.1, 1.2), 0.1),
    (0.1, (0.0, 0.2), 1.5), (0.1, (0.0, 0.2), -0.1), (math.nan, (0.0, 0.2), 0.5), (0.1, (0.0, 0.2), math.nan),
])  # fmt: skip
def test_states_that_contradict_themselves_are_refused(difference, interval, p):
    with pytest.raises(ValueError):
        verdict.agent_task(difference, interval, p)


def test_a_margin_that_is_none_is_refused():
    for margin in (0, 1, -0.1, 3):
        with pytest.raises(ValueError, match="a margin of"):
            verdict.retention(0.0, (-0.1, 0.1), margin)


# ---- the simulation


def test_the_simulated_bootstraps_are_scipys():
    values = np.random.default_rng(3).beta(0.5, 3, (2, 32))
    for found, method in zip(coverage.bootstrap(values, 20_000), ("percentile", "BCa")):
        for row, ends in zip(values, found):
            expected = stats.bootstrap((row,), np.mean, method=method, n_resamples=20_000, random_state=1)
            assert ends == pytest.approx(tuple(expected.confidence_interval), abs=0.003)


def test_a_short_simulation_finds_the_nominal_rates():
    row = coverage.agent(400, 0.5, 0.1, 0.0, 4, 1)
    assert row["item"] > 0.92 and row["flip"] < 0.07 and row["word"] <= row["flip"] and row["truth"] == 0
    kept = coverage.kept(400, 0.85, 0.03, 0.03, 1)
    assert kept["score"] > 0.92 and quantile() == pytest.approx(1.96, abs=1e-3)


def test_seeds_apart_from_items_by_analysis_of_variance():
    from recipe.statistics import seeds

    both = [[0.2, 0.6, 0.4], [0.4, 0.8, 0.6]]  # items and seeds add up, and nothing is left
    found = seeds.spread(both)
    assert (found.items, found.seeds, found.rest) == pytest.approx((0.2, 0.02**0.5, 0.0), abs=1e-9)
    assert seeds.mean(both) == pytest.approx(0.5)
    assert seeds.error(both) == pytest.approx((0.04 / 3 + 0.02 / 2) ** 0.5)
    assert seeds.difference_error(both, both) == pytest.approx(0.02**0.5)  # items cancel, seeds do not
    one = seeds.spread(both[:1])
    assert one.seeds is one.rest is None and one.items == pytest.approx(0.2)  # one seed says nothing of others
    low, high = seeds.interval([[1.0] * 8] * 2)
    assert low < 0.7 and high == 1.0  # all alike is no certainty
    with pytest.raises(ValueError, match="no measurement of the same items"):
        seeds.mean([[1.0, 0.0], [1.0]])


def test_the_interval_over_seeds_and_items_covers_its_mean():
    import numpy as np

    from recipe.statistics import seeds

    rng, inside = np.random.default_rng(1), 0
    for _ in range(400):
        rates = 0.5 + rng.normal(0, 0.05, 16) + rng.normal(0, 0.05, (4, 1)) + rng.normal(0, 0.05, (4, 16))
        low, high = seeds.interval(rates.tolist())
        inside += low <= 0.5 <= high
    assert inside / 400 > 0.92
