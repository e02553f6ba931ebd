"""Estimates: their interval holds the truth as often as it says, and a rate is never made up."""

import json
import random

import pytest

from jobs.commit import create_run, write_marker
from jobs.config import load_config
from jobs.errors import ConfigError
from jobs.estimate import Prices, SampledUnit, estimate_total, find_estimate, find_rate
from jobs.plan import make_plan
from jobs.plan_needs import Needs
from jobs.storage import Storage

STORAGE = Storage()
CONFIG = load_config(None, ["workers.cpus_per_worker=2"], {})
NEEDS = Needs(2, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, "cpu", "exact", (800, 1200))


def bench_file(folder, *cases, name=CONFIG.scorer.name):
    """As `leadline bench --json` writes it: (tokens per answer, median seconds) for each case."""
    tree = {
        "machine": {"gpu": None, "cpu": "EPYC"},
        "scorer": {"name": name, "profile": "plain"},
        "cases": [
            {
                "mean_context_tokens": tokens / 2,
                "contenders": [
                    {
                        "name": "exact",
                        "tokens_per_answer": tokens,
                        "seconds_per_answer": {"median": seconds, "min": seconds / 2, "max": seconds * 2},
                    }
                ],
            }
            for tokens, seconds in cases
        ],
    }
    (folder / "bench.json").write_text(json.dumps(tree))
    return str(folder / "bench.json")


def test_what_was_read_completely_has_no_interval():
    found = estimate_total([SampledUnit(3, [100, 0, 200]), SampledUnit(1, [50])], n_units=2)
    assert (found.low, found.value, found.high) == (350, 350, 350)


def test_no_units_are_no_tokens():
    assert estimate_total([], 0).high == 0


def test_the_interval_holds_the_truth_about_19_times_in_20():
    chooser, held = random.Random(7), 0
    for _ in range(150):
        units = [
            [round(scale * chooser.lognormvariate(6, 0.5)) for _ in range(chooser.randint(12, 28))]
            for scale in (chooser.uniform(0.7, 1.3) for _ in range(40))
        ]
        sample = [SampledUnit(len(rows), chooser.sample(rows, 10)) for rows in chooser.sample(units, 12)]
        found = estimate_total(sample, len(units))
        held += found.low <= sum(map(sum, units)) <= found.high
    assert 0.9 <= held / 150 <= 0.99


def test_hours_and_cost_follow_from_rate_and_price():
    units = [SampledUnit(2, [1800, 1800])]
    found = find_estimate(units, 1, NEEDS, CONFIG, Prices(2.0, price_per_hour=3.0), STORAGE)
    assert (found.worker_hours.value, found.cost.value, found.worker) == (0.5, 1.5, "2 CPUs")
    assert found.to_lines() == [
        "work: 2 rows, 3,600 computed tokens",
        "time: 0.5 hours of a worker (2 CPUs), at 2 tokens/s (--tokens-per-second); without its start",
        "cost: 1.5",
    ]


def test_without_a_rate_only_tokens_are_told():
    found = find_estimate([SampledUnit(1, [5])], 1, NEEDS, CONFIG, Prices(), STORAGE)
    assert found.worker_hours is None and found.cost is None
    assert found.to_lines() == [
        "work: 1 rows, 5 computed tokens; time and cost with --tokens-per-second RATE or --bench FILE"
    ]


def test_a_bench_gives_the_rate_of_the_case_most_like_the_sample_and_its_spread(tmp_path):
    prices = Prices(bench=bench_file(tmp_path, (300, 1.0), (1100, 2.0), (9000, 90.0)))
    rate = find_rate(prices, CONFIG, NEEDS)
    assert (rate.tokens_per_second.low, rate.tokens_per_second.value) == (275, 550)
    assert rate.tokens_per_second.high == 1100
    assert "EPYC, 550 context tokens" in rate.source
    found = find_estimate([SampledUnit(1, [1100])], 1, NEEDS, CONFIG, prices, STORAGE)
    assert found.worker_hours.low == pytest.approx(1 / 3600)
    assert found.worker_hours.high == pytest.approx(4 / 3600)


@pytest.mark.parametrize(
    ("prices", "told"),
    [
        (Prices(tokens_per_second=0.0), "--tokens-per-second 0.0: must be more than 0"),
        (Prices(1.0, price_per_hour=float("nan")), "--price-per-hour nan"),
        (Prices(1.0, "b.json"), "give one of them"),
        (Prices(price_per_hour=1.0), "needs a rate"),
    ],
)
def test_what_is_no_rate_or_price_is_refused_before_anything_is_read(prices, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        make_plan([str(tmp_path / "absent")], CONFIG, prices)


def test_a_bench_of_something_else_is_refused(tmp_path):
    def refusal(file):
        with pytest.raises(ConfigError) as refused:
            find_rate(Prices(bench=str(file)), CONFIG, NEEDS)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "measured another-1b" in refusal(bench_file(tmp_path, (1, 1.0), name="another-1b"))
    assert "did not measure --loo exact" in refusal(bench_file(tmp_path))
    (tmp_path / "other.json").write_text('{"models": []}')
    assert "not a file of leadline bench" in refusal(tmp_path / "other.json")
    assert "cannot be read" in refusal(tmp_path / "absent.json")


def run_of(out, n_units, **marker):
    create_run(STORAGE, out, ["logs"], CONFIG, {"fingerprint": "f"}, [], n_units)
    counts = {"parts": [], "n_read": 4, "n_audited": 4, "n_rejected": 0, "rejects": {}}
    write_marker(STORAGE, out, counts | {"unit_id": "u", "attempt": 1, "dtype": "float32"} | marker)


def test_an_estimate_is_held_against_the_run(tmp_path):
    run_of(str(tmp_path / "done"), 1, n_tokens=4400, seconds=3600.0)
    prices = Prices(1.0, against=str(tmp_path / "done"))
    line = find_estimate([SampledUnit(2, [2000, 2000])], 1, NEEDS, CONFIG, prices, STORAGE).to_lines()[-1]
    assert line.endswith(
        "4 rows, 4,400 tokens, 1 hours; tokens are outside the interval, +10.0%, hours -10.0%"
    )
    run_of(str(tmp_path / "half"), 2, n_tokens=1, seconds=1.0)
    prices = Prices(against=str(tmp_path / "half"))
    line = find_estimate([SampledUnit(1, [1])], 1, NEEDS, CONFIG, prices, STORAGE).to_lines()[-1]
    assert line.endswith("so far, with 1 of 2 units; no comparison yet")
    with pytest.raises(ConfigError, match=r"no run\.json"):
        prices = Prices(against=str(tmp_path / "absent"))
        find_estimate([SampledUnit(1, [1])], 1, NEEDS, CONFIG, prices, STORAGE)
