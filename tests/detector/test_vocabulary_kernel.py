"""The kernels on a GPU, or with TRITON_INTERPRET=1 in the environment on a CPU."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from detector import passes, vocabulary
from detector.probe import Keep
from detector.record import Record
from detector.vocabulary import Head, reduce_vocabulary
from tests.detector.test_methods import PASSAGES
from tests.detector.test_vocabulary import fake_weight

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytest.importorskip("triton", reason="needs triton: torch brings it along for CUDA only")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
kernel = pytest.importorskip("detector.vocabulary_kernel")

FIELDS = ("logprob", "entropy", "jsd", "top", "bottom", "rank")


def make(n_conditions, n_rows, n_vocabulary, dtype=torch.float32, width=40):
    """Logits with a deviation of 2, and conditions that differ by a tenth of that."""
    torch.manual_seed(n_conditions * n_vocabulary + n_rows)
    base = torch.randn(1, n_rows, width, dtype=torch.float64)
    hidden = base + 0.1 * torch.randn(n_conditions, n_rows, width, dtype=torch.float64)
    weight = 2 / math.sqrt(width) * torch.randn(n_vocabulary, width, dtype=torch.float64)
    targets = torch.randint(n_vocabulary, (n_rows,))
    return hidden.to(DEVICE, dtype), targets.to(DEVICE), weight.to(DEVICE, dtype)


def errors(found, truth):
    """The largest of each number but the rank."""
    pairs = [(name, getattr(found, name), getattr(truth, name)) for name in FIELDS[:-1]]
    return {name: (got - true).abs().max().item() for name, got, true in pairs if got.numel()}


def truth_of(hidden, targets, head):
    bias = None if head.bias is None else head.bias.double()
    exact = Head(head.weight.double(), bias, head.scale, head.softcap)
    return reduce_vocabulary(hidden.double(), targets, exact)


HEADS = {
    "plain": lambda n: {},
    "bias": lambda n: {"bias": torch.linspace(-2, 2, n)},
    "softcap": lambda n: {"softcap": 3.0, "scale": 1.5},
}
SHAPES = [
    ((2, 1, 1237), torch.float32, "plain"),
    ((2, 1, 1237), torch.bfloat16, "bias"),
    ((3, 7, 5003), torch.float32, "softcap"),
    ((3, 7, 1237), torch.bfloat16, "plain"),
    ((3, 7, 1237), torch.float16, "plain"),
    ((22, 7, 389), torch.float32, "bias"),
    ((22, 1, 389), torch.bfloat16, "softcap"),
    ((2, 70, 389), torch.float32, "plain"),
]
if DEVICE == "cuda":
    SHAPES += [
        ((n_conditions, n_rows, n_vocabulary), dtype, "plain")
        for n_vocabulary in (49_152, 151_936, 262_144)
        for n_rows in (1, 7, 256)
        for n_conditions in (2, 3, 22)
        for dtype in (torch.float32, torch.bfloat16)
    ]


@pytest.mark.parametrize(("shape", "dtype", "form"), SHAPES)
def test_its_error_is_no_larger_than_plain_torchs_in_float32(shape, dtype, form):
    hidden, targets, weight = make(*shape, dtype)
    more = HEADS[form](shape[-1])
    head = Head(weight, **{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in more.items()})
    truth = truth_of(hidden, targets, head)
    found, plain = kernel.reduce_on_chip(hidden, targets, head), reduce_vocabulary(hidden, targets, head)
    allowed = {name: error + 1e-6 for name, error in errors(plain, truth).items()}
    assert {name: error for name, error in errors(found, truth).items() if error > allowed[name]} == {}
    assert (found.rank - truth.rank).abs().max() <= (plain.rank - truth.rank).abs().max()
    for name in FIELDS:
        got, expected = getattr(found, name), getattr(plain, name)
        assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device)


def test_equal_calls_give_equal_bits():
    hidden, targets, weight = make(3, 7, 389)
    one, two = (kernel.reduce_on_chip(hidden, targets, Head(weight)) for _ in range(2))
    assert all(torch.equal(getattr(one, name), getattr(two, name)) for name in FIELDS)


def test_where_memory_is_short_rows_are_reduced_in_parts():
    hidden, targets, weight = make(2, 20, 150)
    tiling = kernel.Tiling(rows=16)
    whole = kernel.reduce_on_chip(hidden, targets, Head(weight), tiling=tiling)
    parts = kernel.reduce_on_chip(hidden, targets, Head(weight), tiling=tiling, block_bytes=1)
    for name in FIELDS:
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), atol=1e-5, rtol=0)


def test_slices_and_transposed_weights_are_read_where_they_are():
    hidden, targets, weight = make(3, 9, 300)
    expected = reduce_vocabulary(hidden[:, 1:6], targets[1:6], Head(weight))
    found = kernel.reduce_on_chip(hidden[:, 1:6], targets[1:6], Head(weight.T.contiguous().T))
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", [50.0, -50.0])
def test_columns_beyond_the_vocabulary_count_for_nothing(bias):
    hidden, targets, weight = make(2, 2, 130)
    head = Head(weight, torch.full((130,), bias, device=DEVICE))
    expected, found = reduce_vocabulary(hidden, targets, head), kernel.reduce_on_chip(hidden, targets, head)
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=5e-5, rtol=0)


def test_equal_distributions_do_not_diverge_and_disjoint_ones_reach_ln_2():
    weight = torch.tensor([[200.0, 0.0], [0.0, 200.0], [-200.0, -200.0]], device=DEVICE)
    hidden = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]], device=DEVICE)
    found = kernel.reduce_on_chip(hidden, torch.tensor([1], device=DEVICE), Head(weight))
    assert found.jsd.flatten().tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
    assert torch.isfinite(found.logprob).all()


def test_tokens_as_likely_as_the_realised_one_do_not_count_as_more_likely():
    weight = torch.tensor([[2.0], [1.0], [1.0], [1.0], [0.0]], device=DEVICE)
    hidden, targets = torch.ones(2, 1, 1, device=DEVICE), torch.tensor([2], device=DEVICE)
    assert kernel.reduce_on_chip(hidden, targets, Head(weight)).rank.tolist() == [[1], [1]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
def test_states_that_are_not_finite_give_numbers_that_are_not():
    hidden, targets, weight = make(2, 2, 300)
    hidden[0, 1, 0] = torch.nan
    found = kernel.reduce_on_chip(hidden, targets, Head(weight))
    assert found.logprob.isfinite().tolist() == [[True, False], [True, True]]
    assert found.jsd.isfinite().tolist() == [[True, False]]


def test_where_it_is_switched_on_it_serves_a_cuda_head(monkeypatch):
    monkeypatch.setattr(vocabulary, "KERNEL", True)
    assert vocabulary.kernel_for(fake_weight("cuda", torch.bfloat16), 0.0) is kernel.reduce_on_chip


def test_a_record_is_the_same_through_it(monkeypatch, tiny):
    record = Record(question="Who?", passages=PASSAGES[:2], answer="Ada built it.")
    _, (expected,) = tiny.trace(record, Keep())
    monkeypatch.setattr(passes, "kernel_for", lambda *_: kernel.reduce_on_chip)
    _, (found,) = tiny.trace(record, Keep())
    for name in ("logprob", "entropy", "jsd_no_context", "logprob_without", "jsd_without"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="compiled and run by every other test")
def test_it_compiles_for_gpus_and_spills_no_register(tmp_path):
    """The interpreter takes more than the compiler does."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.figures.kernel_registers", "90"],
        capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("0 bytes spilled") == len(done.stdout.splitlines()) > 0
