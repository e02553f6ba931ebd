"""What an audit would take: tokens from a sample of its units, time from a measured rate, cost from a price.

Tokens are those that the scorer computes (`bench_shapes.floor`): markers count the same, so that an estimate
can be held against the run afterwards. An interval covers what sampling leaves open, about 95 % of the time,
and the spread of a bench; not what a rate that was measured elsewhere, or a guess at a rate, leaves open.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance
from typing import TYPE_CHECKING

from jobs.commit import read_markers, read_run
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.storage import Storage, mask

if TYPE_CHECKING:
    from jobs.plan_needs import Needs

# Student's t with 8 degrees of freedom at 97.5 %: where units are left out, at least 9 are in the sample.
_QUANTILE = 2.31


@dataclass(frozen=True, slots=True)
class Range:
    """A value and what it lies between."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Range":
        """Every bound times a number."""
        return Range(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class SampledUnit:
    """A unit of work: how many rows it holds, and the computed tokens of its first ones (0: a reject)."""

    n_rows: float
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Rate:
    """Computed tokens per second of one worker, and who says so."""

    tokens_per_second: Range
    source: str


@dataclass(frozen=True, slots=True)
class Prices:
    """What a user knows of costs.

    `tokens_per_second` or `bench` (a file of `leadline bench --json`) tell the rate of a worker,
    `price_per_hour` what its machine costs, `against` the run to hold the estimate against.
    """

    tokens_per_second: float | None = None
    bench: str | None = None
    price_per_hour: float | None = None
    against: str | None = None

    def check(self) -> None:
        """Raise ConfigError for what cannot be a rate or a price, before anything is read."""
        for name in ("tokens_per_second", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be more than 0")
        if self.tokens_per_second is not None and self.bench is not None:
            raise ConfigError("--tokens-per-second and --bench: both tell the rate; give one of them")
        if self.price_per_hour is not None and self.tokens_per_second is None and self.bench is None:
            raise ConfigError("--price-per-hour: needs a rate; add --tokens-per-second or --bench FILE")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a run that is there has taken."""

    out: str
    n_units: int
    n_units_done: int
    n_read: int
    tokens: int
    worker_hours: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of the whole audit, from the sample."""

    rows: Range
    tokens: Range
    rate: Rate | None
    worker_hours: Range | None
    """Of workers at work: a GPU each, or `workers.cpus_per_worker` CPUs. Starting and waiting come on top."""
    cost: Range | None
    """In the currency of the price."""
    worker: str
    """What a worker has: `GPU`, or `CPU` and how many."""
    compared: Comparison | None

    def to_lines(self) -> list[str]:
        """For a person on a terminal."""
        lines = [f"work: {_spell(self.rows)} rows, {_spell(self.tokens)} computed tokens"]
        if self.rate is None:
            lines[0] += "; time and cost with --tokens-per-second RATE or --bench FILE"
        if self.rate is not None and self.worker_hours is not None:
            lines.append(
                f"time: {_spell(self.worker_hours)} hours of a worker ({self.worker}), at "
                f"{self.rate.tokens_per_second.value:,.0f} tokens/s ({self.rate.source}); without its start"
            )
        if self.cost is not None:
            lines.append(f"cost: {_spell(self.cost)}")
        return lines + ([self._comparison(self.compared)] if self.compared else [])

    def _comparison(self, run: Comparison) -> str:
        line = f"{mask(run.out)}: {run.n_read:,} rows, {run.tokens:,} tokens, {run.worker_hours:.3g} hours"
        if run.n_units_done < run.n_units:
            return f"{line} so far, with {run.n_units_done:,} of {run.n_units:,} units; no comparison yet"
        inside = "inside" if self.tokens.low <= run.tokens <= self.tokens.high else "outside"
        off = f", {run.tokens / self.tokens.value - 1:+.1%}" if self.tokens.value else ""
        line = f"{line}; tokens are {inside} the interval{off}"
        if self.worker_hours and self.worker_hours.value:
            line += f", hours {run.worker_hours / self.worker_hours.value - 1:+.1%}"
        return line


def find_estimate(
    units: Sequence[SampledUnit],
    n_units: int,
    needs: "Needs",
    config: Config,
    prices: Prices,
    storage: Storage,
) -> Estimate:
    """Of an audit with `config` whose `n_units` units are sampled by `units`.

    Raises ConfigError for a bench of another scorer, or where there is no run to hold it against.
    """
    tokens = estimate_total(units, n_units)
    rate = find_rate(prices, config, needs)
    hours = rate and Range(
        tokens.value / rate.tokens_per_second.value / 3600,
        tokens.low / rate.tokens_per_second.high / 3600,
        tokens.high / rate.tokens_per_second.low / 3600,
    )
    n_cpus = config.workers.cpus_per_worker
    return Estimate(
        rows=estimate_total([SampledUnit(unit.n_rows, [1] * len(unit.tokens)) for unit in units], n_units),
        tokens=tokens,
        rate=rate,
        worker_hours=hours,
        cost=hours.times(prices.price_per_hour) if hours and prices.price_per_hour else None,
        worker="GPU" if needs.device == "cuda" else f"{n_cpus} CPU{'s'[: n_cpus > 1]}",
        compared=_read_run(prices.against, storage) if prices.against else None,
    )


def estimate_total(units: Sequence[SampledUnit], n_units: int) -> Range:
    """Tokens of all `n_units` units, by the two-stage estimator of cluster samples.

    Its variance has two terms: between units, which is 0 once all are in the sample, and within the units
    whose rows were not all looked at (Cochran, Sampling Techniques, 1977, 11.3).
    """
    totals = [unit.n_rows * mean(unit.tokens) if unit.tokens else 0.0 for unit in units]
    if not totals:
        return Range(0, 0, 0)
    n, left_out = len(totals), n_units - len(totals)
    between = n_units * left_out / n * variance(totals) if left_out and n > 1 else 0.0
    within = (
        n_units
        / n
        * sum(
            unit.n_rows * (unit.n_rows - len(unit.tokens)) * variance(unit.tokens) / len(unit.tokens)
            for unit in units
            if 1 < len(unit.tokens) < unit.n_rows
        )
    )
    value, half = n_units * mean(totals), _QUANTILE * math.sqrt(between + within)
    seen = sum(sum(unit.tokens) for unit in units)
    return Range(value, max(float(seen), value - half), value + half)


def find_rate(prices: Prices, config: Config, needs: "Needs") -> Rate | None:
    """The rate that is known, or None. Raises ConfigError for a file that does not tell it."""
    if prices.tokens_per_second is not None:
        rate = prices.tokens_per_second
        return Rate(Range(rate, rate, rate), "--tokens-per-second")
    return None if prices.bench is None else _read_bench(prices.bench, config, needs)


def _read_bench(file: str, config: Config, needs: "Needs") -> Rate:
    """The rate of the case whose answers are most like the sample's, in tokens."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        measured, profile = found["scorer"]["name"], found["scorer"]["profile"]
        cases = [
            (case, row) for case in found["cases"] for row in case["contenders"] if row["name"] == needs.loo
        ]
        if (measured, profile) != (config.scorer.name, config.profile):
            raise ConfigError(
                f"--bench {file}: measured {measured} with profile {profile}, this plan is for "
                f"{config.scorer.name} with {config.profile}; run leadline bench with the same"
            )
        if not cases:
            raise ConfigError(
                f"--bench {file}: did not measure --loo {needs.loo}; run leadline bench with it"
            )
        case, row = min(cases, key=lambda pair: _distance(pair[1]["tokens_per_answer"], needs))
        seconds, tokens = row["seconds_per_answer"], row["tokens_per_answer"]
        rate = Range(*(tokens / seconds[name] for name in ("median", "max", "min")))
        machine = found["machine"]["gpu"] or found["machine"]["cpu"]
        return Rate(rate, f"{file}: {machine}, {case['mean_context_tokens']:,.0f} context tokens")
    except OSError as error:
        raise ConfigError(f"--bench {file}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        raise ConfigError(f"--bench {file}: not a file of leadline bench --json") from None


def _distance(tokens_per_answer: float, needs: "Needs") -> float:
    read = [n_tokens for n_tokens in needs.tokens_per_record if n_tokens]
    return abs(math.log(tokens_per_answer / mean(read)))


def _read_run(out: str, storage: Storage) -> Comparison:
    run, markers = read_run(storage, out), read_markers(storage, out)
    return Comparison(
        out=out,
        n_units=run.n_units,
        n_units_done=len(markers),
        n_read=sum(marker["n_read"] for marker in markers.values()),
        tokens=sum(marker["n_tokens"] for marker in markers.values()),
        worker_hours=sum(marker["seconds"] for marker in markers.values()) / 3600,
    )


def _spell(found: Range) -> str:
    """`1,200 (1,100 to 1,300)`; without an interval where nothing was left out."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"

    if found.low == found.value == found.high:
        return number(found.value)
    return f"about {number(found.value)} ({number(found.low)} to {number(found.high)})"
