"""LUMINA's pass with foreign passages, against plain passes through the whole model; memory that runs out."""

import dataclasses

import numpy as np
import pytest
import torch

from detector import lumina
from detector.errors import DetectorError, RecordRejected
from detector.probe import Keep
from detector.prompts import read_record
from detector.record import Passage, Record
from detector.trace import Trace
from detector.vocabulary import BLOCK_BYTES, LEAST_BLOCK_BYTES, Head
from tests.detector.test_methods import ANSWERS, PASSAGES
from tests.detector.test_vocabulary import FULL
from tests.figures.exact_equals_separate import tiny_float64

FOIL = (Passage("Cats sleep for most of the day."), Passage("They purr."))
WITH_FOIL = Keep(leave_one_out=False, foil=True)


def record(answer=ANSWERS["plain"], passages=PASSAGES):
    return Record(question="Who?", passages=passages, answer=answer)


def foil_prompt(scorer, one, foil=FOIL):
    foreign = dataclasses.replace(one, passages=foil)
    return read_record(foreign, scorer.tokenizer, scorer.profile, scorer.window_tokens).windows[0].full


def states(model, prompt, answer_ids):
    """The states after the final norm that predict each answer token, by one plain pass."""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *answer_ids]])
        out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    return out.hidden_states[-1][0, len(prompt) - 1 : -1]


def separate(scorer, full, foil, answer_ids):
    model = scorer.model
    head = Head(model.get_output_embeddings().weight.detach())
    embeddings = model.get_input_embeddings().weight.detach()
    both = (states(model, prompt, answer_ids) for prompt in (full, foil))
    return lumina.mmd(*both, head, embeddings).numpy()


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_the_external_term_is_that_of_two_separate_passes(tiny, answer):
    one = record(answer)
    reading, (trace,) = tiny.trace(one, WITH_FOIL, foil=FOIL)
    wanted = separate(tiny, reading.windows[0].full, foil_prompt(tiny, one), reading.answer_ids)
    assert trace.mmd_foil.shape == trace.logprob.shape and trace.mmd_foil.dtype == np.float32
    np.testing.assert_allclose(trace.mmd_foil, wanted, atol=1e-5)
    assert (trace.mmd_foil > 1e-3).any()


def test_the_external_term_is_exact_in_float64(tiny_scorer_dir):
    scorer, one = tiny_float64(tiny_scorer_dir), record()
    reading, (trace,) = scorer.trace(one, WITH_FOIL, foil=FOIL)
    wanted = separate(scorer, reading.windows[0].full, foil_prompt(scorer, one), reading.answer_ids)
    assert trace.mmd_foil.dtype == np.float64
    np.testing.assert_allclose(trace.mmd_foil, wanted, atol=1e-10)


@pytest.mark.parametrize("profile", ["chat", "refind", "gasp-v2"])
def test_every_profile_reads_foreign_passages_as_it_reads_its_own(tiny_of, profile):
    scorer, one = tiny_of(profile=profile), record()
    reading, (trace,) = scorer.trace(one, WITH_FOIL, foil=FOIL)
    wanted = separate(scorer, reading.windows[0].full, foil_prompt(scorer, one), reading.answer_ids)
    np.testing.assert_allclose(trace.mmd_foil, wanted, atol=1e-5)


def test_nothing_else_in_the_trace_knows_of_the_foil(tiny):
    keep = Keep(foil=True, extremes=True, attention=True, layers=(1, 3), carried=True, words=True)
    _, (found,) = tiny.trace(record(), keep, foil=FOIL)
    _, (plain,) = tiny.trace(record(), dataclasses.replace(keep, foil=False))
    assert plain.mmd_foil is None and found.n_computed_tokens > plain.n_computed_tokens
    for field in dataclasses.fields(Trace):
        ours, theirs = getattr(found, field.name), getattr(plain, field.name)
        if field.name in ("mmd_foil", "n_computed_tokens"):
            continue
        if isinstance(theirs, np.ndarray):
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=field.name)
        else:
            assert ours == theirs, field.name


def test_the_records_own_passages_as_foil_move_nothing(tiny):
    _, (trace,) = tiny.trace(record(), WITH_FOIL, foil=record().passages)
    np.testing.assert_allclose(trace.mmd_foil, 0.0, atol=1e-9)


def test_a_long_answer_is_read_with_the_foil_in_segments(tiny_of):
    scorer = tiny_of(window_tokens=300)
    one = record(" ".join(f"Sentence {i} says so." for i in range(30)))
    reading, (trace,) = scorer.trace(one, WITH_FOIL, foil=FOIL)
    assert len(reading.segments) > 1 and trace.mmd_foil.shape == (len(reading.answer_ids),)
    foil = foil_prompt(scorer, one)
    for segment in reading.segments:
        n_read = segment.start - segment.tail
        ids = reading.answer_ids[segment.tail : segment.stop]
        wanted = separate(scorer, reading.windows[0].full, foil, ids)[n_read:]
        np.testing.assert_allclose(trace.mmd_foil[segment.start : segment.stop], wanted, atol=1e-5)


def test_every_window_is_compared_with_the_foil(tiny_of):
    scorer = tiny_of(window_tokens=400)
    one = record("An answer.", [f"Passage {i} " + "about many things " * 6 for i in range(9)])
    reading, traces = scorer.trace(one, WITH_FOIL, foil=FOIL)
    assert len(traces) > 1
    for window, trace in zip(reading.windows, traces, strict=True):
        wanted = separate(scorer, window.full, foil_prompt(scorer, one), reading.answer_ids)
        np.testing.assert_allclose(trace.mmd_foil, wanted, atol=1e-5)


def test_without_a_foil_it_is_said_in_one_line(tiny):
    for read in (
        lambda: tiny.trace(record(), WITH_FOIL),
        lambda: tiny.trace_together([record(), record("Tolls ended.")], WITH_FOIL),
    ):
        with pytest.raises(DetectorError, match="foil=") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_foil_without_text_is_refused(tiny):
    with pytest.raises(RecordRejected, match="passage_text_missing"):
        tiny.trace(record(), WITH_FOIL, foil=(Passage("  "),))


def test_an_undivided_record_takes_a_foil_of_several_passages(tiny):
    one = Record("Who?", ["Ada built it. It is green."], "Ada.", undivided=True)
    _, (trace,) = tiny.trace(one, WITH_FOIL, foil=FOIL)
    assert np.isfinite(trace.mmd_foil).all()


def short_of_memory(monkeypatch, errors):
    """Let the head's product fail with each of `errors`, one a call, and succeed when they are used up."""
    original, left = Head.logits, list(errors)

    def logits(self, *arguments):
        if left:
            raise left.pop(0)
        return original(self, *arguments)

    monkeypatch.setattr(Head, "logits", logits)
    return left


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_record_that_does_not_fit_is_reduced_again_in_smaller_tiles(tiny_of, monkeypatch, error):
    scorer, keep = tiny_of(), Keep(extremes=True, attention=True, layers=(1,), foil=True)
    _, (plain,) = scorer.trace(record(), keep, foil=FOIL)
    left = short_of_memory(monkeypatch, [error])
    _, (found,) = scorer.trace(record(), keep, foil=FOIL)
    assert not left and scorer._passes._tile.block_bytes == BLOCK_BYTES // 2
    for field in dataclasses.fields(Trace):
        ours, theirs = getattr(found, field.name), getattr(plain, field.name)
        if isinstance(theirs, np.ndarray):
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=field.name)
        else:
            assert ours == theirs, field.name


def test_a_record_that_no_tile_fits_raises_and_the_next_one_is_read_as_before(tiny_of, monkeypatch):
    scorer = tiny_of()
    _, (plain,) = scorer.trace(record())
    n_tries = (BLOCK_BYTES // LEAST_BLOCK_BYTES).bit_length()
    left = short_of_memory(monkeypatch, [FULL["torch"]] * n_tries)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        scorer.trace(record())
    assert not left
    _, (found,) = scorer.trace(record())
    np.testing.assert_array_equal(found.logprob, plain.logprob)
    np.testing.assert_array_equal(found.jsd_without, plain.jsd_without)
