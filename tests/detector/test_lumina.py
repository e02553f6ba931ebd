"""The external term against the double sum over the vocabulary, and the choice of foils."""

import numpy as np
import pytest
import torch

from detector import lumina
from detector.errors import DetectorError, ScorerError
from detector.record import Record
from detector.vocabulary import Head


def case(dtype, a=5, v=37, d=8, width=8, **head):
    torch.manual_seed(0)
    full, other = (torch.randn(a, d, dtype=torch.float64) for _ in range(2))
    weight, embeddings = torch.randn(v, d, dtype=torch.float64), torch.randn(v, width, dtype=torch.float64)
    full, other, weight, embeddings = (x.to(dtype) for x in (full, other, weight, embeddings))
    return full, other, Head(weight, **head), embeddings


def double_sum(full, other, head, embeddings):
    """E k(x, x') + E k(y, y') - 2 E k(x, y) with k = (1 + cos) / 2, token by token, in float64."""
    e = embeddings.double().numpy()
    kernel = np.empty((len(e), len(e)))
    for i in range(len(e)):
        for j in range(len(e)):
            kernel[i, j] = 0.5 * (1 + e[i] @ e[j] / (np.linalg.norm(e[i]) * np.linalg.norm(e[j])))
    out = []
    for h, g in zip(full, other, strict=True):
        p, q = (torch.softmax(head.logits(x[None])[0].double(), dim=-1).numpy() for x in (h, g))
        out.append(p @ kernel @ p + q @ kernel @ q - 2 * (p @ kernel @ q))
    return np.array(out)


@pytest.mark.parametrize("block_bytes", [1, 2000, 1 << 26], ids=["smallest", "some", "one"])
@pytest.mark.parametrize("width", [8, 3])
def test_mmd_is_the_double_sum_whatever_the_blocks(block_bytes, width):
    inputs = case(torch.float64, width=width, softcap=5.0, scale=0.7)
    got = lumina.mmd(*inputs, block_bytes=block_bytes)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), double_sum(*inputs), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_half_precision_weights_are_summed_in_float32(dtype, tolerance):
    inputs = case(dtype)
    got = lumina.mmd(*inputs, block_bytes=3000)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), double_sum(*inputs), rtol=tolerance, atol=1e-6)


def test_nothing_moves_when_both_sides_are_the_same():
    full, _, head, embeddings = case(torch.float32)
    np.testing.assert_array_equal(lumina.mmd(full, full, head, embeddings).numpy(), np.zeros(5))


def test_opposite_certainties_are_as_far_as_it_goes():
    full, other = torch.tensor([[50.0]]), torch.tensor([[-50.0]])
    head = Head(torch.tensor([[1.0], [-1.0]]))
    embeddings = torch.tensor([[2.0, 0.0], [-3.0, 0.0]])
    np.testing.assert_allclose(lumina.mmd(full, other, head, embeddings).numpy(), [2.0])


def test_an_embedding_of_zeros_is_finite():
    full, other, head, embeddings = case(torch.float32)
    embeddings[3] = 0
    assert torch.isfinite(lumina.mmd(full, other, head, embeddings)).all()


def test_a_single_token_and_none_have_their_shape():
    full, other, head, embeddings = case(torch.float32)
    assert lumina.mmd(full[:1], other[:1], head, embeddings).shape == (1,)
    assert lumina.mmd(full[:0], other[:0], head, embeddings).shape == (0,)


def test_no_more_than_a_block_of_the_vocabulary_is_alive(monkeypatch):
    full, other, head, embeddings = case(torch.float32, a=64, v=100)
    seen = []
    real = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, dim: seen.append(x.numel()) or real(x, dim=dim))
    lumina.mmd(full, other, head, embeddings, block_bytes=4 * 4 * 100 * 8)
    assert max(seen) == 8 * 100 and len(seen) == 2 * 64 / 8


def test_embeddings_of_another_vocabulary_are_refused():
    full, other, head, embeddings = case(torch.float32)
    with pytest.raises(ScorerError, match="36 embeddings"):
        lumina.mmd(full, other, head, embeddings[:-1])


def test_a_token_that_reacts_scores_lower_than_one_that_does_not():
    reacts, ignores = lumina.score(np.array([0.8, 0.0], dtype=np.float32))
    assert reacts < ignores == 0.0


POOL = [
    Record(f"question {i}", [f"passage {i}", "house rules"][: 1 + i % 2], f"answer {i}") for i in range(40)
]


def test_a_foil_is_another_records_and_the_same_every_time():
    record = Record("question 4", ["passage 4"], "answer 4")
    foil = lumina.pick_foil(record, POOL, seed=0)
    assert foil == lumina.pick_foil(record, POOL, seed=0)
    assert any(foil == other.passages for other in POOL)
    assert "passage 4" not in {passage.text for passage in foil}


def test_foils_differ_by_record_and_by_seed():
    by_record = {lumina.pick_foil(record, POOL, 0) for record in POOL}
    by_seed = {lumina.pick_foil(POOL[0], POOL, seed) for seed in range(40)}
    assert len(by_record) > 15 and len(by_seed) > 15


def test_a_foil_shares_no_passage_with_the_record_and_has_text():
    record = Record("q", [" house rules", "mine"], "a")
    pool = [Record("q", ["mine"], "another answer"), Record("r", ["  "], "b"), Record("s", [], "c"), *POOL]
    for seed in range(30):
        texts = {passage.text.strip() for passage in lumina.pick_foil(record, pool, seed)}
        assert any(texts) and not texts & {"house rules", "mine"}


def test_a_pool_without_a_foil_is_an_error_that_says_so():
    record = Record("q", ["mine"], "a")
    for pool in ([], [record]):
        with pytest.raises(DetectorError, match="other questions"):
            lumina.pick_foil(record, pool, 0)
