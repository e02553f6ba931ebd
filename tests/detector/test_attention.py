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
from detector.attention import Hiding, Rows, attend, attend_apart, head_mean, make_mask, shares
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


@pytest.mark.parametrize("profile", ["plain", "chat", "gasp-v2"])
def test_attention_on_pieces_is_the_mean_over_heads_and_layers_of_their_columns(tiny_scorer_dir, profile):
    scorer = make_scorer(tiny_scorer_dir, profile=profile)
    reading, (trace,) = scorer.trace(RECORD, Keep(piece_attention=True))
    (window,) = reading.windows
    maps, _ = read_eagerly(scorer, window.full + reading.answer_ids)
    rows = maps[:, :, len(window.full) - 1 :]
    expected = [rows[..., start:stop].sum(-1).mean((0, 1)) for start, stop in window.spans]
    assert trace.attention_passages is None and len(window.spans) > 1
    np.testing.assert_allclose(trace.attention_pieces, expected, atol=1e-5)


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
    found = shares(query, key, mask, scaling, rows, layout, [(1, 2), (2, 4)])
    np.testing.assert_allclose(found.passages, weights[:, 3:9, 1:4].sum(-1), atol=1e-12)
    np.testing.assert_allclose(found.answer, weights[:, 3:9, n_keys - 3 :].sum(-1), atol=1e-12)
    pieces = [weights[:, 3:9, 1].mean(0), weights[:, 3:9, 2:4].sum(-1).mean(0)]
    np.testing.assert_allclose(found.pieces, pieces, atol=1e-12)
    mean = head_mean(query, key, mask, scaling, rows, n_keys - 4)
    np.testing.assert_allclose(mean, weights[:, 3:9, n_keys - 4 :].mean(0), atol=1e-12)


def by_the_formula(query, key, value, scaling, hidden=(0, 0), window=None):
    """Attention (B, H, T, d) of the last T of S positions in float64, one row of one head at a time."""
    n_queries, n_keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    for b, head, row in np.ndindex(*query.shape[:3]):
        position = n_keys - n_queries + row
        seen = [
            at
            for at in range(position + 1)
            if not hidden[0] <= at < hidden[1] and (window is None or position - at < window)
        ]
        keys, values = key[b, head // group, seen].double(), value[b, head // group, seen].double()
        weights = torch.softmax(keys @ query[b, head, row].double() * scaling, dim=0)
        out[b, head, row] = weights @ values
    return out


class Layer(torch.nn.Module):
    """What `attend` wants to know of a layer."""

    def __init__(self, n_groups=1):
        super().__init__()
        self.layer_idx, self.is_causal, self.num_key_value_groups = 7, True, n_groups


def operands(n_queries, n_cached, n_heads, n_kv, dtype, n_batch=1):
    torch.manual_seed(n_queries + 31 * n_cached)
    shape = (n_batch, n_kv, n_cached + n_queries, 8)
    query = torch.randn(n_batch, n_queries, n_heads, 8, dtype=dtype).transpose(
        1, 2
    )  # as the models lay it out
    return query * 3, torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}
HIDDEN = {"nothing": None, "start": (0, 3), "middle": (2, 6), "end": (7, 11), "everything": (0, 11)}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n_heads", "n_kv"), [(3, 3), (9, 3), (9, 1)])
@pytest.mark.parametrize("n_queries", [1, 2, 37])
@pytest.mark.parametrize("where", HIDDEN)
def test_calls_that_are_merged_equal_one_over_everything(where, n_queries, n_heads, n_kv, dtype):
    query, key, value = operands(n_queries, 11, n_heads, n_kv, dtype)
    hidden = HIDDEN[where]
    hiding = hidden and Hiding(*hidden)
    found, _ = attend(Layer(n_heads // n_kv), query, key, value, None, hiding=hiding, scaling=0.3)
    wanted = by_the_formula(query, key, value, 0.3, hidden or (0, 0)).transpose(1, 2)
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0)
    assert hiding is None or hiding.layers == {7}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n_queries", [1, 600])
def test_without_a_cache_it_is_one_causal_call(n_queries, dtype):
    query, key, value = operands(n_queries, 0, 6, 2, dtype, n_batch=2)
    found = attend_apart(query[:, :, :40], key[:, :, :40], value[:, :, :40], 0.3)
    wanted = by_the_formula(query[:, :, :40], key[:, :, :40], value[:, :, :40], 0.3)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0)


def test_scores_far_apart_merge_without_overflow():
    query, key, value = operands(3, 5, 2, 1, torch.float32)
    key[:, :, 2] *= 1000.0
    found = attend_apart(query, key, value, 1.0)
    torch.testing.assert_close(found.double(), by_the_formula(query, key, value, 1.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("where", HIDDEN)
@pytest.mark.parametrize("n_queries", [1, 5])
@pytest.mark.parametrize("kind", ["bool", "float", "elsewhere"])
def test_a_dense_mask_loses_the_hidden_columns(kind, n_queries, where, dtype, monkeypatch):
    """A sliding window of 6 positions; and plain causal attention on a device without the operator."""
    query, key, value = operands(n_queries, 11, 4, 2, dtype)
    window = None if kind == "elsewhere" else 6
    mask = torch.ones(n_queries, 11 + n_queries, dtype=torch.bool).tril(11).triu(11 - 5)[None, None]
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if kind == "elsewhere":
        mask = None
        monkeypatch.setattr(attention, "_has_flash", lambda _: False)
    hidden, before = HIDDEN[where], None if mask is None else mask.clone()
    hiding = hidden and Hiding(*hidden)
    found, _ = attend(Layer(2), query, key, value, mask, hiding=hiding, scaling=0.3)
    wanted = by_the_formula(query, key, value, 0.3, hidden or (0, 0), window).transpose(1, 2)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0)
    assert mask is None or torch.equal(mask, before)  # layers share it


@pytest.mark.parametrize("how", ["by the call", "by the layer"])
@pytest.mark.parametrize("hidden", [None, (2, 6)])
def test_attention_that_is_not_causal_stays_so(how, hidden):
    query, key, value = operands(5, 11, 4, 2, torch.float64)
    layer = Layer(2)
    layer.is_causal = how != "by the layer"
    more = {"is_causal": False} if layer.is_causal else {}
    hiding = hidden and Hiding(*hidden)
    found, _ = attend(layer, query, key, value, None, hiding=hiding, scaling=0.3, **more)
    rows = [query[:, :, [row]] for row in range(5)]  # each as the last of all positions
    wanted = torch.cat([by_the_formula(row, key, value, 0.3, hidden or (0, 0)) for row in rows], dim=2)
    torch.testing.assert_close(found, wanted.transpose(1, 2), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("asked", "dense"),
    [
        ({}, False),
        ({"q_length": 1}, False),
        ({"q_offset": 0, "q_length": 16}, False),
        ({"local_size": 17}, False),  # the window is not full yet
        ({"local_size": 16}, True),
        ({"allow_is_causal_skip": False}, True),
        ({"attention_mask": torch.tensor([[False] + [True] * 15])}, True),
        ({"q_offset": 3}, True),  # queries that are not the last positions
        ({"device": "meta"}, True),
    ],
)
def test_a_mask_is_made_only_where_attention_is_not_plain_causal(asked, dense):
    usual = {"batch_size": 1, "q_length": 5, "kv_length": 16, "q_offset": 11, "kv_offset": 0}
    asked = usual | asked
    if asked["q_length"] == 1:
        asked["q_offset"] = 15
    mask = make_mask(**asked)
    assert (mask is not None) == dense
    if mask is not None:
        assert mask.shape == (1, 1, asked["q_length"], 16)


def test_no_mask_is_made_behind_a_cache(tiny, monkeypatch):
    seen = []
    original = attention.sdpa_mask
    monkeypatch.setattr(attention, "sdpa_mask", lambda **kwargs: seen.append(1) or original(**kwargs))
    tiny.trace(RECORD)
    assert not seen


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
