"""`leadline fit` and `leadline evaluate` end to end on a tiny scorer: files, repeatability, refusals."""

import json
import random

import pytest

from detector.bundle import Bundle
from detector.identity import fingerprint
from jobs.config import make_config
from jobs.errors import ConfigError
from jobs.fit import RATES
from jobs.options import LabelledOptions
from jobs.training import compare, train
from tests.runs import write_rows

N_SOURCES = 30


def labelled_rows():
    """Answers of two sentences each, the second copied from a passage or, in every other one, invented."""
    chooser = random.Random(0)
    rows = []
    for number in range(N_SOURCES):
        fact = (
            f"The {chooser.choice(['red', 'old', 'tall'])} tower number {number} opened in {1900 + number}."
        )
        other = f"Entry to tower {number} costs {number + 2} euros."
        invented = f"A famous dragon slept below it for {number + 7} winters."
        bad = number % 2 == 0
        answer = f"{fact} {invented if bad else other}"
        rows.append(
            {
                "id": f"a{number}",
                "source_id": f"q{number}",
                "question": f"What is tower {number}?",
                "passages": [fact, other],
                "answer": answer,
                "model": "m1" if number % 3 else "m2",
                "lang": "en",
                "spans": [{"start": len(fact) + 1, "end": len(answer)}] if bad else [],
            }
        )
    return rows


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_scorer_dir):
    folder = tmp_path_factory.mktemp("training")
    log = write_rows(folder / "labelled.jsonl", labelled_rows())
    config = make_config({"scorer": {"name": str(tiny_scorer_dir)}})
    return folder, str(log), config


def options(folder, *methods):
    return LabelledOptions(methods=list(methods), cache=str(folder / "traces"), seed=0)


def test_fit_writes_a_bundle_of_this_scorer_and_twice_the_same_bytes(place):
    folder, log, config = place
    said = []
    for name in ("one", "two"):
        train([log], str(folder / name), config, options(folder), "towers", said.append)
    files = sorted(path.name for path in (folder / "one").iterdir())
    assert [(folder / "one" / n).read_bytes() for n in files] == [
        (folder / "two" / n).read_bytes() for n in files
    ]
    bundle = Bundle.load(folder / "one")
    mark = fingerprint(config.scorer.name).fingerprint
    assert (bundle.card.method, bundle.card.scorer_fingerprint, bundle.card.profile) == (
        "ensemble",
        mark,
        "plain",
    )
    assert tuple(sorted(bundle.card.operating_points)) == RATES
    thresholds = [bundle.card.operating_points[rate] for rate in RATES]
    assert thresholds == sorted(thresholds, reverse=True), "fewer false alarms need a higher threshold"
    assert bundle.card.figures["n_sources"] == N_SOURCES
    bundle.head()


def test_evaluate_writes_a_row_for_every_method_and_level(place):
    folder, log, config = place
    text = compare(
        [log],
        str(folder / "eval"),
        config,
        options(folder, "gap,overlap", "lookback"),
        "overlap",
        "generator",
        [],
        lambda _: None,
    )
    rows = json.loads((folder / "eval" / "evaluation.json").read_bytes())
    methods = {row["method"] for row in rows}
    assert methods == {"gap", "overlap", "lookback", "lookback (generator left out)"}
    assert {row["level"] for row in rows} == {"token", "sentence", "response", "character"}
    pooled = [row for row in rows if not row["generator"]]
    assert {row["metric"] for row in pooled if row["level"] == "response"} == {
        "auroc",
        "average_precision",
        "f1",
    }
    assert all(row["low"] <= row["value"] <= row["high"] for row in pooled)
    found = next(
        r for r in pooled if (r["method"], r["level"], r["metric"]) == ("overlap", "sentence", "auroc")
    )
    assert found["value"] > 0.9, "invented sentences have words that stand in no passage"
    assert "lookback" in text and (folder / "eval" / "evaluation.parquet").exists()


def test_a_second_evaluation_runs_no_forward_pass(place, monkeypatch):
    folder, log, config = place
    arguments = ([log], None, config, options(folder, "gap,overlap"), "overlap", None, [], lambda _: None)
    first = compare(*arguments)

    def fail(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr("detector.scorer.Scorer.trace_together", fail)
    assert compare(*arguments) == first


@pytest.mark.parametrize("methods", ["nonsense", "gap,nonsense"])
def test_an_unknown_method_is_refused_before_anything_is_read(place, methods):
    folder, _, config = place
    with pytest.raises(ConfigError, match="no method 'nonsense'"):
        compare(["nowhere"], None, config, options(folder, methods), "overlap", None, [], print)
