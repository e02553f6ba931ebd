"""What is read off the answer rows of attention while they exist, layer by layer.

A layer's attention map is never stored. Where a row of the answer is computed, its weights are formed again
from that layer's queries and keys, a tile of rows at a time, and reduced at once: the share of each head's
attention that lands on the passages and on the answer so far, and, for the few layers that carry states
forward (CORTEX's residual), the head mean over earlier answer tokens. Extra memory is one tile plus the
results, whatever the number of layers and the length of the context.

`attend` stands in the place of scaled-dot-product attention under the name `leadline` in transformers'
attention interface. What transformers runs there builds a dense mask as soon as a cache comes before the
queries, and computes the whole rectangle. Here the queries meet the cache (no mask) and one another (causal)
in separate calls, which are merged by their log-sum-exps (as in Hydragen, arXiv 2402.05099); a hidden span of
the cache is simply left out. A pack (`detector.packed`) has no cache: there it is FlexAttention on a GPU, and
on a CPU one call with a dense mask, which is the reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from detector.packed import EVERYTHING, Sight, flex
from detector.windows import Layout

NAME = "leadline"
_TILE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """The answer rows of the node that is being computed: `start:stop` among its queries."""

    start: int
    stop: int


@dataclass(slots=True)
class Hiding:
    """Cached positions `start:stop` that no query of a call may attend to.

    Layers report here that they obeyed: one that does not run on our attention cannot be kept from looking.
    """

    start: int
    stop: int
    layers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Shares:
    """Attention of R rows in one layer, in [0, 1]; what is neither on passages nor on the answer is the
    question's."""

    passages: Tensor
    """(H, R)"""
    answer: Tensor
    """(H, R)"""
    pieces: Tensor
    """(K, R) on each of the spans that were asked for, mean over heads."""


See = Callable[[int, Tensor, Tensor, Tensor | None, float], None]
"""(layer, queries (H, T, d), keys (H_kv, S, d), mask (T, S) or None, scaling). Without a mask a query sees
every key up to its own, the queries being the last T of the S positions."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    see: See | None = None,
    hiding: Hiding | None = None,
    sight: Sight | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention (B, T, H, d) of T queries (B, H, T, d) to S keys, the cache's tokens first.

    `see` is shown the operands of batch row 0; `hiding` keeps a span of the cache from every query. With
    `sight` the queries are those of a pack, which say themselves what they see.
    """
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    biased = any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if sight is not None and not biased:
        out = attend_packed(module, query, key, value, scaling, sight, kwargs)
        if see is not None:
            see(module.layer_idx, query[0], key[0], None, scaling)
        return out, None
    asked = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if asked is None else asked
    causal = causal or query.shape[2] == 1  # the last position sees everything either way
    if attention_mask is None and causal and not biased and _splits(query, key, value):
        out = attend_apart(query, key, value, scaling, hiding).transpose(1, 2).contiguous()
    else:
        mask = _dense(attention_mask, query, key, hiding, causal=causal)
        out, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    if see is not None and not biased:  # a bias would be missing from our weights
        mask = None if attention_mask is None else attention_mask[0, 0]
        see(module.layer_idx, query[0], key[0], mask, scaling)
    if hiding is not None:
        hiding.layers.add(module.layer_idx)
    return out, None


def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, hiding: Hiding | None = None
) -> Tensor:
    """Causal attention (B, H, T, d) of the last T of S positions, without a mask and without copies of keys.

    One square causal call over the queries' own keys and one call for each visible stretch of the cache, in
    which the heads that share keys stand one behind the other as queries. Each call's softmax runs over its
    own keys: weighted by their shares of the common normaliser, the outputs add up to the whole's.
    """
    n_cached = key.shape[2] - query.shape[2]
    stretches = [(0, n_cached)] if hiding is None else [(0, hiding.start), (hiding.stop, n_cached)]
    parts = [_flash(query, key[:, :, n_cached:], value[:, :, n_cached:], scaling, causal=True)]
    folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    for start, stop in stretches:
        if start < stop:
            part = _flash(folded, key[:, :, start:stop], value[:, :, start:stop], scaling, causal=False)
            parts.append((part[0].reshape(query.shape), part[1].reshape(query.shape[:3])))
    if len(parts) == 1:
        return parts[0][0]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0).unsqueeze(-1)
    out = weights[0] * parts[0][0]
    for weight, (part_out, _) in zip(weights[1:], parts[1:], strict=True):
        out += weight * part_out
    return out.to(query.dtype)


def attend_packed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    sight: Sight,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention (B, T, H, d) over a pack. A layer that slides says so by `sliding_window`, as transformers
    needs it where no mask can.
    """
    window = kwargs.get("sliding_window") or EVERYTHING
    sight.windows[module.layer_idx] = window
    if _has_flex(query.device):
        run = compiled_flex()
        out = run(query, key, value, scaling, sight.pack.columns, sight.blocks(window), window)
        return out.transpose(1, 2).contiguous()
    mask = sight.dense(window)[None, None]
    dense: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    return dense


@cache
def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention over a pack, compiled for all lengths at its first use."""
    return torch.compile(flex, dynamic=True)


def make_mask(**kwargs: Any) -> Tensor | None:
    """The mask that transformers asks for, or None where `attend_apart` does without: every query sees all
    positions up to its own. A sliding window that nothing has left yet is such a case.
    """
    window = kwargs.get("local_size")
    causal = kwargs.get("allow_is_causal_skip", True) and kwargs.get("attention_mask") is None
    first = kwargs.get("kv_offset", 0)
    aligned = kwargs.get("q_offset", 0) + kwargs["q_length"] == first + kwargs["kv_length"]
    small = window is None or kwargs["kv_length"] < window
    if causal and aligned and small and _has_flash(kwargs.get("device", "cpu")):
        return None
    mask: Tensor | None = sdpa_mask(**kwargs)
    return mask


def register() -> None:
    """Make `attn_implementation="leadline"` known to transformers. May be called again."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def _has_flash(device: torch.device | str) -> bool:
    """Whether `_flash` serves this device. Elsewhere (CUDA) attention runs with a dense mask."""
    return torch.device(device).type == "cpu"


def _has_flex(device: torch.device) -> bool:
    """Whether packs run on FlexAttention. Compiled for a CPU it would work, and take minutes to compile."""
    return device.type == "cuda"


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d) and log-sum-exps (B, H, T), float32 or better, of one call on a CPU.

    A private operator of torch, the one behind its scaled-dot-product attention on a CPU, because no public
    function returns the log-sum-exps. `test_attention.py` holds it against the formula.
    """
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scaling
    )
    return found[0], found[1]


def _splits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `_flash` takes these: heads of one width, dense in memory."""
    dense = all(operand.stride(-1) == 1 for operand in (query, key, value))
    same = query.shape[-1] == key.shape[-1] == value.shape[-1]
    return dense and same and _has_flash(query.device)


def _dense(
    mask: Tensor | None, query: Tensor, key: Tensor, hiding: Hiding | None, *, causal: bool
) -> Tensor | None:
    """The mask (B or 1, 1, T, S) that says all, hidden columns included; None where `is_causal` says all."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    if mask is None:
        if hiding is None and (not causal or n_queries in (1, n_keys)):
            return None
        position = torch.arange(n_keys, device=key.device)
        last = position[n_keys - n_queries :, None] if causal else position[-1:].expand(n_queries, 1)
        mask = (position <= last)[None, None]
    if hiding is None:
        return mask
    hidden = torch.zeros(n_keys, dtype=torch.bool, device=key.device)
    hidden[hiding.start : hiding.stop] = True
    return mask.masked_fill(hidden, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)


def shares(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    rows: Rows,
    layout: Layout,
    spans: Sequence[tuple[int, int]] = (),
) -> Shares:
    """Reduce the rows' attention to what falls on passages, on the answer so far, and on each of `spans`, in
    float32.
    """
    a, b = layout.passages
    passages, answer, pieces = [], [], []
    for weights, _ in _tiles(query, key, mask, scaling, rows):
        passages.append(weights[:, :, a:b].sum(dim=-1))
        answer.append(weights[:, :, layout.header :].sum(dim=-1))
        each = [weights[:, :, start:stop].sum(dim=-1).mean(dim=0) for start, stop in spans]
        pieces.append(torch.stack(each) if each else weights.new_empty(0, weights.shape[1]))
    return Shares(torch.cat(passages, dim=1), torch.cat(answer, dim=1), torch.cat(pieces, dim=1))


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
