import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from detector import Scorer, ScorerError, attention
from detector.attention import Rows, head_mean, shares
from detector.probe import Keep
from detector.windows import Layout
from tests.detector.families import FAMILIES, RECORD, make_scorer, read_eagerly
from tests.detector.reference import separate_passes


def expected_shares(scorer, reading):
    """Sums over `output_attentions` of the answer rows, (L, H, A + 1) each."""
    (window,) = reading.windows
    maps, _ = read_eagerly(scorer, window.full + reading.answer_ids)
    rows = maps[:, :, len(window.full) - 1 :]
    first, stop = window.layout.passages
    return rows[..., first:stop].sum(-1), rows[..., window.layout.header :].sum(-1)


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_equal_output_attentions_of_eager(tiny_scorer_dir, family, leave_one_out):
    scorer = make_scorer(tiny_scorer_dir, family)
    reading, (trace,) = scorer.trace(RECORD, Keep(leave_one_out=leave_one_out, attention=True))
    passages, answer = expected_shares(scorer, reading)
    assert trace.attention_passages.shape == (3, 4, len(reading.answer_ids) + 1)
    np.testing.assert_allclose(trace.attention_passages, passages, atol=1e-5)
    np.testing.assert_allclose(trace.attention_answer, answer, atol=1e-5)
    assert passages.std() > 0.01 and answer.std() > 0.01  # else a wrong row would pass too


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_shares_are_equal_to_1e_10(tiny_scorer_dir, family):
    scorer = make_scorer(tiny_scorer_dir, family, dtype=torch.float64)
    # Eager attention rounds its softmax to float32, so the model's own operands are the reference here.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", softmax_in_the_model_s_precision)
        reading, (trace,) = scorer.trace(RECORD, Keep(attention=True))
        passages, answer = expected_shares(scorer, reading)
    np.testing.assert_allclose(trace.attention_passages, passages, atol=1e-10)
    np.testing.assert_allclose(trace.attention_answer, answer, atol=1e-10)


def softmax_in_the_model_s_precision(logits, dim, dtype=None, **_):
    return torch.softmax(logits, dim)


@pytest.mark.parametrize("profile", ["chat", "gasp-v1", "gasp-v2"])
def test_shares_follow_the_layout_of_every_profile(tiny_scorer_dir, profile):
    scorer = make_scorer(tiny_scorer_dir, profile=profile)
    reading, (trace,) = scorer.trace(RECORD, Keep(attention=True))
    passages, answer = expected_shares(scorer, reading)
    np.testing.assert_allclose(trace.attention_passages, passages, atol=1e-5)
    np.testing.assert_allclose(trace.attention_answer, answer, atol=1e-5)


def test_the_size_of_a_tile_changes_nothing_but_rounding(tiny_scorer_dir, monkeypatch):
    scorer = make_scorer(tiny_scorer_dir, "gemma 3, mixed layers")
    keep = Keep(attention=True, layers=(2,), carried=True)
    _, (whole,) = scorer.trace(RECORD, keep)
    sizes = []
    original = attention._tiles

    def watched(*arguments):
        for weights, start in original(*arguments):
            sizes.append(weights.shape[1])
            yield weights, start

    monkeypatch.setattr(attention, "_tiles", watched)
    monkeypatch.setattr(attention, "_TILE_BYTES", 4 * 180 * 4 * 5)  # about five rows
    _, (tiled,) = scorer.trace(RECORD, keep)
    assert 1 < max(sizes) < len(whole.token_ids)
    np.testing.assert_allclose(tiled.attention_passages, whole.attention_passages, atol=1e-6)
    np.testing.assert_allclose(tiled.attention_answer, whole.attention_answer, atol=1e-6)
    np.testing.assert_allclose(tiled.carried, whole.carried, atol=1e-5)


@pytest.mark.parametrize("keys_before", [0, 5])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "float"])
def test_reductions_equal_a_loop_over_heads_and_rows(keys_before, mask_kind):
    torch.manual_seed(0)
    n_queries, width, scaling = 9, 8, 0.3
    n_keys = n_queries + keys_before
    query = torch.randn(4, n_queries, width, dtype=torch.float64)
    key = torch.randn(2, n_keys, width, dtype=torch.float64)  # two heads share each
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(keys_before)
    mask = {"none": None, "bool": seen, "float": torch.where(seen, 0.0, -1e30).double()}[mask_kind]
    rows, layout = Rows(3, 9), Layout((1, 4), n_keys - 3)
    weights = np.zeros((4, n_queries, n_keys))
    for head in range(4):
        for row in range(n_queries):
            logits = [float(query[head, row] @ key[head // 2, k]) * scaling for k in range(n_keys)]
            powers = np.where(seen[row], np.exp(logits), 0.0)
            weights[head, row] = powers / powers.sum()
    found = shares(query, key, mask, scaling, rows, layout)
    np.testing.assert_allclose(found.passages, weights[:, 3:9, 1:4].sum(-1), atol=1e-12)
    np.testing.assert_allclose(found.answer, weights[:, 3:9, n_keys - 3 :].sum(-1), atol=1e-12)
    mean = head_mean(query, key, mask, scaling, rows, n_keys - 4)
    np.testing.assert_allclose(mean, weights[:, 3:9, n_keys - 4 :].mean(0), atol=1e-12)


def test_reading_attention_leaves_the_numbers_of_the_model_as_they_were(tiny):
    _, (plain,) = tiny.trace(RECORD, Keep())
    _, (watched,) = tiny.trace(RECORD, Keep(attention=True))
    np.testing.assert_allclose(watched.logprob, plain.logprob, atol=1e-5)
    np.testing.assert_allclose(watched.jsd_without, plain.jsd_without, atol=1e-5)


def save(folder, model_class, config, tiny_scorer_dir):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_scorer_dir / name).read_bytes())
    return str(folder)


UNREADABLE = {
    "bloom": (BloomForCausalLM, BloomConfig(vocab_size=512, hidden_size=32, n_layer=2, n_head=4)),
    "falcon": (
        FalconForCausalLM,
        FalconConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    ),
    "gemma 2 (capped scores)": (
        Gemma2ForCausalLM,
        Gemma2Config(
            vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=0.3,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_model_off_the_interface_is_scored_but_its_attention_is_refused(tiny_scorer_dir, tmp_path, kind):
    scorer = Scorer.load(save(tmp_path, *UNREADABLE[kind], tiny_scorer_dir), window_tokens=2048)
    reading, (trace,) = scorer.trace(RECORD, Keep(layers=(1, 3)))
    (window,) = reading.windows
    prompts = (window.full, window.none, *window.without)
    logprob, _ = separate_passes(scorer.model, prompts, reading.answer_ids, torch.float32)
    np.testing.assert_allclose(trace.logprob, logprob[0], atol=1e-4)
    for keep in (Keep(attention=True), Keep(layers=(1,), carried=True)):
        with pytest.raises(ScorerError, match="attention cannot be read; use another scorer") as caught:
            scorer.trace(RECORD, keep)
        assert "\n" not in str(caught.value) and "2 of 2 layers" in str(caught.value)


def test_a_model_whose_blocks_are_elsewhere_is_refused(tiny_scorer_dir, tmp_path):
    config = OPTConfig(
        vocab_size=512, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=2048,
    )  # fmt: skip
    scorer = Scorer.load(save(tmp_path, OPTForCausalLM, config, tiny_scorer_dir))
    with pytest.raises(ScorerError, match="its layers are not where"):
        scorer.trace(RECORD, Keep(attention=True))
