import dataclasses
import math

import pytest

from detector import ProfileError, Record
from detector.calibration import Reference, Scale
from detector.findings import find

RECORD = Record("Who?", ["Ada built it.", "Tolls ended."], "Ada did. Tolls ended. It is green.")


def test_scores_are_standardised_with_the_reference(tiny):
    measured = tiny.measure(RECORD)
    plain = Reference.identity()
    scales = dict(plain.sentences) | {"gap": Scale(mean=0.5, sd=2.0)}
    reference = dataclasses.replace(plain, sentences=scales, deciding_method="gap", threshold=0.0)
    for finding, sentence in zip(
        find(RECORD, measured, reference, "gap").sentences, measured.sentences, strict=True
    ):
        assert finding.score == pytest.approx(-(sentence.features.gap - 0.5) / 2.0)
        assert finding.flagged == (finding.score >= 0.0)


def test_a_threshold_of_another_method_flags_nothing(tiny):
    reference = dataclasses.replace(Reference.identity(), deciding_method="gap", threshold=-1e9)
    assert not any(f.flagged for f in find(RECORD, tiny.measure(RECORD), reference, "gasp").sentences)


def test_unknown_methods_and_missing_features_are_one_line(tiny):
    with pytest.raises(ProfileError, match="no method 'judge'; known: ensemble, blend, gasp"):
        find(RECORD, tiny.measure(RECORD), Reference.identity(), "judge")
    with pytest.raises(ProfileError, match="leave-one-out was off"):
        find(RECORD, tiny.measure(RECORD, leave_one_out=False), Reference.identity(), "gasp")


def test_the_blend_adds_readings_of_different_directions(tiny):
    measured, plain = tiny.measure(RECORD), Reference.identity()
    for finding, sentence in zip(
        find(RECORD, measured, plain, "blend").sentences, measured.sentences, strict=True
    ):
        read = sentence.features
        expected = read.absent_pairs - read.jsd_none - read.attention_share + math.log(sentence.n_tokens)
        assert finding.score == pytest.approx(expected)


def test_the_blend_of_a_scorer_whose_attention_cannot_be_read_is_one_line(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "info", dataclasses.replace(tiny.info, reads_attention=False))
    measured = tiny.measure(RECORD)
    with pytest.raises(ProfileError, match=r"attention_share was not measured.*cannot be read"):
        find(RECORD, measured, Reference.identity(), "blend")
