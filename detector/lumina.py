"""LUMINA's external term: how far the next-token distribution moves when the passages are somebody else's.

Yeh et al. (ICLR 2026): the squared maximum mean discrepancy between p(. | question, passages) and
p(. | question, random passages) under the kernel (1 + cos(e_v, e_w)) / 2 on token embeddings. The constant
half of the kernel cancels, and with embeddings of unit length the double sum over the vocabulary is

    E = 1/2 | sum_v (P_v - Q_v) e_v |^2

one product of vocabulary x width per token. An answer that ignores its passages does not react to losing
them: low E means ungrounded, so the score is -E. The paper's other term (logit lens on every layer) is not
part of this baseline. Which foil, which seed and which embeddings are choices to be recorded with a figure;
here the foil is `pick_foil`'s and the embeddings are the caller's (the input ones where not tied).
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detector.errors import DetectorError, ScorerError
from detector.record import Passage, Record
from detector.trace import F32
from detector.vocabulary import BLOCK_BYTES, Head


def mmd(
    hidden_full: Tensor,
    hidden_other: Tensor,
    head: Head,
    embeddings: Tensor,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """(A,) squared MMD, in [0, 2], of (A, D) states under two sets of passages; `embeddings` is (V, any).

    In the head's accumulator dtype. Beyond the inputs and one number per token of the vocabulary, memory is
    set by `block_bytes` whatever A is (one row of the vocabulary at least). A row of zeros among the
    embeddings has a cosine of 0 with everything. Raises ScorerError where the embeddings are not the
    head's vocabulary.
    """
    n_vocabulary, width = embeddings.shape
    if head.weight.shape[0] != n_vocabulary:
        raise ScorerError(
            f"lumina: {n_vocabulary} embeddings for an output vocabulary of {head.weight.shape[0]}; "
            "use another scorer or another method"
        )
    dtype = head.accumulator
    item = torch.finfo(dtype).bits // 8
    rows = max(1, block_bytes // (4 * n_vocabulary * item))  # two distributions, and each one's logits
    columns = max(1, block_bytes // (4 * width * item))
    blocks = [slice(start, start + columns) for start in range(0, n_vocabulary, columns)]
    lengths = torch.cat([embeddings[block].to(dtype).norm(dim=1) for block in blocks])
    inverse = torch.where(lengths > 0, 1.0 / lengths.clamp_min(torch.finfo(dtype).tiny), 0.0)
    out = hidden_full.new_empty(len(hidden_full), dtype=dtype)
    for first in range(0, len(hidden_full), rows):
        part = slice(first, first + rows)
        change = torch.softmax(head.logits(hidden_full[part]), dim=-1)
        change -= torch.softmax(head.logits(hidden_other[part]), dim=-1)
        change *= inverse
        moved = change.new_zeros((len(change), width))
        for block in blocks:
            moved += change[:, block] @ embeddings[block].to(dtype)
        out[part] = 0.5 * moved.square().sum(dim=-1)
    return out


def score(external: NDArray[np.float32]) -> F32:
    """(A,) the negated external term, in [-2, 0]. Higher = less grounded."""
    return -np.asarray(external, dtype=np.float32)


def pick_foil(record: Record, pool: Sequence[Record], seed: int) -> tuple[Passage, ...]:
    """The passages of a random other record: none of them, as text, is among the record's own.

    A hash of seed and record says where in the pool to look, and the first that fits from there on is taken:
    the same record, pool and seed give the same foil, and no record's foil depends on what was read before.
    Raises DetectorError where the pool holds none that fits.
    """
    own = {passage.text.strip() for passage in record.passages}
    content = [seed, record.question, [passage.text for passage in record.passages], record.answer]
    digest = hashlib.sha256(json.dumps(content).encode()).digest()
    start = int.from_bytes(digest[:8], "big")
    for step in range(len(pool)):
        foil = pool[(start + step) % len(pool)].passages
        texts = {passage.text.strip() for passage in foil}
        if any(texts) and own.isdisjoint(texts - {""}):
            return foil
    raise DetectorError(
        f"lumina: none of {len(pool)} records in the pool has passages that this record lacks; "
        "give a pool of other questions' records"
    )
