import math

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from detector import vocabulary
from detector.vocabulary import BLOCK_BYTES, LEAST_BLOCK_BYTES, Head, Tile, out_of_memory, reduce_vocabulary


def make(n_conditions, n_rows, n_vocabulary, dtype=torch.float64, width=16, spread=1.0):
    torch.manual_seed(n_conditions * n_vocabulary)
    base = torch.randn(1, n_rows, width, dtype=torch.float64)
    hidden = base + spread * torch.randn(n_conditions, n_rows, width, dtype=torch.float64)
    weight = torch.randn(n_vocabulary, width, dtype=torch.float64)
    return hidden.to(dtype), torch.randint(n_vocabulary, (n_rows,)), weight.to(dtype)


def reference(hidden, targets, weight, epsilon=0.0):
    """The textbook formulas on whole float64 distributions."""
    logits = hidden.double().numpy() @ weight.double().numpy().T
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(logp)
    realised = np.take_along_axis(logp, targets.numpy()[None, :, None], -1)[..., 0]
    mixture = (p[1:] + p[:1]) / 2 + epsilon
    kl_p = (p[:1] * (logp[:1] - np.log(mixture))).sum(-1)
    kl_q = (p[1:] * (np.log(p[1:] + epsilon) - np.log(mixture))).sum(-1)
    return realised, -(p * logp).sum(-1), (kl_p + kl_q) / 2


SHAPES = [(2, 1, 3), (3, 5, 997), (7, 33, 4096), (4, 9, 1025)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_bytes", [64 << 20, 1 << 16, 1 << 10])
@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
def test_blocks_agree_with_whole_distributions_in_float64(shape, block_bytes, epsilon):
    hidden, targets, weight = make(*shape)
    found = reduce_vocabulary(hidden, targets, Head(weight), block_bytes=block_bytes, epsilon=epsilon)
    logprob, entropy, jsd = reference(hidden, targets, weight, epsilon)
    np.testing.assert_allclose(found.logprob, logprob, atol=1e-10)
    np.testing.assert_allclose(found.entropy, entropy, atol=1e-10)
    np.testing.assert_allclose(found.jsd, jsd, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_bytes", [64 << 20, 1 << 16])
def test_extremes_and_rank_are_those_of_whole_distributions(shape, block_bytes):
    hidden, targets, weight = make(*shape)
    found = reduce_vocabulary(hidden, targets, Head(weight), block_bytes=block_bytes)
    logp = torch.log_softmax(hidden @ weight.T, dim=-1).numpy()
    np.testing.assert_allclose(found.top, logp.max(-1), atol=1e-10)
    np.testing.assert_allclose(found.bottom, logp.min(-1), atol=1e-10)
    realised = np.take_along_axis(logp, targets.numpy()[None, :, None], -1)
    assert found.rank.dtype == torch.int32
    assert found.rank.tolist() == (logp > realised).sum(-1).tolist()


def test_tokens_as_likely_as_the_realised_one_do_not_count_as_more_likely():
    weight = torch.tensor([[2.0], [1.0], [1.0], [1.0], [0.0]])
    hidden, targets = torch.ones(2, 1, 1), torch.tensor([2])
    for block_bytes in (64 << 20, 64):
        found = reduce_vocabulary(hidden, targets, Head(weight), block_bytes=block_bytes)
        assert found.rank.tolist() == [[1], [1]]


@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_float32_error_is_no_larger_than_plain_torch_makes_in_float32(spread):
    hidden, targets, weight = make(5, 17, 3001, torch.float32, spread=spread)
    found = reduce_vocabulary(hidden, targets, Head(weight), block_bytes=1 << 18)
    _, _, truth = reference(hidden, targets, weight)
    logp = torch.log_softmax(hidden @ weight.T, dim=-1)
    p, mixture = logp.exp(), ((logp.exp()[1:] + logp.exp()[:1]) / 2).log()
    plain = ((p[:1] * (logp[:1] - mixture)).sum(-1) + (p[1:] * (logp[1:] - mixture)).sum(-1)) / 2
    assert np.abs(found.jsd.numpy() - truth).max() <= np.abs(plain.numpy() - truth).max() + 1e-6


def test_equal_distributions_diverge_by_rounding_only():
    hidden, targets, weight = make(3, 4, 500, torch.float32, spread=0.0)
    assert reduce_vocabulary(hidden, targets, Head(weight)).jsd.max() < 1e-6


def test_disjoint_distributions_reach_ln_2_and_stay_finite():
    weight = torch.tensor([[200.0, 0.0], [0.0, 200.0], [-200.0, -200.0]])
    hidden = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    found = reduce_vocabulary(hidden, torch.tensor([1]), Head(weight))
    assert found.jsd.item() == pytest.approx(math.log(2))
    assert torch.isfinite(found.logprob).all()


def test_bias_scale_and_softcap_are_applied_as_the_models_do():
    hidden, targets, weight = make(2, 3, 50)
    bias = torch.randn(50, dtype=torch.float64)
    head = Head(weight, bias, scale=0.5, softcap=3.0)
    logits = torch.tanh((hidden @ weight.T + bias) * 0.5 / 3.0) * 3.0
    expected = torch.log_softmax(logits, -1).gather(-1, targets.expand(2, -1)[..., None])[..., 0]
    torch.testing.assert_close(reduce_vocabulary(hidden, targets, head).logprob, expected)


def test_bfloat16_weights_are_reduced_in_float32():
    hidden, targets, weight = make(3, 4, 700, torch.bfloat16)
    found = reduce_vocabulary(hidden, targets, Head(weight))
    assert found.jsd.dtype == torch.float32
    np.testing.assert_allclose(found.jsd, reference(hidden, targets, weight)[2], atol=1e-5)


def test_no_tensor_larger_than_the_block_is_ever_made(monkeypatch):
    """Peak memory is the block's, whatever A, K and V are: watch every logits tile that the head makes."""
    sizes = []
    original = Head.logits

    def watched(self, *arguments):
        out = original(self, *arguments)
        sizes.append(out.nbytes)
        return out

    monkeypatch.setattr(Head, "logits", watched)
    block = 1 << 20
    for shape in [(22, 40, 5000), (3, 200, 5000), (22, 4, 50_000)]:
        hidden, targets, weight = make(*shape, dtype=torch.float32)
        reduce_vocabulary(hidden, targets, Head(weight), block_bytes=block)
    assert max(sizes) <= block


CPU_FULL = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] data. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 9999999999 bytes. Error code 12 (Cannot allocate memory)"
)
FULL = {"device": torch.OutOfMemoryError("CUDA out of memory"), "torch": CPU_FULL, "numpy": MemoryError("no")}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_tile_that_memory_does_not_hold_is_halved_and_the_size_that_worked_stays(error):
    tile, asked, full = Tile(), [], [error, error]

    def step(block_bytes):
        asked.append(block_bytes)
        if full:
            raise full.pop()
        return "found"

    assert tile.fit(step) == "found"
    assert asked == [BLOCK_BYTES, BLOCK_BYTES // 2, BLOCK_BYTES // 4]
    assert tile.fit(step) == "found" and asked[3:] == [BLOCK_BYTES // 4]


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_record_that_no_tile_fits_raises_and_says_nothing_of_the_next_one(error):
    tile, asked = Tile(), []

    def step(block_bytes):
        asked.append(block_bytes)
        raise error

    with pytest.raises(type(error)) as caught:
        tile.fit(step)
    assert caught.value is error
    assert asked[-1] == LEAST_BLOCK_BYTES and tile.block_bytes == BLOCK_BYTES


def test_another_error_is_not_tried_again():
    tile, asked = Tile(), []

    def step(block_bytes):
        asked.append(block_bytes)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        tile.fit(step)
    assert asked == [BLOCK_BYTES]


def test_what_torch_raises_on_a_full_machine_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert not out_of_memory(ValueError("DefaultCPUAllocator"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_reduced_depends_on_the_tile_by_rounding_only(dtype):
    hidden, targets, weight = make(4, 37, 5000, dtype)
    whole = reduce_vocabulary(hidden, targets, Head(weight))
    for size in (1 << 20, 1 << 18, 1 << 14):
        part = reduce_vocabulary(hidden, targets, Head(weight), block_bytes=size)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-10
        for name in ("logprob", "entropy", "jsd", "top", "bottom"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name), atol=tolerance, rtol=0)
        assert (part.rank - whole.rank).abs().max() <= 1


def test_one_tile_of_logits_is_alive_at_a_time(monkeypatch):
    made, alive = [], []
    original = Head.logits

    def watched(self, *arguments):
        alive.append(sum(not storage.expired() for storage in made))
        out = original(self, *arguments)
        made.append(StorageWeakRef(out.untyped_storage()))
        return out

    monkeypatch.setattr(Head, "logits", watched)
    hidden, targets, weight = make(3, 40, 3000, torch.float32)
    reduce_vocabulary(hidden, targets, Head(weight), block_bytes=1 << 19)
    assert len(made) > 2 and not any(alive)


def fake_weight(device, dtype):
    """What a weight says of itself, without the device."""
    with FakeTensorMode():
        return torch.empty(4, 2, device=device, dtype=dtype)


def test_the_kernel_is_off_until_somebody_asks_for_it():
    assert vocabulary.kernel_for(fake_weight("cuda", torch.bfloat16), 0.0) is None


@pytest.mark.parametrize(
    ("device", "dtype", "epsilon"),
    [("cpu", torch.bfloat16, 0.0), ("cuda", torch.float64, 0.0), ("cuda", torch.bfloat16, 1e-8)],
    ids=["on a CPU", "in float64", "in the compatible form"],
)
def test_the_reference_serves_what_the_kernel_does_not(monkeypatch, device, dtype, epsilon):
    monkeypatch.setattr(vocabulary, "KERNEL", True)
    monkeypatch.setattr(vocabulary, "find_spec", lambda _: True)
    assert vocabulary.kernel_for(fake_weight(device, dtype), epsilon) is None


def test_where_triton_is_not_there_the_reference_serves_all(monkeypatch):
    monkeypatch.setattr(vocabulary, "KERNEL", True)
    monkeypatch.setattr(vocabulary, "find_spec", lambda _: None)
    assert vocabulary.kernel_for(fake_weight("cuda", torch.bfloat16), 0.0) is None
