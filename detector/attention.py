"""What is read off the answer rows of attention while they exist, layer by layer.

A layer's attention map is never stored. Where a row of the answer is computed, its weights are formed again
from that layer's queries and keys, a tile of rows at a time, and reduced at once: the share of each head's
attention that lands on the passages and on the answer so far, and, for the few layers that carry states
forward (CORTEX's residual), the head mean over earlier answer tokens. Extra memory is one tile plus the
results, whatever the number of layers and the length of the context.

The model itself keeps running on scaled-dot-product attention: `attend` stands in its place under the name
`leadline` in transformers' attention interface and calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from detector.windows import Layout

NAME = "leadline"
_TILE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """The answer rows of the node that is being computed: `start:stop` among its queries."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Attention of R rows in one layer: both (H, R), in [0, 1]; the rest is the question's."""

    passages: Tensor
    answer: Tensor


See = Callable[[int, Tensor, Tensor, Tensor | None, float], None]
"""(layer, queries (H, T, d), keys (H_kv, S, d), mask (T, S) or None, scaling)."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    see: See | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled-dot-product attention as transformers runs it; `see` is shown the operands of batch row 0."""
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if see is not None and kwargs.get("position_bias") is None:  # a bias would be missing from our weights
        mask = None if attention_mask is None else attention_mask[0, 0]
        scaling = kwargs.get("scaling")
        see(module.layer_idx, query[0], key[0], mask, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return out, None


def register() -> None:
    """Make `attn_implementation="leadline"` known to transformers. May be called again."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def shares(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, rows: Rows, layout: Layout
) -> Shares:
    """Reduce the rows' attention to what falls on passages and on the answer so far, in float32."""
    a, b = layout.passages
    passages, answer = [], []
    for weights, _ in _tiles(query, key, mask, scaling, rows):
        passages.append(weights[:, :, a:b].sum(dim=-1))
        answer.append(weights[:, :, layout.header :].sum(dim=-1))
    return Shares(torch.cat(passages, dim=1), torch.cat(answer, dim=1))


def head_mean(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, rows: Rows, first_key: int
) -> Tensor:
    """(R, S - first_key) attention to the keys from `first_key` on, mean over heads, not renormalised."""
    tiles = _tiles(query, key, mask, scaling, rows)
    return torch.cat([weights[:, :, first_key:].mean(dim=0) for weights, _ in tiles])


def _tiles(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, rows: Rows) -> Any:
    """Softmax weights (H, r, S) of a few rows at a time, float32 (float64 for a float64 model)."""
    n_heads, n_queries, width = query.shape
    n_kv, n_keys, _ = key.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    size = max(1, _TILE_BYTES // (n_heads * n_keys * 4))
    keys = key.to(dtype).transpose(1, 2)  # (H_kv, d, S)
    offset = n_keys - n_queries  # the cache's tokens come before the queries
    for start in range(rows.start, rows.stop, size):
        stop = min(start + size, rows.stop)
        part = query[:, start:stop].to(dtype).reshape(n_kv, -1, width)  # heads that share keys, together
        logits = (part @ keys).view(n_heads, stop - start, n_keys).mul_(scaling)
        if mask is None:
            position = torch.arange(start, stop, device=query.device)[:, None] + offset
            hidden = torch.arange(n_keys, device=query.device)[None, :] > position
            logits.masked_fill_(hidden, float("-inf"))
        elif mask.dtype == torch.bool:
            logits.masked_fill_(~mask[start:stop], float("-inf"))
        else:
            logits += mask[start:stop]
        yield torch.softmax(logits, dim=-1), start
