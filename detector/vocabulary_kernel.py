# Triton has no types, and a kernel's arguments are not what its caller passes.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803  (constants of a kernel are written large)
"""The vocabulary step as two Triton kernels: the same Reduction, with logits that never leave the chip.

`vocabulary.reduce_vocabulary` is the reference and serves every device; `vocabulary.kernel_for` decides which
of the two runs. This module needs triton, which CUDA builds of torch bring along.

One program multiplies one tile of rows x columns of the vocabulary and leaves a few sums per row behind. The
divergence needs the normalisers of both of its rows before it can be summed, so the product is made twice:
twice the head's work against writing all logits and reading them several times.

- `_measure_tile` takes rows of all conditions as they come: largest and least logit, sum of exponentials,
  the realised token's logit.
- `_compare_tile` knows the normalisers. It multiplies the tile of the reference condition once, holds its
  log p, and walks over the conditions of the same answer rows: no condition is padded to a power of two, no
  row changes threads. The weights of its tile come from the L2 cache from the second condition on.

Sums of tiles are added up by torch: there are no atomics, and equal calls give equal bits.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from detector.vocabulary import BLOCK_BYTES, Head, Reduction

_TILE_ROW_BYTES = 24
"""For one row of one tile: the four numbers of the first kernel, and two where they are put together."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a program. Rows, columns and depth are powers of two, 16 or more.

    A thread of 8 warps holds 32 numbers of each 64 x 128 tile: compiled for compute capability 8.0 and 9.0,
    the second kernel takes 181 to 194 registers in bfloat16 and spills none (with 128 rows it spills). Three
    stages of operands take 72 KiB of shared memory; GPUs with bfloat16 have 99 KiB or more. On 9.0 the tensor
    cores' largest instruction takes 64 rows. Which sizes are fastest has not been measured yet
    (`python -m jobs.bench_kernel` does it where there is a GPU).
    """

    rows: int = 64
    """Of the hidden states; 16 where there are no more."""
    columns: int = 128
    """Of the vocabulary. More would take more registers; fewer, more traffic for each product."""
    depth_bytes: int = 128
    """Of a row of either operand in one step: a line of the cache, 64 numbers of bfloat16."""
    warps: int = 8
    stages: int = 3


TILING = Tiling()

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def reduce_on_chip(
    hidden: Tensor, targets: Tensor, head: Head, *, block_bytes: int = BLOCK_BYTES, tiling: Tiling = TILING
) -> Reduction:
    """Reduce (C, A, D) hidden states against (A,) realised tokens; condition 0 is the reference.

    What `reduce_vocabulary` returns for epsilon = 0, for weights in float16, bfloat16 or float32 (products of
    float32 are IEEE's, not TF32's). Beyond inputs and results it takes 24 bytes for each row and tile of
    columns, `block_bytes` of that at most (but one tile of rows at least). On a CPU it runs under
    TRITON_INTERPRET=1 alone.
    """
    if not hidden.is_cuda and head.weight.dtype == torch.bfloat16:
        # The interpreter would multiply bfloat16's bits as integers. The values stay the same.
        head = Head(head.weight.float(), head.bias, head.scale, head.softcap)
    n_conditions, n_rows, _ = hidden.shape
    n_tiles = triton.cdiv(head.weight.shape[0], tiling.columns)
    fitting = block_bytes // (_TILE_ROW_BYTES * n_tiles * n_conditions)
    step = max(tiling.rows, fitting // tiling.rows * tiling.rows)
    with torch.cuda.device_of(hidden):
        parts = [
            _reduce_rows(hidden[:, first : first + step], targets[first : first + step], head, tiling)
            for first in range(0, n_rows, step)
        ]
    return Reduction(*(torch.cat(part, dim=-1) for part in zip(*parts, strict=True)))


def _reduce_rows(hidden: Tensor, targets: Tensor, head: Head, tiling: Tiling) -> tuple[Tensor, ...]:
    n_conditions, n_rows, width = hidden.shape
    weight, bias = head.weight, head.bias
    n_tiles = triton.cdiv(weight.shape[0], tiling.columns)
    hidden = hidden.to(weight.dtype)
    sizes = (n_conditions, n_rows, weight.shape[0], width)
    operands = (hidden, *hidden.stride(), weight, *weight.stride(), weight if bias is None else bias, targets)
    constants = {
        "SCALE": float(head.scale),
        "SOFTCAP": float(head.softcap or 0.0),
        "BIASED": bias is not None,
        "COLUMNS": tiling.columns,
        "DEPTH": tiling.depth_bytes // weight.element_size(),
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        "enable_fp_fusion": True,  # said, since Triton 3.10 changes its default and 3.9 warns of it
    }

    def run(kernel, n, *results):
        rows = 16 if n <= 16 else tiling.rows
        # Rows first: programs that run side by side share a tile of the weights, the larger operand.
        kernel[triton.cdiv(n, rows), n_tiles](*operands, *sizes, *results, ROWS=rows, **constants)

    def sums(dtype: torch.dtype = torch.float32) -> Tensor:
        # One allocation each, and so aligned: else every pattern of alignments would be compiled.
        return torch.empty((n_tiles, n_conditions, n_rows), dtype=dtype, device=hidden.device)

    highs, lows, totals, owns = sums(), sums(), sums(), sums()
    run(_measure_tile, n_conditions * n_rows, highs, lows, totals, owns)
    normaliser = torch.logsumexp(totals.log_().add_(highs), dim=0)
    top, bottom = highs.amax(dim=0) - normaliser, lows.amin(dim=0) - normaliser
    own = owns.sum(dim=0)  # one tile holds it, the others add an exact zero
    del highs, lows, totals, owns

    entropies, jsds, ranks = sums(), sums(), sums(torch.int32)
    run(_compare_tile, n_rows, normaliser, own, entropies, jsds, ranks)
    entropy, jsd = entropies.sum(dim=0).clamp_(min=0.0), jsds[:, 1:].sum(dim=0).clamp_(0.0, math.log(2))
    return own - normaliser, entropy, jsd, top, bottom, ranks.sum(dim=0, dtype=torch.int32)


@triton.jit
def _tanh(x):
    """The compiler and the interpreter know none in common. Below 0.625 the quotient would cancel."""
    square = x * x
    # Coefficients of Cephes' tanhf (S. L. Moshier).
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(size, 20.0)) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _logits(
    row_at,
    row_step,
    in_rows,
    weight,
    weight_row,
    weight_step,
    bias,
    columns,
    n_vocabulary,
    width,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Logits (ROWS, COLUMNS) in float32 of the rows that start at `row_at`."""
    in_columns = columns < n_vocabulary
    column_at = weight + columns.to(tl.int64) * weight_row
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        in_depth = depth < width
        left = tl.load(
            row_at[:, None] + depth[None, :] * row_step, mask=in_rows[:, None] & in_depth[None, :], other=0.0
        )
        right = tl.load(
            column_at[None, :] + depth[:, None] * weight_step,
            mask=in_columns[None, :] & in_depth[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if SCALE != 1.0:
        total *= SCALE
    if SOFTCAP != 0.0:
        total = _tanh(total / SOFTCAP) * SOFTCAP
    return total


@triton.jit(do_not_specialize=["n_conditions", "n_rows"])
def _measure_tile(
    hidden,
    condition_stride,
    row_stride,
    step_stride,
    weight,
    weight_row,
    weight_step,
    bias,
    targets,
    n_conditions,
    n_rows,
    n_vocabulary,
    width,
    highs,
    lows,
    totals,
    owns,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Of one tile and each row: extremes, sum of exponentials over the largest, the token's own logit."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of all conditions, one after another
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = rows < n_conditions * n_rows, (columns < n_vocabulary)[None, :]
    row_at = hidden + (rows // n_rows).to(tl.int64) * condition_stride + (rows % n_rows) * row_stride
    logits = _logits(
        row_at,
        step_stride,
        in_rows,
        weight,
        weight_row,
        weight_step,
        bias,
        columns,
        n_vocabulary,
        width,
        SCALE,
        SOFTCAP,
        BIASED,
        ROWS,
        COLUMNS,
        DEPTH,
    )
    target = tl.load(targets + rows % n_rows, mask=in_rows, other=-1)
    high = tl.max(tl.where(in_columns, logits, float("-inf")), axis=1)
    low = tl.min(tl.where(in_columns, logits, float("inf")), axis=1)
    total = tl.sum(tl.where(in_columns, tl.exp(logits - high[:, None]), 0.0), axis=1)
    own = tl.sum(tl.where(columns[None, :] == target[:, None], logits, 0.0), axis=1)
    at = tl.program_id(1).to(tl.int64) * n_conditions * n_rows + rows
    tl.store(highs + at, high, mask=in_rows)
    tl.store(lows + at, low, mask=in_rows)
    tl.store(totals + at, total, mask=in_rows)
    tl.store(owns + at, own, mask=in_rows)


@triton.jit(do_not_specialize=["n_conditions", "n_rows"])
def _compare_tile(
    hidden,
    condition_stride,
    row_stride,
    step_stride,
    weight,
    weight_row,
    weight_step,
    bias,
    targets,
    n_conditions,
    n_rows,
    n_vocabulary,
    width,
    normalisers,
    owns,
    entropies,
    jsds,
    ranks,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Of one tile and each answer row, for every condition: entropy, divergence from condition 0, rank."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of one condition
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = rows < n_rows, (columns < n_vocabulary)[None, :]
    target = tl.load(targets + rows, mask=in_rows, other=-1)
    # A token is not more likely than itself, however its logit was rounded in the other kernel.
    rivals = in_columns & (columns[None, :] != target[:, None])
    logp_first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    row_at = hidden + rows * row_stride
    for condition in range(n_conditions):
        logits = _logits(
            row_at,
            step_stride,
            in_rows,
            weight,
            weight_row,
            weight_step,
            bias,
            columns,
            n_vocabulary,
            width,
            SCALE,
            SOFTCAP,
            BIASED,
            ROWS,
            COLUMNS,
            DEPTH,
        )
        own = tl.load(owns + condition * n_rows + rows, mask=in_rows, other=0.0)
        normaliser = tl.load(normalisers + condition * n_rows + rows, mask=in_rows, other=0.0)
        rank = tl.sum((rivals & (logits > own[:, None])).to(tl.int32), axis=1)
        # Columns beyond the vocabulary have p = 0 and, the exponent being finite, p log p = 0.
        logp = tl.where(in_columns, logits - normaliser[:, None], -1e30)
        p = tl.exp(logp)
        plogp = p * logp
        logp_first = tl.where(condition == 0, logp, logp_first)
        p_first = tl.exp(logp_first)  # again each time: kept, it would take a third tile of registers
        mixture = (p + p_first) * 0.5
        mixture *= tl.log(tl.maximum(mixture, _TINY))
        at = (tl.program_id(1).to(tl.int64) * n_conditions + condition) * n_rows + rows
        tl.store(ranks + at, rank, mask=in_rows)
        tl.store(entropies + at, -tl.sum(plogp, axis=1), mask=in_rows)
        row_at += condition_stride
        tl.store(jsds + at, tl.sum((plogp + p_first * logp_first) * 0.5 - mixture, axis=1), mask=in_rows)
