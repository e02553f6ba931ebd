"""The search for the rows that kill: what it finds, what it never blames, and what it costs."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.poison import MAX_KILLERS, NO_ROWS, Bisection, HopelessError, is_single


def search(n_rows, kills):
    """Run a search in a unit of `n_rows`; `kills(rows, time)` says whether a worker dies of these rows."""
    bisection, asked, n_measured, n_deaths = Bisection(), [NO_ROWS], 0, 0
    step = 0
    while asked:
        rows = asked.pop(0)
        assert rows in bisection.open
        step += 1
        n_measured += rows[1] - rows[0]
        if kills(rows, step):
            n_deaths += 1
            asked = bisection.die(rows) + asked
        else:
            asked = bisection.survive(rows, n_rows) + asked
    assert not bisection.open
    return sorted(bisection.killers), n_measured, n_deaths


def holds(killers):
    return lambda rows, _: any(rows[0] <= killer < rows[1] for killer in killers)


@settings(max_examples=30)
@given(st.data())
def test_exactly_the_killers_are_found(data):
    n_rows = data.draw(st.integers(1, 600))
    killers = data.draw(st.sets(st.integers(0, n_rows - 1), max_size=MAX_KILLERS))
    assert search(n_rows, holds(killers))[0] == sorted(killers)


@pytest.mark.parametrize("killer", [0, 137, 511])
def test_one_killer_costs_two_units_of_work_and_a_logarithm_of_deaths(killer):
    found, n_measured, n_deaths = search(512, holds({killer}))
    assert found == [killer]
    assert n_measured <= 2 * 512 + 2
    assert n_deaths == math.log2(512) + 1


def test_a_death_that_does_not_repeat_blames_nobody():
    for lost in range(1, 20):  # the machine is lost at one step, whatever is measured there
        assert search(40, lambda rows, step, lost=lost: step == lost)[0] == []
        assert search(40, lambda rows, step, lost=lost: step == lost or holds({7})(rows, step))[0] == [7]


def test_a_row_that_kills_only_beside_others_is_not_blamed():
    assert search(40, lambda rows, _: rows[1] - rows[0] > 1 and holds({7})(rows, 0))[0] == []


def test_a_unit_that_kills_its_readers_is_hopeless():
    with pytest.raises(HopelessError, match="dies of reading it"):
        search(40, lambda rows, _: rows == NO_ROWS)


def test_more_killers_than_bad_records_could_be_are_hopeless():
    with pytest.raises(HopelessError, match=f"more than {MAX_KILLERS} of its rows"):
        search(512, lambda rows, _: rows != NO_ROWS)


def test_deaths_without_a_pattern_end_the_search():
    with pytest.raises(HopelessError, match="each time of other rows"):
        search(4096, lambda rows, _: rows != NO_ROWS and not is_single(rows))
    assert search(0, lambda *_: False)[0] == []
