"""Days in LOGS and OUT: written out before anything is read, and never guessed."""

from datetime import date

import pytest

from jobs.dates import expand, read_day
from jobs.errors import ConfigError

NEW_YEAR = date(2027, 1, 1)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("s3://logs/dt={yesterday}/", "s3://logs/dt=2026-12-31/"),
        ("audits/{today}", "audits/2027-01-01"),
        ("audits/{date}", "audits/2027-01-01"),
        ("s3://logs/{yesterday:%Y/%m/%d}/", "s3://logs/2026/12/31/"),
        ("logs/year={date:%Y}/day={date:%j}/*.jsonl", "logs/year=2027/day=001/*.jsonl"),
        ("logs/{date:%y%m%d}", "logs/270101"),
        ("logs/week-{yesterday:%G-%V}", "logs/week-2026-53"),
    ],
)
def test_days_are_written_out(template, wanted):
    assert expand(template, lambda: NEW_YEAR) == wanted


@pytest.mark.parametrize(
    "literal", ["a/{}/b", "a/{x,y}.csv", "a/{1..9}", '{"a": 1}', "a}b{c", "plain", "{ date }"]
)
def test_other_braces_stay_and_no_day_is_asked_for(literal):
    assert expand(literal, lambda: pytest.fail("asked")) == literal


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("s3://logs/dt={yesteday}/", "{yesteday}: not known; days are written {today}, {date}, {yesterday}"),
        ("logs/{tomorrow:%Y}", "{tomorrow:%Y}: not known"),
        ("logs/{date:%B}", "{date:%B}: after the colon"),
        ("logs/{date:}", "{date:}: after the colon"),
        ("logs/{date:YYYY}", "{date:YYYY}: after the colon"),
        ("logs/{date:%Y%}", "{date:%Y%}: after the colon"),
    ],
)
def test_a_placeholder_that_means_nothing_is_one_line(template, told):
    with pytest.raises(ConfigError) as refused:
        expand(template, lambda: NEW_YEAR)
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_a_day_is_written_in_full():
    assert read_day("2026-11-30") == date(2026, 11, 30)
    for wrong in ("2026-11-31", "20261130", "yesterday", "2026-W49-1", ""):
        with pytest.raises(ConfigError, match="write it as 2026-11-30"):
            read_day(wrong)
