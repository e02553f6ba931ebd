"""Packed: the conditions of many records as one sequence, for one pass through the model.

The tree of their shared prefixes is laid out depth first, so that all that comes after a node stands in one
stretch behind it. A token is then seen by the later ones that stand before the end of that stretch, and by no
others: two comparisons say what an ancestor is, and no mask over all pairs is ever made. Blocks of pairs are
sorted into unseen, seen and mixed by the least and the largest numbers in them, which is linear in tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from detector.prefix_tree import Forest, Ids, Node

BLOCK = 128
"""Tokens a side of a block of pairs: what FlexAttention takes, and what packs are padded to a multiple of."""

PACK_TOKENS = 1 << 17
"""Default budget of a pack. More tokens at once make a GPU no faster long before this."""

LEAST_PACK_TOKENS = 1 << 12
"""A device without room for this has none for a pack: the bound never falls below it."""

EVERYTHING = (1 << 31) - 1
"""The window of a layer that sees all positions."""

MaskMod = Callable[[Any, Any, Any, Any], Tensor]
"""(batch row, head, query, key), indices into the pack: whether that query sees that key."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """A tree laid out, padded to a multiple of BLOCK. Tensors are (T,), int32 but for `tokens`."""

    tokens: Tensor
    """int64; 0 where padded."""
    positions: Tensor
    """Of each token in its sequences."""
    until: Tensor
    """Where the stretch ends in which a token is seen: in all of its node, and in all that is below it."""
    hidden_from: Tensor
    """Positions `hidden_from:hidden_to` of its sequence are hidden from a token."""
    hidden_to: Tensor
    n_tokens: int
    """Without padding: what the tree holds."""
    paths: tuple[tuple[tuple[int, int], ...], ...]
    """For each sequence, the stretches start:stop that its tokens stand in, in order."""

    @classmethod
    def of(cls, tree: Node, device: torch.device | str = "cpu") -> "Pack":
        """Lay out a tree."""
        n_tokens = tree.n_tokens
        # Two blocks at least: a length of one would be a constant to the compiler, and compiled apart.
        size = max(2, -(-n_tokens // BLOCK)) * BLOCK
        tokens, positions = np.zeros(size, np.int64), np.zeros(size, np.int32)
        until = np.arange(1, size + 1, dtype=np.int32)  # padding sees itself: a row needs something to see
        hidden_from, hidden_to = np.full(size, EVERYTHING, np.int32), np.zeros(size, np.int32)
        paths: list[list[tuple[int, int]]] = [[] for _ in tree.sequences]

        def lay(node: Node, start: int) -> int:
            stop = last = start + len(node.tokens)
            for sequence in node.sequences:
                paths[sequence].append((start, stop))
            for child in node.children:
                last = lay(child, last)
            tokens[start:stop] = node.tokens
            positions[start:stop] = np.arange(node.start, node.stop)
            until[start:stop] = last
            if node.hidden is not None:
                hidden_from[start:stop], hidden_to[start:stop] = node.hidden
            return last

        if lay(tree, 0) != n_tokens:
            raise AssertionError("a pack holds other tokens than its tree")

        def moved(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            moved(tokens),
            moved(positions),
            moved(until),
            moved(hidden_from),
            moved(hidden_to),
            n_tokens,
            tuple(map(tuple, paths)),
        )

    @property
    def n_padding(self) -> int:
        """Tokens that go through the model for nothing."""
        return len(self.tokens) - self.n_tokens

    def places(self, sequence: int, n_last: int | None = None) -> Tensor:
        """(n,) where the tokens of a sequence stand in the pack, all of them or the last ones, in order."""
        path = np.concatenate([np.arange(start, stop) for start, stop in self.paths[sequence]])
        first = 0 if n_last is None else len(path) - n_last
        return torch.from_numpy(path[first:]).to(self.tokens.device)

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `sees` needs of every token."""
        return self.positions, self.until, self.hidden_from, self.hidden_to

    def dense_mask(self, window: int = EVERYTHING) -> Tensor:
        """(T, T) `sees` for all pairs: the reference, for packs that are small."""
        index = torch.arange(len(self.tokens), device=self.tokens.device)
        return sees(*self.columns, window)(0, 0, index[:, None], index[None, :])

    def blocks(self, window: int = EVERYTHING) -> tuple[Tensor, Tensor]:
        """(T / BLOCK, T / BLOCK) blocks of which some pairs may be seen, and those of which all are."""
        first = torch.arange(0, len(self.tokens), BLOCK, device=self.tokens.device)
        last = first + BLOCK - 1
        ends_low, ends_high = _extremes(self.until)
        at_low, at_high = _extremes(self.positions)
        from_low, from_high = _extremes(self.hidden_from)
        to_low, to_high = _extremes(self.hidden_to)
        # Queries are rows, keys are columns.
        some = (first <= last[:, None]) & (first[:, None] < ends_high)
        every = (last <= first[:, None]) & (last[:, None] < ends_low)
        some &= (at_low < from_high[:, None]) | (at_high >= to_low[:, None])
        every &= (at_high < from_low[:, None]) | (at_low >= to_high[:, None])
        some &= at_low[:, None] - at_high < window
        every &= at_high[:, None] - at_low < window
        return some, every

    def block_lists(self, window: int = EVERYTHING) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same as BlockMask wants it: how many mixed blocks and which, how many full ones and which."""
        some, every = self.blocks(window)
        return (*_listed(some & ~every), *_listed(every))


def sees(positions: Tensor, until: Tensor, hidden_from: Tensor, hidden_to: Tensor, window: int) -> MaskMod:
    """What a token of a pack may see: its ancestors, the earlier ones of its node and itself, without those
    that are hidden from it; and of these the ones less than `window` positions back.
    """

    def mask_mod(_batch: Any, _head: Any, query: Any, key: Any) -> Tensor:
        at = positions[key]
        shown = (at < hidden_from[query]) | (at >= hidden_to[query])
        near = positions[query] - at < window
        seen: Tensor = (key <= query) & (query < until[key]) & shown & near
        return seen

    return mask_mod


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    columns: tuple[Tensor, Tensor, Tensor, Tensor],
    blocks: tuple[Tensor, Tensor, Tensor, Tensor],
    window: int,
) -> Tensor:
    """Attention (B, H, T, d) over a pack by FlexAttention, to be compiled.

    The mask is put together in here, of tensors whose lengths are all taken from the queries: made outside,
    its own length would be a constant to the compiler, and every other length compiled again.
    """
    size = query.shape[2]
    mask = BlockMask.from_kv_blocks(
        *blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=sees(*columns, window),
        seq_lengths=(size, size),
        compute_q_blocks=False,
    )
    out: Tensor = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    return out


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    low, high = values.view(-1, BLOCK).aminmax(dim=1)
    return low, high


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen, and which, those first."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(dim=1, dtype=torch.int32)[None, None], order.int()[None, None]


@dataclass(slots=True)
class Sight:
    """What attention needs to know of a pack while it runs.

    Layers report here that they looked no further.
    """

    pack: Pack
    windows: dict[int, int] = field(default_factory=dict)
    """For each layer that ran, how many positions back it sees."""
    _dense: dict[int, Tensor] = field(default_factory=dict)
    _blocks: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def dense(self, window: int) -> Tensor:
        """`Pack.dense_mask`, made once for all layers."""
        if window not in self._dense:
            self._dense[window] = self.pack.dense_mask(window)
        return self._dense[window]

    def blocks(self, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`Pack.block_lists`, made once for all layers."""
        if window not in self._blocks:
            self._blocks[window] = self.pack.block_lists(window)
        return self._blocks[window]


@dataclass(frozen=True, slots=True)
class Load:
    """Records that run together."""

    start: int
    stop: int
    n_tokens: int
    """That they hold together, without padding."""
    fits: bool
    """Whether that is within the budget. Where not it is a single record, and nothing for a pack."""


def fill(records: Iterable[Sequence[Ids]], budget: int, start: int = 0) -> Load:
    """As many records as hold at most `budget` tokens together, at least one. Each is given as the sequences
    of its conditions, the first has number `start`.
    """
    forest, n_records = Forest(), 0
    for sequences in records:
        before = forest.n_tokens
        forest.add(sequences)
        if forest.n_tokens > budget:
            if n_records == 0:
                return Load(start, start + 1, forest.n_tokens, fits=False)
            return Load(start, start + n_records, before, fits=True)
        n_records += 1
    return Load(start, start + n_records, forest.n_tokens, fits=True)


def plan_forest(records: Sequence[Sequence[Ids]], budget: int) -> list[Load]:
    """All records in loads, order kept. The same records and budget make the same plan.

    >>> plan_forest([[(1, 2, 3)], [(1, 2, 4)], [(5,) * 9], [(6,)]], 5)
    [Load(start=0, stop=2, n_tokens=4, fits=True), Load(start=2, stop=3, n_tokens=9, fits=False), \
Load(start=3, stop=4, n_tokens=1, fits=True)]
    """
    loads: list[Load] = []
    while (start := loads[-1].stop if loads else 0) < len(records):
        loads.append(fill(records[start:], budget, start))
    return loads
