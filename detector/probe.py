"""Probe: what a forward pass is asked to keep beside the last hidden states of the answer rows.

One probe watches one reading of one record. It keeps, for the condition with all passages, the reduced
attention of every layer, and for that and the empty condition the states of the layers in use. Everything
else is dropped inside the layer that made it, so memory does not grow with the number of layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from detector.attention import Rows, Shares, head_mean, shares
from detector.errors import ScorerError
from detector.windows import Layout

FULL, NONE = 0, 1


@dataclass(frozen=True, slots=True)
class Keep:
    """What a run needs of the forward passes, beside log-probabilities, entropies and JSDs.

    `masked` makes leave-one-out hide each piece instead of removing it: the context is read once, positions
    stay, and pieces after the hidden one have read it. `layers` counts from 1: layer l is what block l puts
    out, and n_layers + 1 is the last one after the final norm. `carried` asks for CORTEX's attention-weighted
    sums at those layers. `piece_attention` asks for the attention on each piece. A piece that gets less than
    `least_share` of the attention on all pieces, in every sentence of the answer, is not left out: that pass
    is saved, and what it would have told stays unknown.
    """

    leave_one_out: bool = True
    words: bool = False
    foil: bool = False
    extremes: bool = False
    attention: bool = False
    layers: tuple[int, ...] = ()
    carried: bool = False
    masked: bool = False
    piece_attention: bool = False
    least_share: float = 0.0

    @property
    def by_piece(self) -> bool:
        """Whether the attention on each piece is read."""
        return self.piece_attention or (self.leave_one_out and self.least_share > 0)

    @property
    def shares(self) -> bool:
        """Whether attention is reduced to shares."""
        return self.attention or self.by_piece

    @property
    def own_rows(self) -> bool:
        """Whether the last answer token must be computed too (its own row predicts nothing)."""
        return self.shares or bool(self.layers)


def audit_keep(
    judge: Keep | None, *, leave_one_out: bool, masked: bool, reads_attention: bool, least_share: float = 0.0
) -> Keep:
    """What an audit keeps: what its bundle reads (`judge`; None without one) and what `blend` does, which may
    be asked for long after the passes.
    """
    keep = Keep() if judge is None else judge
    return replace(
        keep,
        leave_one_out=leave_one_out,
        masked=masked,
        least_share=least_share,
        words=True,
        attention=keep.attention or reads_attention,
    )


class Probe:
    """Collects while `forward.last_rows` walks the tree. Used once."""

    def __init__(
        self,
        body: Any,
        keep: Keep,
        layout: Layout,
        spans: Sequence[tuple[int, int]],
        scored: tuple[int, int],
        first_sequence: int,
        sentences: Sequence[Sequence[int]] = (),
    ) -> None:
        """`spans` and `scored`: positions start:stop of the pieces, and of the scored answer tokens, in the
        full condition, which is sequence `first_sequence` of the walk. The next one is the empty condition,
        then come those that leave one piece out. `sentences`: which of the scored tokens are one sentence's.
        """
        self._blocks: Sequence[Any] = blocks(body)
        n_layers = len(self._blocks)
        if not set(keep.layers) <= set(range(1, n_layers + 2)) or len(set(keep.layers)) < len(keep.layers):
            raise ScorerError(
                f"layers {list(keep.layers)}: this scorer has 1 to {n_layers}, and {n_layers + 1} for the "
                "last one after the final norm; name each at most once"
            )
        self.keep = keep
        self._layout = layout
        self._spans = spans if keep.by_piece else ()
        self._scored = scored
        self._sentences = sentences
        self._first = first_sequence
        self._sequences = {first_sequence: FULL, first_sequence + 1: NONE}
        self._rows: dict[int, Rows] = {}
        self._places: dict[int, Tensor | slice] = {}
        self._shares: dict[int, list[Shares]] = {}
        self._alphas: dict[int, list[Tensor]] = {}
        self._states: dict[tuple[int, int], list[Tensor]] = {}
        self._seen: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on the blocks whose output is kept, for as long as the context lasts."""
        n_layers = len(self._blocks)
        handles = [
            self._blocks[layer - 1].register_forward_hook(
                lambda _module, _args, output, layer=layer: self._keep_states(layer, output)
            )
            for layer in self.keep.layers
            if layer <= n_layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def sequence(self) -> int:
        """Which sequence of the walk is the full condition, whose attention is read."""
        return self._first

    @property
    def reads_attention(self) -> bool:
        """Whether `see` has anything to do."""
        return self.keep.shares or self.keep.carried

    def enter(self, rows: dict[int, Rows], places: Sequence[Tensor] | None = None) -> None:
        """Say which of the queries of the next node are answer rows, per sequence; and where they stand in
        what the blocks put out, per sequence, where that is elsewhere (in a pack).
        """
        self._rows = {self._sequences[s]: r for s, r in rows.items() if s in self._sequences}
        self._places = {
            condition: slice(rows[s].start, rows[s].stop) if places is None else places[s]
            for s, condition in self._sequences.items()
            if s in rows
        }

    def see(self, block: int, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> None:
        """One layer's attention operands (see `attention.attend`)."""
        self._seen.add(block)
        rows = self._rows.get(FULL)
        if rows is None:
            return
        if self.keep.shares:
            found = shares(query, key, mask, scaling, rows, self._layout, self._spans)
            self._shares.setdefault(block, []).append(found)
        if self.keep.carried and self._carries(block):
            first, stop = self._scored
            alpha = head_mean(query, key, mask, scaling, rows, first)
            # A node may end before the answer does: its rows see no later keys.
            missing = (stop - first) - alpha.shape[1]
            self._alphas.setdefault(block, []).append(torch.nn.functional.pad(alpha, (0, missing)))

    def finish(self, hidden: Sequence[Tensor]) -> None:
        """Take the states after the final norm from the rows, (R, D) per sequence, that the walk returned."""
        last = len(self._blocks) + 1
        if last in self.keep.layers:
            for sequence, condition in self._sequences.items():
                self._states[last, condition] = [hidden[sequence]]
        if self.reads_attention and len(self._seen) != len(self._blocks):
            raise ScorerError(
                f"{type(self._blocks[0]).__name__}: {len(self._blocks) - len(self._seen)} of "
                f"{len(self._blocks)} layers do not run on transformers' scaled-dot-product interface, so "
                "their attention cannot be read; use another scorer or methods that need no attention"
            )

    def attention(self) -> tuple[Tensor, Tensor]:
        """(L, H, R) shares on passages and on the answer so far, R = n_rows of the walk."""
        layers = [self._shares[block] for block in range(len(self._blocks))]
        passages = torch.stack([torch.cat([part.passages for part in parts], dim=1) for parts in layers])
        answer = torch.stack([torch.cat([part.answer for part in parts], dim=1) for parts in layers])
        return passages, answer

    def piece_attention(self) -> Tensor:
        """(K, R) share of attention on each piece, mean over layers and heads, of the rows seen so far."""
        layers = [self._shares[block] for block in range(len(self._blocks))]
        each = [torch.cat([part.pieces for part in parts], dim=1) for parts in layers]
        return torch.stack(each).mean(dim=0)

    def wants(self, sequence: int) -> bool:
        """Whether a sequence of the walk is worth running: all are, but for those that leave out a piece with
        less than `least_share` of the attention in every sentence. All are until the full condition is done.
        """
        piece = sequence - self._first - 2
        if not (self.keep.leave_one_out and self.keep.least_share and 0 <= piece < len(self._spans)):
            return True
        on_pieces = self.piece_attention() if self._shares else torch.empty(0, 0)
        first, stop = self._scored
        if on_pieces.shape[1] <= stop - first:
            return True
        sums = torch.stack([on_pieces[:, list(tokens)].sum(dim=1) for tokens in self._sentences])
        return bool((sums[:, piece] >= self.keep.least_share * sums.sum(dim=1)).any())

    def states(self) -> Tensor:
        """(S, 2, R, D) states of the layers in use, with all passages and with none."""
        return torch.stack(
            [
                torch.stack([torch.cat(self._states[layer, condition]) for condition in (FULL, NONE)])
                for layer in self.keep.layers
            ]
        )

    def carried(self, states: Tensor) -> Tensor:
        """(S, R - 1, D) sum over earlier answer tokens j < i of alpha_ij (h_full - h_none)_j.

        CORTEX, section 3.2: alpha is the attention of the token's own row in the pass with passages, mean
        over heads, not renormalised; each layer's states use that layer's own attention.
        """
        out = []
        for index, layer in enumerate(self.keep.layers):
            change = states[index, FULL, 1:] - states[index, NONE, 1:]
            alpha = torch.cat(self._alphas[min(layer, len(self._blocks)) - 1])[1:].to(change.dtype)
            out.append(alpha.tril(-1) @ change)
        return torch.stack(out)

    def _carries(self, block: int) -> bool:
        return any(min(layer, len(self._blocks)) - 1 == block for layer in self.keep.layers)

    def _keep_states(self, layer: int, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        for condition, place in self._places.items():
            # A copy: a view would keep every position of the node alive.
            kept = states[0, place].clone()
            self._states.setdefault((layer, condition), []).append(kept)


def blocks(body: Any) -> Sequence[Any]:
    """The transformer blocks of a decoder. Raises ScorerError where they are not to be found."""
    for name in ("layers", "h", "blocks"):
        found = getattr(body, name, None)
        if found is not None and len(found):
            return list(found)
    raise ScorerError(f"{type(body).__name__}: its layers are not where transformers' decoders keep them")
