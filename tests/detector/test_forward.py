"""Masked leave-one-out, against separate float64 passes with an explicit mask over the whole sequence."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import (
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from detector import Scorer, ScorerError, attention, forward
from detector.forward import last_rows
from detector.identity import ScorerInfo
from detector.prefix_tree import build_tree, hide
from detector.probe import Keep
from detector.prompts import PROFILES
from detector.record import Record
from tests.detector.families import FAMILIES, RECORD, make_scorer
from tests.detector.reference import jensen_shannon

MASKED = Keep(masked=True)
FLOAT32 = 2e-5
"""Of logits that are as far apart as those of these widely initialised models."""

NINE_HEADS = "llama, nine heads on three keys"


def scorer_of(folder, family="llama", **settings):
    if family != NINE_HEADS:
        return make_scorer(folder, family, **settings)
    dtype = settings.get("dtype", torch.float32)
    config = LlamaConfig(
        vocab_size=512, hidden_size=36, intermediate_size=48, num_hidden_layers=3, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, initializer_range=0.3, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(dtype).eval()
    attention.register()
    model.set_attn_implementation(attention.NAME)
    fields = {"name": "tiny", "fingerprint": "0" * 12, "window_tokens": 2048, "dtype": str(dtype)[6:]}
    known = {field.name for field in dataclasses.fields(ScorerInfo)}
    info = ScorerInfo(**fields, **({"reads_attention": True} if "reads_attention" in known else {}))
    return Scorer(model, AutoTokenizer.from_pretrained(folder), info, PROFILES["plain"])


def explicit_masks(config, n_tokens, first_row, span):
    """(T, T) additive float64 masks, causal and causal within the sliding window: rows from `first_row` on do
    not see `span`.
    """
    row, column = torch.arange(n_tokens)[:, None], torch.arange(n_tokens)[None, :]
    hidden = (row >= first_row) & (column >= span[0]) & (column < span[1])
    allowed = (column <= row) & ~hidden
    window = getattr(config, "sliding_window", None) or n_tokens
    return [
        torch.where(seen, 0.0, float("-inf")).double()[None, None]
        for seen in (allowed, allowed & (row - column < window))
    ]


@torch.inference_mode()
def masked_pass(scorer, prompt, tokens, first_row, span):
    """log-probabilities (A, V) of the answer's tokens: one float64 pass, no cache, no code of ours."""
    model = copy.deepcopy(scorer.model).double()
    model.set_attn_implementation("sdpa")
    ids = (*prompt, *tokens)
    full, sliding = explicit_masks(model.config, len(ids), first_row, span)
    mask = {"full_attention": full, "sliding_attention": sliding}
    if model.config.model_type in ("llama", "mistral"):
        mask = sliding
    logits = model(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits
    return torch.log_softmax(logits[0, len(prompt) - 1 : -1], dim=-1)


def expected(scorer, reading, window, segment):
    """(K, A) log-probabilities and divergences with each piece hidden, of one segment of the answer."""
    tokens = reading.answer_ids[segment.tail : segment.stop]
    scored = slice(segment.start - segment.tail, None)
    first_row = window.layout.passages[1]
    full = masked_pass(scorer, window.full, tokens, first_row, (0, 0))[scored]
    targets = torch.tensor(tokens[scored])[:, None]
    found = [masked_pass(scorer, window.full, tokens, first_row, span)[scored] for span in window.spans]
    logprob = torch.stack([logp.gather(1, targets)[:, 0] for logp in found])
    return logprob.numpy(), torch.stack([jensen_shannon(full, logp) for logp in found]).numpy()


def assert_masked(scorer, reading, traces, atol):
    for window, trace in zip(reading.windows, traces, strict=True):
        parts = [expected(scorer, reading, window, segment) for segment in reading.segments]
        logprob, jsd = (np.concatenate(kind, axis=1) for kind in zip(*parts, strict=True))
        assert trace.logprob_without.shape == logprob.shape
        np.testing.assert_allclose(trace.logprob_without, logprob, atol=atol)
        np.testing.assert_allclose(trace.jsd_without, jsd, atol=atol)
        # A mask that hides nothing, or the wrong piece, would pass otherwise.
        assert all(np.abs(trace.logprob - one).max() > 1e-2 for one in logprob)


@pytest.mark.parametrize("family", [*FAMILIES, NINE_HEADS])
def test_a_hidden_piece_is_one_that_an_explicit_mask_hides(tiny_scorer_dir, family):
    scorer = scorer_of(tiny_scorer_dir, family)
    reading, traces = scorer.trace(RECORD, MASKED)
    assert_masked(scorer, reading, traces, FLOAT32)


@pytest.mark.parametrize("family", [*FAMILIES, NINE_HEADS])
def test_in_float64_it_is_equal_to_1e_10(tiny_scorer_dir, family):
    # The models' norms round to float32 on the way, which lifts a last digit here and there.
    scorer = scorer_of(tiny_scorer_dir, family, dtype=torch.float64)
    reading, traces = scorer.trace(RECORD, MASKED)
    assert_masked(scorer, reading, traces, 1e-10)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_hides_the_pieces_that_it_would_remove(tiny_scorer_dir, profile):
    scorer = scorer_of(tiny_scorer_dir, profile=profile)
    reading, traces = scorer.trace(RECORD, MASKED)
    assert len(traces[0].pieces) == len(reading.windows[0].spans) == 3
    assert_masked(scorer, reading, traces, FLOAT32)


def test_windows_and_segments_are_masked_each_on_its_own(tiny_scorer_dir):
    scorer = scorer_of(tiny_scorer_dir, window_tokens=260)
    answer = " ".join(f"Sentence {i} says so." for i in range(9))
    passages = [f"Passage {i} is about many things and more." for i in range(4)]
    reading, traces = scorer.trace(Record("q", passages, answer), MASKED)
    assert len(reading.windows) > 1 and len(reading.segments) > 1
    assert_masked(scorer, reading, traces, FLOAT32)


def test_a_sliding_window_goes_by_positions_whatever_is_hidden(tiny_scorer_dir):
    """Long enough that the answer's rows leave the first passages behind in Mistral's 60-token window."""
    scorer = scorer_of(tiny_scorer_dir, "mistral, sliding window")
    record = Record("q", ["Ada built the bridge in 1891.", "It was painted green."], "Ada built it. " * 4)
    reading, traces = scorer.trace(record, MASKED)
    assert len(reading.windows[0].full) > 60
    assert_masked(scorer, reading, traces, FLOAT32)


def test_answers_to_one_question_share_the_question_behind_each_hidden_piece(tiny_scorer_dir):
    scorer = scorer_of(tiny_scorer_dir)
    records = [dataclasses.replace(RECORD, answer=text) for text in (RECORD.answer, "It is blue. Is it?")]
    together = scorer.trace_together(records, MASKED)
    for record, (_, (trace,)) in zip(records, together, strict=True):
        _, (alone,) = scorer.trace(record, MASKED)
        np.testing.assert_allclose(trace.logprob_without, alone.logprob_without, atol=1e-5)
        np.testing.assert_allclose(trace.jsd_without, alone.jsd_without, atol=1e-5)
    alone = sum(scorer.trace(record, MASKED)[1][0].n_computed_tokens for record in records)
    (window,) = together[0][0].windows
    # Read once: the prompt as far as the answer, and the question again for the empty and each masked one.
    shared = len(window.full) + 4 * (len(window.full) - window.layout.passages[1])
    assert sum(trace.n_computed_tokens for _, (trace,) in together) == alone - shared


def test_full_and_empty_condition_stay_what_they_are_in_exact(tiny_scorer_dir):
    scorer = scorer_of(tiny_scorer_dir)
    keep = Keep(attention=True, layers=(1, 4), carried=True, extremes=True)
    _, (exact,) = scorer.trace(RECORD, keep)
    _, (masked,) = scorer.trace(RECORD, dataclasses.replace(keep, masked=True))
    names = ("logprob", "entropy", "logprob_no_context", "entropy_no_context", "jsd_no_context")
    names += ("top_logprob", "attention_passages", "attention_answer")
    for name in names:
        np.testing.assert_allclose(getattr(masked, name), getattr(exact, name), atol=2e-5, err_msg=name)
    for name in ("states", "carried"):
        np.testing.assert_allclose(getattr(masked, name), getattr(exact, name), atol=1e-4, err_msg=name)
    assert np.abs(masked.logprob_without - exact.logprob_without).max() > 1e-3


def test_masked_costs_the_context_once_and_every_branch_its_suffix_and_answer(tiny_scorer_dir):
    """P + C + (K + 2)(S + A), performance.md; the answer's last token predicts nothing and is not read."""
    scorer = scorer_of(tiny_scorer_dir)
    n_handed = []
    scorer.model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: n_handed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    reading, (trace,) = scorer.trace(RECORD, MASKED)
    (window,) = reading.windows
    first, stop = window.layout.passages
    n_rest = len(window.full) - stop + len(reading.answer_ids) - 1
    assert trace.n_computed_tokens == sum(n_handed) == stop + (3 + 2) * n_rest
    assert first == len(scorer.tokenizer("Context:\n")["input_ids"])


def test_without_leave_one_out_nothing_is_hidden(tiny_scorer_dir):
    scorer = scorer_of(tiny_scorer_dir)
    _, (found,) = scorer.trace(RECORD, Keep(leave_one_out=False, masked=True))
    _, (plain,) = scorer.trace(RECORD, Keep(leave_one_out=False))
    assert found.logprob_without is None and found.n_computed_tokens == plain.n_computed_tokens
    np.testing.assert_array_equal(found.logprob, plain.logprob)


def test_a_sequence_alone_hides_what_it_is_told_to(tiny_scorer_dir):
    scorer = scorer_of(tiny_scorer_dir, dtype=torch.float64)
    body = scorer.model.base_model
    ids = (5, 6, 7, 8, 9, 10, 11)
    (rows,), n_tokens = last_rows(body, [ids[:5] + hide(ids[5:], 1, 3)], [2])
    assert n_tokens == len(ids)
    logp = masked_pass(scorer, ids[:6], ids[6:], 5, (1, 3))
    head = scorer.model.get_output_embeddings()
    with torch.inference_mode():
        torch.testing.assert_close(torch.log_softmax(head(rows[:1]), -1), logp, atol=1e-8, rtol=0)


CONFIG = {"vocab_size": 512, "hidden_size": 32, "num_attention_heads": 4}
UNMASKABLE = {
    "an attention of its own": (BloomForCausalLM, BloomConfig(n_layer=2, **CONFIG), "from any layers"),
    "keeps what it is told from its layers": (
        StableLmForCausalLM,
        StableLmConfig(num_hidden_layers=2, intermediate_size=48, num_key_value_heads=4, **CONFIG),
        "from 2 of 2 layers",
    ),
}


@pytest.mark.parametrize("kind", UNMASKABLE)
def test_a_model_that_would_see_the_hidden_passage_is_refused(tiny_scorer_dir, tmp_path, kind):
    model_class, config, where = UNMASKABLE[kind]
    with torch.random.fork_rng():
        model_class(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_scorer_dir / name).read_bytes())
    scorer = Scorer.load(str(tmp_path), window_tokens=2048)
    scorer.trace(RECORD)
    with pytest.raises(ScorerError, match=where) as caught:
        scorer.trace(RECORD, MASKED)
    assert "\n" not in str(caught.value) and "use --loo exact" in str(caught.value)


def test_the_tree_of_a_masked_record_has_one_branch_a_piece(tiny):
    reading, _ = tiny.trace(RECORD, MASKED)
    (window,) = reading.windows
    stop = window.layout.passages[1]
    read, rest = window.full[:stop], window.full[stop:]
    tree = build_tree([window.full, window.none, *(read + hide(rest, *span) for span in window.spans)])
    hidden = [node.hidden for node in tree.walk() if node.hidden]
    assert hidden == list(window.spans)


@pytest.mark.parametrize("family", [*FAMILIES, NINE_HEADS])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_a_node_in_parts_gives_the_numbers_of_the_whole(tiny_scorer_dir, monkeypatch, family, size):
    scorer = scorer_of(tiny_scorer_dir, family, dtype=torch.float64)
    for masked in (False, True):
        keep = Keep(masked=masked, attention=True, layers=(1, 2), carried=True, extremes=True)
        monkeypatch.setattr(forward, "PART_TOKENS", 1 << 30)
        _, (whole,) = scorer.trace(RECORD, keep)
        monkeypatch.setattr(forward, "PART_TOKENS", size)
        _, (parts,) = scorer.trace(RECORD, keep)
        for field in dataclasses.fields(whole):
            ours, theirs = getattr(parts, field.name), getattr(whole, field.name)
            if isinstance(theirs, np.ndarray):
                np.testing.assert_allclose(ours, theirs, atol=1e-9, err_msg=field.name)
            else:
                assert ours == theirs, field.name


def test_no_more_tokens_than_a_part_run_at_once_on_a_cpu(tiny, monkeypatch):
    monkeypatch.setattr(forward, "PART_TOKENS", 16)
    body, handed = tiny.model.base_model, []
    hook = body.register_forward_pre_hook(
        lambda _module, _args, given: handed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    _, (trace,) = tiny.trace(RECORD)
    hook.remove()
    assert max(handed) == 16 and sum(handed) == trace.n_computed_tokens


def test_the_cache_of_a_walk_is_written_in_place(tiny, monkeypatch):
    seen = {}
    update = forward._Layer.update

    def watched(self, keys, values, *more, **named):
        found = update(self, keys, values, *more, **named)
        seen.setdefault(id(self), set()).update(tensor.untyped_storage().data_ptr() for tensor in found)
        assert torch.equal(found[0][:, :, -keys.shape[2] :], keys)
        return found

    monkeypatch.setattr(forward._Layer, "update", watched)
    tiny.trace(RECORD)
    assert len(seen) == 2 and len(set.union(*seen.values())) == 1
