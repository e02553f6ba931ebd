import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from jobs.errors import JobError
from jobs.survey import THREADS, Survey, in_order, take_survey


def unit(*rows):
    """(record_index, response_id, gap of the response and of its one sentence) each."""
    responses = {
        "record_index": pa.array([row[0] for row in rows], pa.int32()),
        "response_id": pa.array([row[1] for row in rows], pa.string()),
        "path": pa.array(["logs.jsonl"] * len(rows)),
        "position": pa.array([row[0] for row in rows], pa.int64()),
        "gap": pa.array([row[2] for row in rows], pa.float32()),
    }
    sentences = {"record_index": responses["record_index"], "gap": responses["gap"]}
    return pa.table(responses), pa.table(sentences)


def survey_of(*units):
    markers = [{"unit_id": f"u{number}", "tables": tables} for number, tables in enumerate(units)]
    with ThreadPoolExecutor(2) as pool:
        return take_survey(pool, lambda marker: marker["tables"], markers)


def test_results_come_in_order_and_are_not_made_far_ahead_of_who_takes_them():
    n_made, lock = 0, threading.Lock()

    def make(number):
        nonlocal n_made
        with lock:
            n_made += 1
        return number * number

    with ThreadPoolExecutor(THREADS) as pool:
        for number, found in enumerate(in_order(pool, make, range(200))):
            assert found == number * number
            assert n_made <= number + 2 * THREADS + 2


def test_duplicates_leave_no_trace_in_the_statistics():
    luck = np.random.default_rng(0)
    gaps = luck.normal(size=8) * 10.0 ** luck.integers(-12, 6, size=8)
    rows = [(number, f"r{number}", gap) for number, gap in enumerate(gaps)]
    again = [(9, "r0", 1e30), (8, "r7", -3.5)]
    plain = survey_of(unit(*rows[:5]), unit(*rows[5:]))
    found = survey_of(unit(*rows[:5], again[0]), unit(*rows[5:]), unit(again[1]))
    for grain in ("responses", "sentences"):
        assert found.scales(grain) == plain.scales(grain)
    assert (found.n_responses, found.n_sentences) == (8, 8)
    assert found.duplicates.units == [0, 2] and found.duplicates.of(2) == {8: ("logs.jsonl", 7)}


def test_a_feature_that_only_duplicates_have_was_not_measured():
    survey = Survey()
    responses, sentences = unit((0, "a", 1.0))
    survey.add("u0", responses, sentences)
    survey.take_out(responses, sentences)
    assert survey.scales("sentences") == {} and survey.n_sentences == 0


def test_a_number_that_is_not_finite_names_its_unit():
    with pytest.raises(JobError, match=r"unit u1: a measured gap is not finite; delete OUT/units/u1.json"):
        survey_of(unit((0, "a", 1.0)), unit((0, "b", float("nan"))))
