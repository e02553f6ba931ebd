"""Log-probability, entropy and Jensen-Shannon divergence over the vocabulary, in blocks.

The answer rows of all conditions come in as hidden states; logits exist only for one tile at a time. Memory
beyond the inputs and the (conditions, A) results is set by `block_bytes`, whatever A, V and K are. Sums run
in float32 (float64 for a float64 model) whatever the model's dtype: logits rounded to bfloat16 would cancel
in the divergence of two nearly equal distributions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20
"""Default size of the logits tile. Large enough that the head's weights are re-read a few times only."""

LEAST_BLOCK_BYTES = 1 << 20
"""A device without room for this has none for the record: smaller tiles are not tried."""

LIVE_TENSORS = 5
"""How many tensors of a tile's size are alive at once where the divergence is summed."""

KERNEL = False
"""Whether the Triton kernel (`vocabulary_kernel`) reduces where it can: see `kernel_for`.

Off until it has been shown right and faster on a GPU (`python -m jobs.bench_kernel` there). So far it has
been run in Triton's interpreter on a CPU, and compiled for GPUs but not run on one.
"""

_CACHE_BYTES = 2 << 20  # element-wise work on a CPU goes through sub-blocks that stay in the cache


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer: `weight` (V, D), optional `bias` (V,), then `softcap * tanh(x / softcap)` if set."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype that logits are kept and reduced in."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """(N, D) -> (N, stop - start) logits of that slice of the vocabulary, accumulated in float32."""
        weight = self.weight[start:stop]
        dtype = self.accumulator
        if weight.dtype == dtype:
            out = hidden.to(dtype) @ weight.T
        elif weight.is_cuda:
            out = torch.mm(hidden.to(weight.dtype), weight.T, out_dtype=dtype)
        else:
            out = hidden.to(dtype) @ weight.T.to(dtype)
        if self.bias is not None:
            out += self.bias[start:stop]
        if self.scale != 1.0:
            out *= self.scale
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is kept of C conditions x A answer rows x V: all in nats, in the head's accumulator dtype."""

    logprob: Tensor
    """(C, A) log-probability of the realised token, <= 0."""
    entropy: Tensor
    """(C, A), in [0, ln V]."""
    jsd: Tensor
    """(C - 1, A) divergence of each later condition from the first, in [0, ln 2]."""
    top: Tensor
    """(C, A) log-probability of the most likely token, <= 0."""
    bottom: Tensor
    """(C, A) log-probability of the least likely token, <= top."""
    rank: Tensor
    """(C, A) how many tokens are more likely than the realised one, int32 in [0, V)."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device's or this machine's memory does not hold something.

    On a CPU torch has no type for it: its allocator raises a RuntimeError that names itself.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


Found = TypeVar("Found")


@dataclass(slots=True)
class Tile:
    """How large a tile of logits the device has held so far: an upper bound for the records that follow.

    What is reduced does not depend on it, except that sums over other tiles round differently (as they do
    between any two batch shapes: below 1e-4 nats in float32).
    """

    block_bytes: int = BLOCK_BYTES

    def fit(self, step: Callable[..., Found]) -> Found:
        """`step(block_bytes=...)`, again with half the size each time that memory does not hold it.

        Raises what `step` raised where LEAST_BLOCK_BYTES was too much, too; the bound then stays what it
        was, since the tile is not what fills the device.
        """
        size = self.block_bytes
        while True:
            try:
                found = step(block_bytes=size)
                break
            except (RuntimeError, MemoryError) as error:
                if size <= LEAST_BLOCK_BYTES or not out_of_memory(error):
                    raise
            size //= 2  # out here, where the traceback no longer keeps the tensors of the failed step
        self.block_bytes = size
        return found


def kernel_for(weight: Tensor, epsilon: float) -> Callable[..., Reduction] | None:
    """What reduces this head's weights instead of `reduce_vocabulary`, with its arguments but `epsilon`.

    The kernel, where KERNEL is set, the weights are on a CUDA device in float32 or less, triton is there and
    `epsilon` is 0 (the form that reproduces another package's numbers is the reference's alone). Else None.
    """
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    if not KERNEL or not weight.is_cuda or weight.dtype not in dtypes or epsilon or not find_spec("triton"):
        return None
    from detector.vocabulary_kernel import reduce_on_chip

    return reduce_on_chip


def reduce_vocabulary(
    hidden: Tensor, targets: Tensor, head: Head, *, block_bytes: int = BLOCK_BYTES, epsilon: float = 0.0
) -> Reduction:
    """Reduce (C, A, D) hidden states against (A,) realised tokens; condition 0 is the reference.

    JSD(P, Q) = (KL(P|M) + KL(Q|M)) / 2 with M = (P + Q) / 2, taken element by element as
    (p log p + q log q) / 2 - m log m so that equal distributions cancel before the sum. `epsilon` > 0
    reproduces the GASP author's code instead, which adds 1e-8 inside log m and log q (not inside log p).
    """
    n_conditions, n_rows, _ = hidden.shape
    n_vocabulary = head.weight.shape[0]
    logprob = hidden.new_empty((n_conditions, n_rows), dtype=head.accumulator)
    entropy = torch.empty_like(logprob)
    jsd = torch.empty_like(logprob[1:])
    top, bottom = torch.empty_like(logprob), torch.empty_like(logprob)
    rank = torch.empty_like(logprob, dtype=torch.int32)
    item = logprob.element_size()
    shape = tile_shape(n_conditions, n_rows, n_vocabulary, item, block_bytes, cuda=hidden.is_cuda)
    rows, columns, keep = shape
    for first in range(0, n_rows, rows):
        part = slice(first, min(first + rows, n_rows))
        block = hidden[:, part]
        read = _kept(block, head) if keep else _recomputed(block, head)
        tile = _reduce_rows(read, targets[part], n_vocabulary, columns, epsilon)
        for whole, piece in zip((logprob, entropy, jsd, top, bottom, rank), tile, strict=True):
            whole[:, part] = piece
        del read  # its logits, before the next tile's are made beside them
    return Reduction(logprob, entropy, jsd, top, bottom, rank)


def tile_shape(
    n_conditions: int, n_rows: int, n_vocabulary: int, item_bytes: int, block_bytes: int, *, cuda: bool
) -> tuple[int, int, bool]:
    """Rows and columns of a tile, and whether a row of all conditions fits so that logits can be kept.

    Kept logits are rows x the whole vocabulary. LIVE_TENSORS of rows x columns are alive beside or without
    them.
    """
    per_row = n_conditions * n_vocabulary * item_bytes
    if per_row <= block_bytes:
        rows = min(n_rows, block_bytes // per_row)
        if cuda:  # kernels stream through memory anyway; fewer launches win
            return rows, n_vocabulary, True
        return rows, max(256, _CACHE_BYTES // (n_conditions * rows * item_bytes)), True
    # The head runs twice (normalisers first).
    rows = max(1, min(n_rows, 64 // n_conditions))
    return rows, max(1, block_bytes // (LIVE_TENSORS * n_conditions * rows * item_bytes)), False


Read = Callable[[int, int], Tensor]


def _kept(block: Tensor, head: Head) -> Read:
    n_conditions, n_rows, width = block.shape
    logits = head.logits(block.reshape(-1, width)).view(n_conditions, n_rows, -1)
    return lambda start, stop: logits[:, :, start:stop]


def _recomputed(block: Tensor, head: Head) -> Read:
    n_conditions, n_rows, width = block.shape
    flat = block.reshape(-1, width)
    return lambda start, stop: head.logits(flat, start, stop).view(n_conditions, n_rows, -1)


def _reduce_rows(
    read: Read, targets: Tensor, n_vocabulary: int, columns: int, epsilon: float
) -> tuple[Tensor, ...]:
    """All conditions of a few rows: normalisers in a first walk over the vocabulary, the rest in a second."""
    blocks = [(s, min(s + columns, n_vocabulary)) for s in range(0, n_vocabulary, columns)]
    parts = []
    for start, stop in blocks:
        logits = read(start, stop)
        low, high = logits.aminmax(dim=-1)
        index, inside = _column(targets, start, stop, logits.shape[0])
        own = logits.gather(-1, index)[:, :, 0]
        lse = torch.logsumexp(logits, dim=-1)
        parts.append((lse, low, high, torch.where(inside, own, 0.0)))
    lses, lows, highs, owns = (torch.stack(column) for column in zip(*parts, strict=True))
    target = owns.sum(dim=0)  # one block holds it, the others add an exact zero
    normaliser = torch.logsumexp(lses, dim=0)[:, :, None]  # (C, R, 1)
    top, bottom = highs.amax(dim=0) - normaliser[:, :, 0], lows.amin(dim=0) - normaliser[:, :, 0]
    realised = target - normaliser[:, :, 0]
    entropy, rank = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.int32)
    jsd = torch.zeros_like(target[1:])
    for start, stop in blocks:
        logits = read(start, stop)
        rank += (logits > target[:, :, None]).sum(dim=-1, dtype=torch.int32)
        logp = logits - normaliser  # (C, R, columns)
        p = logp.exp()
        plogp = logp.mul_(p)  # logp is not needed any more, except in the compatible form
        entropy -= plogp.sum(dim=-1)
        if epsilon:
            jsd += _compatible_jsd(p, plogp, epsilon)
        else:
            mixture = (p[1:] + p[:1]).mul_(0.5)
            mixture *= mixture.clamp_min(torch.finfo(p.dtype).tiny).log_()
            plogp[1:] += plogp[:1]
            jsd += plogp[1:].mul_(0.5).sub_(mixture).sum(dim=-1)
    bound = math.log(2) + (1e-4 if epsilon else 0.0)
    return realised, entropy.clamp_(min=0.0), jsd.clamp_(0.0, bound), top, bottom, rank


def _column(targets: Tensor, start: int, stop: int, n_conditions: int) -> tuple[Tensor, Tensor]:
    """Where in this block the realised tokens stand (C, R, 1), and which of them do (R,)."""
    index = (targets - start).clamp(0, stop - start - 1).expand(n_conditions, -1)[:, :, None]
    return index, (targets >= start) & (targets < stop)


def _compatible_jsd(p: Tensor, plogp: Tensor, epsilon: float) -> Tensor:
    """(C - 1, R) as in `gasp-rag` 0.2.1: epsilon inside log m and log q, the exact log on the P side."""
    log_mixture = ((p[1:] + p[:1]) * 0.5 + epsilon).log()
    kl_p = plogp[:1] - p[:1] * log_mixture
    kl_q = p[1:] * ((p[1:] + epsilon).log() - log_mixture)
    return 0.5 * (kl_p + kl_q).sum(dim=-1)
