import dataclasses

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from detector import Record, Scorer
from detector.probe import Keep
from detector.trace import Trace
from jobs.traces import TraceStore, trace_key, wanted

RECORD = Record(
    question="Who built it?",
    passages=["Ada built the bridge in 1891.", "It is green."],
    answer="Ada built it. It is blue.",
)
EVERYTHING = Keep(extremes=True, attention=True, layers=(1, 2, 3), carried=True)


@pytest.fixture(scope="module")
def tiny(tiny_scorer_dir):
    return Scorer.load(str(tiny_scorer_dir))


@pytest.fixture(scope="module")
def traces(tiny):
    return tiny.trace(RECORD, EVERYTHING)[1]


@pytest.fixture
def store(tmp_path):
    return TraceStore(tmp_path / "traces")


def assert_equal(ours, theirs):
    for field in dataclasses.fields(Trace):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        assert type(a) is type(b), field.name
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name


def test_what_was_put_is_got_bit_for_bit(store, traces):
    store.put("k", traces)
    (found,) = store.get("k", EVERYTHING)
    assert_equal(found, traces[0])


def test_a_trace_without_optional_fields_comes_back_without_them(store, tiny):
    keep = Keep(leave_one_out=False)
    _, traces = tiny.trace(RECORD, keep)
    store.put("k", traces)
    (found,) = store.get("k", keep)
    assert_equal(found, traces[0])
    assert found.logprob_without is None and found.states is None


def test_what_was_cut_is_said_to_be_cut(store, traces):
    store.put("k", [dataclasses.replace(traces[0], truncated=True)])
    assert store.get("k", Keep())[0].truncated is True


@pytest.mark.parametrize("layers", [(2,), (3, 1), ()])
def test_a_subset_of_layers_comes_in_the_order_that_was_asked_for(store, traces, layers):
    store.put("k", traces)
    (found,) = store.get("k", Keep(layers=layers, carried=True))
    assert found.layers == layers
    if not layers:
        assert found.states is None and found.carried is None
        return
    rows = [EVERYTHING.layers.index(layer) for layer in layers]
    np.testing.assert_array_equal(found.states, traces[0].states[rows])
    np.testing.assert_array_equal(found.carried, traces[0].carried[rows])


def test_all_windows_of_a_record_come_back_in_order(store, tiny_scorer_dir):
    scorer = Scorer.load(str(tiny_scorer_dir), window_tokens=400)
    passages = [f"Passage {i} " + "about many things " * 6 for i in range(9)]
    _, traces = scorer.trace(Record("q", passages, "An answer."), Keep(attention=True))
    assert len(traces) > 1
    store.put("k", traces)
    for found, put in zip(store.get("k", Keep(attention=True)), traces, strict=True):
        assert_equal(found, put)


def test_what_was_never_put_is_none(store):
    assert store.get("k", Keep()) is None


@pytest.mark.parametrize(
    "more",
    [
        Keep(),  # leave-one-out
        Keep(False, extremes=True),
        Keep(False, attention=True),
        Keep(False, layers=(2,)),
        Keep(False, layers=(1,), carried=True),
    ],
)
def test_a_file_that_lacks_what_is_asked_for_is_none(store, tiny, more):
    store.put("k", tiny.trace(RECORD, Keep(False, layers=(1,)))[1])
    assert store.get("k", Keep(False, layers=(1,))) is not None
    assert store.get("k", more) is None


def test_a_fuller_measurement_adds_to_a_poorer_one_whose_numbers_stay(store, tiny, traces):
    poorer = tiny.trace(RECORD, Keep(False))[1]
    store.put("k", poorer)
    store.put("k", traces)
    (found,) = store.get("k", EVERYTHING)
    np.testing.assert_array_equal(found.logprob, poorer[0].logprob)
    np.testing.assert_array_equal(found.states, traces[0].states)
    np.testing.assert_array_equal(found.logprob_without, traces[0].logprob_without)


def test_a_poorer_measurement_takes_nothing_away(store, tiny, traces):
    store.put("k", traces)
    store.put("k", tiny.trace(RECORD, Keep(False, layers=(2,)))[1])
    assert_equal(store.get("k", EVERYTHING)[0], traces[0])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_none(store, traces, tmp_path, share):
    store.put("k", traces)
    (path,) = (tmp_path / "traces").glob("*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert store.get("k", EVERYTHING) is None


@pytest.mark.parametrize("missing", ["logprob", "token_ids", "jsd_no_context"])
def test_a_file_without_a_field_that_every_trace_has_is_none(store, traces, tmp_path, missing):
    store.put("k", traces)
    (path,) = (tmp_path / "traces").glob("*.safetensors")
    with safe_open(path, "numpy") as file:
        meta = file.metadata()
    arrays = load_file(path)
    del arrays[missing]
    save_file(arrays, path, metadata=meta)
    assert store.get("k", Keep()) is None


@pytest.mark.parametrize("lost", [None, "n_windows", "layers", "counts"])
def test_a_file_whose_description_is_incomplete_is_none(store, traces, tmp_path, lost):
    store.put("k", traces)
    (path,) = (tmp_path / "traces").glob("*.safetensors")
    with safe_open(path, "numpy") as file:
        meta = file.metadata()
    save_file(load_file(path), path, metadata=lost and {k: v for k, v in meta.items() if k != lost})
    assert store.get("k", Keep()) is None


def test_a_record_with_a_window_missing_is_none(store, traces, tmp_path):
    store.put("k", [traces[0], traces[0]])
    assert len(store.get("k", Keep())) == 2
    (tmp_path / "traces" / "k-1.safetensors").unlink()
    assert store.get("k", Keep()) is None


def test_nothing_but_whole_files_is_left_in_the_folder(store, traces, tmp_path):
    store.put("k", traces)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["k-0.safetensors"]


@pytest.mark.parametrize(
    "change",
    [
        {"question": "Who?"},
        {"passages": ("Ada built the bridge in 1891.",)},
        {"passages": ("Ada built the bridge in 1891.It is green.",)},
        {"answer": "Ada built it."},
        {"language": "de"},
    ],
    ids=str,
)
def test_the_key_follows_what_the_numbers_depend_on(tiny, change):
    fields = {
        "question": RECORD.question,
        "passages": [passage.text for passage in RECORD.passages],
        "answer": RECORD.answer,
    }
    assert trace_key(Record(**fields), tiny) == trace_key(RECORD, tiny)
    assert trace_key(Record(**fields | change), tiny) != trace_key(RECORD, tiny)


def test_one_text_with_and_without_passage_boundaries_are_two_keys(tiny):
    whole = Record("q", ["One. Two."], "One.")
    assert trace_key(whole, tiny) != trace_key(dataclasses.replace(whole, undivided=True), tiny)


def test_the_key_follows_scorer_and_profile_and_ignores_the_name_of_the_answer(tiny, tiny_scorer_dir):
    named = dataclasses.replace(RECORD, response_id="another")
    assert trace_key(named, tiny) == trace_key(RECORD, tiny)
    keys = {trace_key(RECORD, tiny)}
    for settings in ({"profile": "chat"}, {"window_tokens": 500}, {"dtype": "bfloat16"}):
        keys.add(trace_key(RECORD, Scorer.load(str(tiny_scorer_dir), **settings)))
    assert len(keys) == 4


def test_wanted_names_fields_of_a_trace():
    assert wanted(EVERYTHING) <= {field.name for field in dataclasses.fields(Trace)}
    assert wanted(Keep(False)) == set()


def test_masked_leave_one_out_has_a_key_of_its_own(tiny, store):
    """Its numbers have the names of exact ones, and a file adds to what it held before."""
    masked = Keep(masked=True)
    assert trace_key(RECORD, tiny, Keep()) == trace_key(RECORD, tiny) != trace_key(RECORD, tiny, masked)
    # Without leave-one-out there is nothing to mask, and what a Keep asks for besides is no part of a key.
    assert trace_key(RECORD, tiny, Keep(False, masked=True)) == trace_key(RECORD, tiny, EVERYTHING)
    for keep in (Keep(), masked):
        store.put(trace_key(RECORD, tiny, keep), tiny.trace(RECORD, keep)[1])
    exact, hidden = (store.get(trace_key(RECORD, tiny, keep), keep)[0] for keep in (Keep(), masked))
    assert np.abs(exact.logprob_without - hidden.logprob_without).max() > 1e-3
