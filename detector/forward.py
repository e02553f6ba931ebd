"""Run the conditions of a record through a causal language model, in one of two ways to the same numbers.

`last_rows`, on a CPU: the tree is walked depth first over one key-value cache. A node's tokens are computed
once, on the cache of the path above it, and the cache is cut back to the branch point before the next child.
Tokens that may not see a span (masked leave-one-out) run on the same cache and leave that span out.

`packed_rows`, on a GPU: the tree, which may hold many records, is one packed sequence (`detector.packed`) and
runs at once.

Only the hidden states of answer rows are kept; the model's own output head never runs.
"""

import importlib.util
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
from detector.packed import EVERYTHING, Pack, Sight
from detector.prefix_tree import Ids, Node, build_tree, hide
from detector.probe import Probe, blocks
from detector.scorers import READABLE

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


@torch.inference_mode()
def packed_rows(
    body: Any, sequences: Sequence[Ids], n_rows: Sequence[int], probes: Sequence[Probe] = ()
) -> tuple[list[Tensor], int]:
    """What `last_rows` returns, by one pass over all sequences at once; padding is not counted.

    There is no order in which sequences are run, so none can be left out for what another one shows. Raises
    ScorerError where a layer would see more than it may.
    """
    device = next(body.parameters()).device
    _check_name(body)
    pack = Pack.of(build_tree(sequences), device)
    sight = Sight(pack)
    places = [pack.places(index, n) for index, n in enumerate(n_rows)]
    paths = [pack.places(probe.sequence) for probe in probes]

    def see(block: int, query: Tensor, key: Tensor, _mask: Tensor | None, scaling: float) -> None:
        for probe, path in zip(probes, paths, strict=True):
            n = n_rows[probe.sequence]
            mask = _near(len(path), n, sight.windows[block], device)
            probe.see(block, query[:, path[len(path) - n :]], key[:, path], mask, scaling)

    more: dict[str, Any] = {"see": see} if any(probe.reads_attention for probe in probes) else {}
    with ExitStack() as stack:
        for probe in probes:
            stack.enter_context(probe.watching())
            probe.enter({index: Rows(0, n) for index, n in enumerate(n_rows)}, places)
        states = body(
            input_ids=pack.tokens[None],
            position_ids=pack.positions[None].long(),
            # Of four dimensions, so that transformers hands it on as it is instead of making one.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            use_cache=False,
            sight=sight,
            **more,
        ).last_hidden_state[0]
    _check_windows(body, sight)
    hidden = states[torch.cat(places)].split(list(n_rows))
    for probe in probes:
        probe.finish(hidden)
    return list(hidden), pack.n_tokens


def can_pack(body: Any) -> bool:
    """Whether `packed_rows` gives the numbers of `last_rows` for a model, whatever the device.

    It must attend through our interface, and no token may be placed by how long a pack is.
    """
    config = body.config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {kind.get("rope_type") for kind in (rope, *rope.values()) if isinstance(kind, dict)}
    known = config._attn_implementation == NAME and config.model_type in READABLE
    return known and not kinds & {"dynamic", "longrope"}


@torch.inference_mode()
def prefers_packs(body: Any) -> bool:
    """Whether to run packs: on a GPU where FlexAttention can be compiled, as a short trial shows."""
    weight = next(body.parameters())
    compiles = _on_cuda(weight) and importlib.util.find_spec("triton") is not None
    if not (compiles and can_pack(body) and weight.dtype != torch.float64):
        return False
    ids = tuple(range(5, 45))
    sequences, n_rows = [ids, ids[:20] + hide(ids[20:], 3, 9), ids[:9] + ids[30:]], [8] * 3
    try:
        packed = torch.cat(packed_rows(body, sequences, n_rows)[0]).float()
    except (RuntimeError, OSError, ValueError):  # no C compiler, a card that is too old, heads too narrow
        return False
    walked = torch.cat(last_rows(body, sequences, n_rows)[0]).float()
    return bool((packed - walked).norm() < 0.1 * walked.norm())  # 16 bits move it by a hundredth


def _on_cuda(weight: Tensor) -> bool:
    return weight.is_cuda


def _near(n_keys: int, n_queries: int, window: int, device: torch.device) -> Tensor | None:
    """(T, S) mask of the last T of S positions in a layer that slides; None where nothing has slid out."""
    if n_keys <= window:
        return None
    key = torch.arange(n_keys, device=device)
    back = key[n_keys - n_queries :, None] - key
    return (back >= 0) & (back < window)


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


def _check_windows(body: Any, sight: Sight) -> None:
    """That every layer ran on our attention, and slid where the configuration says that it does."""
    config = body.config
    slides = bool(getattr(config, "sliding_window", None))
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(blocks(body))
    expected = {layer: slides and kind == "sliding_attention" for layer, kind in enumerate(kinds)}
    found = {layer: window < EVERYTHING for layer, window in sight.windows.items()}
    if found != expected:
        raise ScorerError(
            f"{type(body).__name__}: {len(found.keys() & expected.keys())} of {len(expected)} layers attend "
            "through Leadline's interface, or a layer slides where its configuration says otherwise, so its "
            "records cannot be packed; use another scorer"
        )


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
