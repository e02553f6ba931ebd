import numpy as np
import pytest
import torch

from detector import ScorerError
from detector.forward import last_rows
from detector.prefix_tree import build_tree
from detector.probe import FULL, NONE, Keep, Probe, blocks
from detector.record import Record
from detector.windows import Layout
from tests.detector.families import FAMILIES, RECORD, make_scorer, read_eagerly


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_equal_output_hidden_states_of_both_conditions(tiny_scorer_dir, family, leave_one_out):
    scorer = make_scorer(tiny_scorer_dir, family)
    layers = (4, 1, 3, 2)  # any order: it is kept
    reading, (trace,) = scorer.trace(RECORD, Keep(leave_one_out=leave_one_out, layers=layers))
    (window,) = reading.windows
    assert trace.layers == layers
    assert trace.states.shape == (4, 2, len(reading.answer_ids) + 1, 32)
    for condition, prompt in ((FULL, window.full), (NONE, window.none)):
        _, states = read_eagerly(scorer, prompt + reading.answer_ids)
        for index, layer in enumerate(layers):
            expected = states[layer][len(prompt) - 1 :]
            scale = np.abs(expected).max()
            np.testing.assert_allclose(trace.states[index, condition] / scale, expected / scale, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_carried_equals_a_double_loop_over_earlier_answer_tokens(tiny_scorer_dir, family):
    scorer = make_scorer(tiny_scorer_dir, family)
    layers = (1, 3, 4)
    reading, (trace,) = scorer.trace(RECORD, Keep(layers=layers, carried=True))
    (window,) = reading.windows
    maps, full = read_eagerly(scorer, window.full + reading.answer_ids)
    _, none = read_eagerly(scorer, window.none + reading.answer_ids)
    n_full, n_none, n_answer = len(window.full), len(window.none), len(reading.answer_ids)
    assert trace.carried.shape == (3, n_answer, 32)
    for index, layer in enumerate(layers):
        alpha = maps[min(layer, 3) - 1].mean(axis=0)  # after the final norm: still the last block's attention
        change = full[layer][n_full:] - none[layer][n_none:]
        expected = np.zeros((n_answer, 32))
        for i in range(n_answer):
            for j in range(i):
                expected[i] += alpha[n_full + i, n_full + j] * change[j]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(trace.carried[index] / scale, expected / scale, atol=1e-5)
        assert not trace.carried[index, 0].any()  # nothing comes before the first token


def test_rows_of_attention_and_states_start_at_the_last_prompt_token(tiny):
    """A one-token answer has two rows: the one that predicts it and its own."""
    keep = Keep(attention=True, layers=(1,), carried=True)
    _, (trace,) = tiny.trace(Record("q", ["A passage."], "a"), keep)
    assert len(trace.token_ids) == 1
    assert trace.attention_answer.shape == (2, 4, 2) and trace.states.shape == (1, 2, 2, 32)
    assert trace.carried.shape == (1, 1, 32)
    # Behind the header alone, then behind header and token.
    assert trace.n_header_tokens == len(tiny.tokenizer("Answer:\n")["input_ids"])
    assert (trace.attention_answer > 0).all()
    assert (trace.attention_answer + trace.attention_passages <= 1 + 1e-6).all()


def test_what_was_not_asked_for_is_none(tiny):
    _, (trace,) = tiny.trace(RECORD)
    optional = ("top_logprob", "rank", "attention_passages", "attention_answer", "states", "carried")
    assert all(getattr(trace, name) is None for name in optional) and trace.layers == ()


def test_the_own_row_costs_one_token_a_condition(tiny):
    _, (without,) = tiny.trace(RECORD, Keep(leave_one_out=False))
    _, (with_row,) = tiny.trace(RECORD, Keep(leave_one_out=False, attention=True))
    assert with_row.n_computed_tokens == without.n_computed_tokens + 2


def hooks(scorer):
    return [len(block._forward_hooks) for block in blocks(scorer.model.base_model)]


def test_hooks_are_removed_afterwards_even_when_the_walk_fails(tiny, monkeypatch):
    # transformers leaves hooks of its own on a model that was once asked for hidden states.
    before = hooks(tiny)
    tiny.trace(RECORD, Keep(layers=(1, 2)))
    assert hooks(tiny) == before
    during = []

    def fail(self, rows):
        during.extend(hooks(tiny))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Probe, "enter", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        tiny.trace(RECORD, Keep(layers=(1, 2)))
    assert during == [n + 1 for n in before] and hooks(tiny) == before


def held(scorer, keep, monkeypatch):
    """Bytes of storage that a probe keeps alive at the end of its walk: (states, attention, alphas)."""
    found = []
    original = Probe.finish

    def watched(self, hidden):
        original(self, hidden)
        states = [tensor for parts in self._states.values() for tensor in parts]
        shares = [part for parts in self._shares.values() for part in parts]
        attention = [tensor for part in shares for tensor in (part.passages, part.answer)]
        alphas = [tensor for parts in self._alphas.values() for tensor in parts]
        found.extend(sum(t.untyped_storage().nbytes() for t in kind) for kind in (states, attention, alphas))

    with monkeypatch.context() as patch:
        patch.setattr(Probe, "finish", watched)
        scorer.trace(RECORD, keep)
    return found


def test_what_is_kept_does_not_grow_with_layers_that_are_not_in_use(tiny_scorer_dir, monkeypatch):
    keep = Keep(layers=(1, 2), carried=True)
    shallow = held(make_scorer(tiny_scorer_dir, n_layers=2), keep, monkeypatch)
    deep = held(make_scorer(tiny_scorer_dir, n_layers=7), keep, monkeypatch)
    assert shallow == deep


def test_nothing_is_kept_but_the_answer_rows_of_layers_in_use_and_reduced_attention(
    tiny_scorer_dir, monkeypatch
):
    """Storage, not shapes: a view of a row would keep a whole node or map alive."""
    scorer = make_scorer(tiny_scorer_dir)
    n_rows = len(scorer.trace(RECORD)[0].answer_ids) + 1
    keep = Keep(attention=True, layers=(2,), carried=True)
    states, attention, alphas = held(scorer, keep, monkeypatch)
    assert states == 2 * n_rows * 32 * 4
    assert attention == 2 * 3 * 4 * n_rows * 4
    assert alphas == n_rows * (n_rows - 1) * 4


@pytest.mark.parametrize("layers", [(0,), (4,), (-1,), (1, 1)])
def test_layers_that_the_scorer_does_not_have_are_refused(tiny, layers):
    with pytest.raises(ScorerError, match="this scorer has 1 to 2, and 3 for the last one"):
        tiny.trace(RECORD, Keep(layers=layers))


def test_last_rows_gives_each_sequence_as_many_rows_as_it_asks_for(tiny):
    sequences = [(5, 6, 7, 8, 9), (5, 6, 7, 1), (5, 2, 3, 4, 4, 4), (5, 6)]
    n_rows = [2, 3, 1, 2]
    body = tiny.model.base_model
    found, n_computed = last_rows(body, sequences, n_rows)
    assert n_computed == build_tree(sequences).n_tokens
    for sequence, n, rows in zip(sequences, n_rows, found, strict=True):
        with torch.inference_mode():
            whole = body(input_ids=torch.tensor([sequence]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(rows, whole[len(sequence) - n :], atol=1e-5, rtol=1e-5)


def test_each_probe_sees_its_own_sequences_only(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir)
    body = scorer.model.base_model
    sequences = [(5, 6, 7, 8, 9), (5, 7, 8, 9), (5, 6, 7, 1, 2), (5, 7, 1, 2)]
    keep = Keep(attention=True, layers=(1, 4), carried=True)
    probes = [Probe(body, keep, Layout((1, 2), 2), (), (3, 5), first) for first in (0, 2)]
    last_rows(body, sequences, [3] * 4, probes)
    for index, probe in enumerate(probes):
        alone = Probe(body, keep, Layout((1, 2), 2), (), (3, 5), 0)
        last_rows(body, sequences[2 * index : 2 * index + 2], [3] * 2, [alone])
        torch.testing.assert_close(probe.states(), alone.states(), atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(probe.attention(), alone.attention(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            probe.carried(probe.states()), alone.carried(alone.states()), atol=1e-5, rtol=1e-5
        )


def test_a_long_answer_in_segments_has_one_row_more_than_tokens(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir, window_tokens=300)
    answer = " ".join(f"Sentence {i} says so." for i in range(11))
    keep = Keep(leave_one_out=False, attention=True, layers=(2,), carried=True)
    reading, (trace,) = scorer.trace(Record("q", ["A passage.", "Another one."], answer), keep)
    (window,) = reading.windows
    assert len(reading.segments) == 3
    n_answer = len(reading.answer_ids)
    assert trace.attention_answer.shape[2] == trace.states.shape[2] == n_answer + 1
    assert trace.carried.shape[1] == n_answer
    for segment in reading.segments:
        tokens = reading.answer_ids[segment.tail : segment.stop]
        maps, states = read_eagerly(scorer, window.full + tokens)
        first = len(window.full) + segment.start - segment.tail - 1  # the row that predicts its first token
        # Where segments meet, the row is the later one's; only the last one keeps its last token's own row.
        n_rows = segment.stop - segment.start + (segment.stop == n_answer)
        rows = slice(segment.start, segment.start + n_rows)
        expected = maps[:, :, first : first + n_rows, window.layout.header :].sum(-1)
        np.testing.assert_allclose(trace.attention_answer[:, :, rows], expected, atol=1e-5)
        np.testing.assert_allclose(
            trace.states[0, FULL, rows], states[2][first : first + n_rows], atol=1e-4, rtol=1e-4
        )
