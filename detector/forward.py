"""Run the conditions of a record through a causal language model.

The tree is walked depth first over one key-value cache: a node's tokens are computed once, on the cache of
the path above it, and the cache is cut back to the branch point before the next child. Tokens that may not
see a span (masked leave-one-out) run on the same cache and leave that span out. Only the hidden states of
answer rows are kept; the model's own output head never runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from detector.attention import NAME, Hiding, Rows
from detector.errors import ScorerError
from detector.prefix_tree import Ids, Node, build_tree
from detector.probe import Probe, blocks

PART_TOKENS = 512
"""How many tokens run through the layers at once on a CPU. What a layer makes of them is what a reading takes
beside its cache, and an allocator makes a multiple of it out of larger arrays; more rows make products no
faster."""

_LARGE_BYTES = 33 << 20  # more than glibc ever keeps for reuse


@torch.inference_mode()
def last_rows(
    body: Any,
    sequences: Sequence[Ids],
    n_rows: Sequence[int],
    probes: Sequence[Probe] = (),
    wanted: Callable[[int], bool] = lambda _: True,
) -> tuple[list[Tensor], int]:
    """Hidden states (n_rows[i], D) at the last `n_rows[i]` positions of each sequence i.

    `body` is the model below its output head (final norm included). Also returns how many tokens were
    computed. To score A answer tokens pass prompt + answer without its last token and A rows: the row at
    a position predicts the token after it, so the first answer token is scored by the last prompt row.
    `probes` watch their sequences on the way, where nothing is hidden. A sequence that is not `wanted` has
    rows without meaning; it is asked about when the walk comes to what it does not share with one that is,
    and sequence 0 is walked to its end before any other. Raises ScorerError where something is hidden and a
    layer of the model would see it all the same.
    """
    tree = build_tree(sequences)
    device = next(body.parameters()).device
    # Every layer keeps all positions. Sliding-window layers then mask instead of forgetting, which is what
    # lets the cache be cut back to any branch point.
    room = _Room(2 * getattr(body.config, "num_hidden_layers", 1))
    cache = Cache(layer_class_to_replicate=partial(_Layer, room, max(map(len, sequences))))
    # One place for the rows of all, made early: kept beside each node's states, they would cut up the heap.
    hidden: Sequence[Tensor] = ()

    def see(*operands: Any) -> None:
        for probe in probes:
            probe.see(*operands)

    with ExitStack() as stack:
        for probe in probes:
            stack.enter_context(probe.watching())
        n_tokens = 0
        for node in _parts(tree, device, wanted):
            n_tokens += len(node.tokens)
            cache.crop(node.start - cache.get_seq_length())
            tokens = torch.tensor([node.tokens], device=device)
            rows = _answer_rows(node, sequences, n_rows)
            for probe in probes:
                probe.enter(rows)
            hiding = node.hidden and Hiding(*node.hidden)
            more: dict[str, Any] = {}
            if hiding is not None:
                _check_name(body)
                more["hiding"] = hiding
            elif probes:
                more["see"] = see
            states = body(input_ids=tokens, cache=cache, use_cache=True, **more).last_hidden_state[0]
            if hiding is not None:
                _check_hidden(body, hiding)
            hidden = hidden or states.new_empty((sum(n_rows), states.shape[1])).split(list(n_rows))
            for index, found in rows.items():
                first = node.start + found.start - (len(sequences[index]) - n_rows[index])
                hidden[index][first : first + found.stop - found.start] = states[found.start : found.stop]
    for probe in probes:
        probe.finish(hidden)
    return list(hidden), n_tokens


def _parts(tree: Node, device: torch.device, wanted: Callable[[int], bool]) -> Iterator[Node]:
    """The nodes of a tree that hold tokens of a wanted sequence, depth first; on a CPU in parts of
    PART_TOKENS at most.

    Elsewhere a part that follows another would need a dense mask, which takes more than it saves.
    """
    for node in tree.walk():
        if not any(map(wanted, node.sequences)):
            continue
        size = PART_TOKENS if device.type == "cpu" else max(1, len(node.tokens))
        for first in range(0, len(node.tokens), size):
            yield replace(node, start=node.start + first, tokens=node.tokens[first : first + size])


class _Room:
    """One block of memory for `n_places` tensors of the size of the first.

    An allocator gives one large block back to the system when it is freed. The pieces of a cache it keeps.
    What of a block is never written to takes no memory on a CPU.
    """

    def __init__(self, n_places: int) -> None:
        self._n_places = n_places
        self._left: Tensor | None = None

    def take(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor of `shape`, uninitialised: from the block as long as it lasts, else one of its own."""
        size = math.prod(shape)
        if self._left is None:
            least = 0 if like.is_cuda else _LARGE_BYTES // like.element_size()
            self._left = like.new_empty(max(size * self._n_places, least))
        if size > len(self._left):
            return like.new_empty(shape)
        taken, self._left = self._left[:size], self._left[size:]
        return taken.view(shape)


class _Layer(DynamicLayer):  # type: ignore[misc]  # transformers is Any to us
    """Keys and values of one layer in a place that holds the longest path from the start.

    transformers' own layer copies all that is cached for every node.
    """

    def __init__(self, room: _Room, n_tokens: int) -> None:
        super().__init__()
        self._room = room
        self._n_tokens = n_tokens
        self._places: tuple[Tensor, ...] = ()

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Views (B, H_kv, cached + new, d) of both places, the new tokens written behind the cached ones."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            shapes = [(*new.shape[:2], self._n_tokens, new.shape[3]) for new in (keys, values)]
            self._places = tuple(self._room.take(keys, shape) for shape in shapes)
        start = self.get_seq_length()
        stop = start + keys.shape[2]
        for place, new in zip(self._places, (keys, values), strict=True):
            place[:, :, start:stop] = new
        self.keys, self.values = (place[:, :, :stop] for place in self._places)
        return self.keys, self.values


def _check_name(body: Any) -> None:
    if body.config._attn_implementation != NAME:
        raise _no_hiding(body, "any")


def _check_hidden(body: Any, hiding: Hiding) -> None:
    n_layers = len(blocks(body))
    if len(hiding.layers) != n_layers:
        raise _no_hiding(body, f"{n_layers - len(hiding.layers)} of {n_layers}")


def _no_hiding(body: Any, layers: str) -> ScorerError:
    return ScorerError(
        f"{type(body).__name__}: no passage can be hidden from {layers} layers, which do not attend through "
        "Leadline's interface (loo: masked); use --loo exact or another scorer"
    )


def _answer_rows(node: Node, sequences: Sequence[Ids], n_rows: Sequence[int]) -> dict[int, Rows]:
    """Per sequence, the rows of this node that are among the sequence's last ones."""
    found = {}
    for index in node.sequences:
        length = len(sequences[index])
        first, stop = max(node.start, length - n_rows[index]), min(node.stop, length)
        if first < stop:
            found[index] = Rows(first - node.start, stop - node.start)
    return found
