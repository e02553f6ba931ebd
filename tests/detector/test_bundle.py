"""Bundles on disk: what comes back, what is refused, and what a scorer does with one."""

import dataclasses
import json
import pickle
import struct
import sys

import numpy as np
import pytest

from detector import ProfileError, Record, RecordRejected, Scorer
from detector.aggregate import assign_tokens
from detector.bundle import Bundle, Verdict, embedded
from detector.calibration import Reference
from detector.probe import Keep
from detector.trained import TRAINED
from tests import stand_in_head

RECORD = Record("Who?", ["Ada built it in 1891.", "Tolls ended."], "Ada did. Tolls ended. It is green.")


@pytest.fixture
def ensemble(monkeypatch):
    monkeypatch.setitem(sys.modules, "detector.ensemble", stand_in_head)


@pytest.fixture
def bundle(tiny):
    return stand_in_head.bundle(tiny.fingerprint)


@pytest.fixture
def folder(bundle, tmp_path):
    bundle.save(tmp_path / "b")
    return tmp_path / "b"


def all_parts():
    rng = np.random.default_rng(3)
    return {
        "states": {"12": {"weight": rng.normal(size=(3, 4)), "mean": rng.normal(size=4).astype(np.float32)}},
        "order": np.array([3, 1], dtype=np.int32),
        "signs": np.array([True, False]),
        "scalar": np.array(2.5),
        "trees": "tree\nversion=v4\nend of trees\n",
        "rule": "noisy-or",
        "c": 0.1,
        "n": np.int64(7),
        "balanced": False,
    }


def test_every_kind_of_part_comes_back_as_it_was(bundle, tmp_path):
    saved = Bundle(bundle.card, all_parts())
    saved.save(tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "bundle.json",
        "arrays.safetensors",
        "trees.lightgbm.txt",
    }
    loaded = Bundle.load(tmp_path / "b")
    assert (loaded.card, loaded.digest) == (saved.card, saved.digest)
    parts = loaded.parts
    for path in ("weight", "mean"):
        one, other = parts["states"]["12"][path], saved.parts["states"]["12"][path]
        assert one.dtype == other.dtype and np.array_equal(one, other)
        np.testing.assert_allclose(one, all_parts()["states"]["12"][path], rtol=1e-7)
    assert parts["states"]["12"]["weight"].dtype == np.float64
    assert parts["order"].tolist() == [3, 1] and parts["signs"].tolist() == [True, False]
    assert parts["scalar"].shape == () and parts["scalar"] == 2.5
    assert [parts[name] for name in ("rule", "c", "n", "balanced")] == ["noisy-or", 0.1, 7, False]
    assert parts["trees"] == all_parts()["trees"]


def test_the_same_bundle_has_the_same_bytes_whatever_the_order_of_its_parts(bundle):
    parts = all_parts()
    backwards = dict(reversed(parts.items()))
    first, second = Bundle(bundle.card, parts), Bundle(bundle.card, backwards)
    assert first.to_files() == second.to_files()
    assert first.digest == second.digest
    other = Bundle(bundle.card, parts | {"c": 0.2})
    assert other.digest != first.digest


def test_the_card_names_only_the_passes_that_it_asks_for(bundle, folder):
    tree = json.loads((folder / "bundle.json").read_text())
    assert tree["card"]["keep"] == {"leave_one_out": False, "attention": True, "layers": [2]}
    edit(folder, lambda t: t["card"].update(keep={}))
    assert Bundle.load(folder).card.keep == Keep()


def test_floats_are_stored_in_four_bytes(bundle):
    big = Bundle(bundle.card, {"w": np.zeros((100, 100))})
    assert len(big.to_files()["arrays.safetensors"]) < 4 * 100 * 100 + 200


def test_a_bundle_judges_alike_before_and_after_it_was_saved(ensemble, bundle, folder, tiny_scorer_dir):
    before = Scorer.load(str(tiny_scorer_dir), bundle=bundle).measure(RECORD)
    assert Scorer.load(str(tiny_scorer_dir), bundle=str(folder)).measure(RECORD) == before


def test_saving_over_another_bundle_leaves_nothing_of_it(bundle, folder):
    Bundle(bundle.card, all_parts()).save(folder)
    Bundle(bundle.card, {"rule": "max"}).save(folder)
    assert [path.name for path in folder.iterdir()] == ["bundle.json"]


# --- what is refused


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"../w": 1.0}, "named with letters"),
        ({"a/b": {"c": 1.0}}, "named with letters"),
        ({"a.b": 1.0}, "named with letters"),
        ({3: 1.0}, "named with letters"),
        ({"w": float("nan")}, "not a finite number"),
        ({"w": np.array([1.0, np.inf])}, "not finite"),
        ({"w": np.array([1e300])}, "not finite in float32"),
        ({"w": np.array(["text"])}, "cannot be stored"),
        ({"w": np.array([object()])}, "cannot be stored"),
        ({"w": [1, 2]}, "a list cannot be stored"),
        ({"w": None}, "a NoneType cannot be stored"),
        ({"w": "\ud800"}, "not Unicode"),
        ([1], "must be names and parts"),
    ],
)
def test_what_cannot_be_stored_is_refused_when_the_bundle_is_made(bundle, part, message):
    with pytest.raises(ProfileError, match=message) as caught:
        Bundle(bundle.card, part)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": 3}, "limits must be text"),
        ({"versions": {"torch": 2}}, "versions must be texts"),
        ({"figures": {"auroc": float("nan")}}, "figures must be JSON"),
        ({"operating_points": {0.05: float("nan")}}, "no operating point"),
        ({"operating_points": {5: 0.4}}, "no operating point"),
    ],
)
def test_a_card_that_says_nothing_is_refused(bundle, change, message):
    with pytest.raises(ProfileError, match=message):
        Bundle(dataclasses.replace(bundle.card, **change), {})


def edit(folder, change):
    """Rewrite bundle.json: `change` gets the tree."""
    tree = json.loads((folder / "bundle.json").read_text())
    change(tree)
    (folder / "bundle.json").write_text(json.dumps(tree))


def nest(depth):
    return {"a": nest(depth - 1)} if depth else 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("card"), "key 'card' is missing"),
        (lambda t: t.update(more=1), "key 'more' is unknown"),
        (lambda t: t.update(version=2), "not of version 1"),
        (lambda t: t.update(card=[]), "card must be an object"),
        (lambda t: t["card"].pop("limits"), "card: key 'limits' is missing"),
        (lambda t: t["card"].update(scorer=["x"]), "scorer must be text"),
        (lambda t: t["card"].update(figures={"a": float("inf")}), "not JSON with finite numbers"),
        (lambda t: t["card"].update(operating_points={"0.05": 0.5}), "must be pairs"),
        (lambda t: t["card"].update(operating_points=[[0.05, "0.5"]]), "must be numbers"),
        (lambda t: t["card"].update(operating_points=[[0.05, True]]), "must be numbers"),
        (lambda t: t["card"]["keep"].update(layers=["2"]), r"keep\.layers"),
        (lambda t: t["card"]["keep"].update(layers=[0]), r"keep\.layers"),
        (lambda t: t["card"]["keep"].update(attention=1), r"keep\.attention"),
        (lambda t: t["card"]["keep"].update(everything=True), "keep asks for what this version"),
        (lambda t: t["card"].update(keep=[]), "keep asks for what this version"),
        (lambda t: t["parts"].update({"../../secret": ["lightgbm"]}), "named with letters"),
        (lambda t: t["parts"].update({"/etc/passwd": ["lightgbm"]}), "named with letters"),
        (lambda t: t["parts"].update({"trees": ["lightgbm"]}), r"trees\.lightgbm\.txt cannot be read"),
        (lambda t: t["parts"].update({"w": ["array", "float32", [2]]}), "no such array"),
        (lambda t: t["parts"]["states"].update({"weight": ["array", "float64", [3]]}), r"not float64\[3\]"),
        (lambda t: t["parts"]["states"].update({"weight": ["array", "int64", [32]]}), r"not int64"),
        (lambda t: t["parts"].update({"w": ["array", "object", [2]]}), "neither an object"),
        (lambda t: t["parts"].update({"w": ["file", "x"]}), "neither an object"),
        (lambda t: t["parts"].update({"w": None}), "NoneType"),
        (lambda t: t.update(parts=[]), "must be names and parts"),
        (lambda t: t["parts"].update(deep=nest(20)), "nested 8 deep"),
    ],
)
def test_a_bundle_of_somebody_elses_making_is_refused_in_one_line(folder, change, message):
    edit(folder, change)
    with pytest.raises(ProfileError, match=message) as caught:
        Bundle.load(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "1e999", "[" * 100_000, '{"version": NaN}'])
def test_a_card_that_is_no_json_object_is_refused(folder, text):
    (folder / "bundle.json").write_text(text, encoding="latin-1")
    with pytest.raises(ProfileError, match=r"bundle\.json is not"):
        Bundle.load(folder)


def forged_safetensors(dtype):
    header = json.dumps({"states.weight": {"dtype": dtype, "shape": [32], "data_offsets": [0, 64]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


@pytest.mark.parametrize(
    "data", [b"", b"PK", pickle.dumps([1]), forged_safetensors("BF16"), forged_safetensors("F64")]
)
def test_an_array_file_that_is_none_is_refused(folder, data):
    (folder / "arrays.safetensors").write_bytes(data)
    with pytest.raises(ProfileError, match=r"arrays\.safetensors is not|not float64\[32\]") as caught:
        Bundle.load(folder)
    assert "\n" not in str(caught.value)


def test_arrays_with_nan_are_refused(folder):
    from safetensors.numpy import save_file

    weight = np.full(32, np.nan, dtype=np.float32)
    save_file({"states.weight": weight}, folder / "arrays.safetensors")
    with pytest.raises(ProfileError, match="not finite"):
        Bundle.load(folder)


@pytest.mark.parametrize("name", ["bundle.json", "arrays.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ProfileError, match=rf"{name} cannot be read.*leadline fit"):
        Bundle.load(folder)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ProfileError, match="no-such"):
        Bundle.load(tmp_path / "no-such")


def test_parts_that_make_no_head_are_one_line(ensemble, bundle):
    with pytest.raises(ProfileError, match="make no ensemble head of this version") as caught:
        Bundle(bundle.card, {"states": {}}).head()
    assert "\n" not in str(caught.value)


def test_a_head_that_wants_other_passes_than_its_card_says_is_refused(ensemble, bundle):
    card = dataclasses.replace(bundle.card, keep=Keep(leave_one_out=False))
    with pytest.raises(ProfileError, match="different passes"):
        Bundle(card, bundle.parts).head()


def test_another_method_is_stored_but_does_not_judge(bundle, tmp_path):
    other = Bundle(dataclasses.replace(bundle.card, method="cortex"), {"w": np.ones(3)})
    other.save(tmp_path)
    with pytest.raises(ProfileError, match="of method cortex"):
        Bundle.load(tmp_path).head()


def test_another_scorer_or_profile_is_refused_with_what_to_do(bundle, tiny):
    bundle.check(tiny.info, "plain")
    with pytest.raises(ProfileError, match=r"fitted for the scorer tiny .*leadline fit") as caught:
        bundle.check(dataclasses.replace(tiny.info, fingerprint="f00"), "plain")
    assert "\n" not in str(caught.value) and "f00" in str(caught.value)
    with pytest.raises(ProfileError, match="fitted for the prompt profile plain, here it is chat"):
        bundle.check(tiny.info, "chat")


def test_an_operating_point_that_was_not_measured_is_refused_with_those_that_were(bundle):
    assert bundle.card.threshold_at(0.05) == 0.6
    with pytest.raises(ProfileError, match=r"0\.03 was not measured.*0\.01, 0\.02, 0\.05, 0\.1, 0\.2"):
        bundle.card.threshold_at(0.03)


# --- the one that ships with the package


def test_the_embedded_bundle_is_found_by_name_and_given_only_where_it_fits(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("detector.identity.SHIPPED", tmp_path)
    bundle.save(tmp_path / "smollm2-135m")
    mark = bundle.card.scorer_fingerprint
    assert embedded("smollm2-135m", mark, "plain").digest == bundle.digest
    assert embedded("smollm2-135m", "other", "plain") is None
    assert embedded("smollm2-135m", mark, "chat") is None
    assert embedded("qwen2.5-0.5b", mark, "plain") is None


@pytest.mark.parametrize("name", ["../smollm2-135m", "..", ".", "", "/tmp", "a/b", str(sys.executable)])
def test_a_scorer_named_by_a_path_finds_none(bundle, tmp_path, monkeypatch, name):
    monkeypatch.setattr("detector.identity.SHIPPED", tmp_path / "bundles")
    for folder in (tmp_path, tmp_path / "bundles", tmp_path / "smollm2-135m"):
        bundle.save(folder)
    assert embedded(name, bundle.card.scorer_fingerprint, "plain") is None


# --- a scorer with one


@pytest.fixture
def judging(ensemble, bundle, tiny_scorer_dir):
    return Scorer.load(str(tiny_scorer_dir), bundle=bundle)


def test_every_sentence_gets_a_verdict_and_the_answer_the_heads_rule(judging, tiny):
    measured = judging.measure(RECORD)
    _, (trace,) = tiny.trace(RECORD, dataclasses.replace(stand_in_head.head().keep, leave_one_out=True))
    answer = RECORD.answer
    for sentence in measured.sentences:
        tokens = np.array(
            [
                i
                for i, (start, end) in enumerate(trace.offsets.tolist())
                if sentence.start <= start + (answer[start:end] != answer[start:end].lstrip()) < sentence.end
            ]
        )
        (expected,), _ = judging.bundle.head().judge(trace, [tokens])
        assert dataclasses.astuple(sentence.verdict) == pytest.approx(dataclasses.astuple(expected), abs=1e-5)
    assert len({s.verdict.probability for s in measured.sentences}) == 3
    assert measured.ensemble == max(s.verdict.probability for s in measured.sentences)


def test_the_other_numbers_are_those_of_a_scorer_without_one(judging, tiny):
    with_one, without = judging.measure(RECORD), tiny.measure(RECORD)
    assert without.ensemble is None and without.sentences[0].verdict is None
    for one, other in zip(with_one.sentences, without.sentences, strict=True):
        assert one.features.gap == pytest.approx(other.features.gap, abs=1e-5)
        assert one.evidence == other.evidence


def test_two_passes_are_enough(judging):
    exact, two = judging.measure(RECORD), judging.measure(RECORD, leave_one_out=False)
    assert two.n_computed_tokens < exact.n_computed_tokens
    for one, other in zip(exact.sentences, two.sentences, strict=True):
        assert one.verdict.probability == pytest.approx(other.verdict.probability, abs=1e-5)


def test_findings_carry_the_probability_and_are_flagged_at_the_operating_point(judging):
    found = judging.audit(RECORD)
    assert found.threshold == 0.6
    for finding in found.sentences:
        assert finding.score == finding.verdict.probability
        assert finding.flagged == (finding.score >= 0.6)
    assert judging.audit(RECORD, method="gap").threshold is None


def test_a_reference_names_the_method_that_decides(judging):
    reference = dataclasses.replace(Reference.identity(), deciding_method="gap", threshold=0.0)
    found = judging.audit(RECORD, reference)
    assert [f.score for f in found.sentences] == [-s.features.gap for s in found.measurement.sentences]


def test_without_a_bundle_the_ensemble_was_not_measured(tiny):
    with pytest.raises(ProfileError, match="no bundle fits this scorer"):
        tiny.audit(RECORD, method="ensemble")


def test_a_context_of_several_windows_takes_the_window_where_the_sentence_is_best_grounded(
    ensemble, bundle, tiny_scorer_dir
):
    scorer = Scorer.load(str(tiny_scorer_dir), bundle=bundle, window_tokens=256)
    record = Record("Who?", [f"Passage {i} says little of it, and slowly." for i in range(12)], RECORD.answer)
    measured = scorer.measure(record)
    reading, traces = scorer.trace(record, bundle.head().keep)
    assert len(traces) > 1
    owner = assign_tokens(record.answer, traces[0].offsets, reading.sentences)
    members = [np.flatnonzero(owner == i) for i in range(len(reading.sentences))]
    probabilities = [[v.probability for v in bundle.head().judge(t, members)[0]] for t in traces]
    lowest = np.min(probabilities, axis=0)
    assert not np.allclose(lowest, probabilities[0])
    assert [s.verdict.probability for s in measured.sentences] == pytest.approx(lowest.tolist(), abs=1e-5)
    assert measured.ensemble == pytest.approx(np.max(probabilities, axis=1).min(), abs=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5, -0.5])
def test_a_head_that_gives_no_probability_costs_the_record_and_not_the_run(judging, monkeypatch, value):
    monkeypatch.setattr(
        stand_in_head.StandInHead,
        "judge",
        lambda self, trace, sentences: ([Verdict(value, 0.0, 0.0, 0.0)] * len(sentences), 0.5),
    )
    with pytest.raises(RecordRejected, match="gave no probability"):
        judging.measure(RECORD)


def test_a_bundle_that_needs_leave_one_out_says_so_where_it_is_off(judging, monkeypatch):
    monkeypatch.setattr(stand_in_head.StandInHead, "keep", Keep(attention=True, layers=(2,)))
    with pytest.raises(ProfileError, match="leave-one-out"):
        judging.measure(RECORD, leave_one_out=False)


def test_a_bundle_that_was_fitted_on_exact_leave_one_out_judges_no_masked_one(judging, monkeypatch):
    judging.measure(RECORD, masked=True)  # this head reads none
    monkeypatch.setattr(stand_in_head.StandInHead, "keep", Keep(attention=True, layers=(2,)))
    with pytest.raises(ProfileError, match="fitted on exact leave-one-out") as caught:
        judging.measure(RECORD, masked=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("choice", ["auto", None])
def test_a_scorer_that_no_bundle_fits_has_none(tiny_scorer_dir, choice):
    assert Scorer.load(str(tiny_scorer_dir), bundle=choice).bundle is None


def test_a_scorer_refuses_a_bundle_of_another(tiny_scorer_dir, bundle, ensemble):
    with pytest.raises(ProfileError, match="fitted for the prompt profile plain, here it is chat"):
        Scorer.load(str(tiny_scorer_dir), bundle=bundle, profile="chat")
    with pytest.raises(ProfileError, match="fitted for the scorer tiny"):
        Scorer.load(str(tiny_scorer_dir), bundle=stand_in_head.bundle("f00"))


# --- with the real head


def test_the_head_of_the_package_is_stored_whole_and_explains_its_findings(tiny, tiny_scorer_dir, tmp_path):
    from detector import ensemble
    from detector.heads import Labelled

    keep = TRAINED["ensemble"].keep(2)
    examples = []
    for i in range(24):
        record = Record(f"Who {i}?", RECORD.passages, f"Ada did {i} of it. Tolls {i * 7} ended. Green, {i}.")
        reading, (trace,) = tiny.trace(record, keep)
        owner = assign_tokens(record.answer, trace.offsets, reading.sentences)
        bad = np.array([False, False, i % 2 == 0])
        examples.append(
            Labelled(
                trace=trace,
                sentences=tuple(np.flatnonzero(owner == k) for k in range(3)),
                token_labels=bad[owner] & (owner >= 0),
                sentence_labels=bad,
                label=bool(bad.any()),
                source_id=str(i),
            )
        )
    head = ensemble.fit(examples, layers=keep.layers)
    card = dataclasses.replace(stand_in_head.bundle(tiny.fingerprint).card, keep=head.keep)
    made = Bundle(card, head.to_parts())
    made.save(tmp_path)
    assert Bundle.load(tmp_path).digest == made.digest
    for first, again in zip(
        head.judge(examples[0].trace, examples[0].sentences)[0],
        Bundle.load(tmp_path).head().judge(examples[0].trace, examples[0].sentences)[0],
        strict=True,
    ):
        assert dataclasses.astuple(again) == pytest.approx(dataclasses.astuple(first), abs=1e-4)
    found = Scorer.load(str(tiny_scorer_dir), bundle=str(tmp_path)).audit(RECORD)
    assert all(0 <= finding.score <= 1 and finding.evidence for finding in found.sentences)
    assert 0 <= found.measurement.ensemble <= 1
