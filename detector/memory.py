"""Memory: what a loaded scorer takes, and how much more the reading of one record takes at its peak.

Arithmetic on a scorer's config.json and on token counts, so that a plan can say it before any weight is read.
The rules are those of `forward`, `attention`, `passes` and `vocabulary`; each term says whose. On a CPU the
resident set is what is predicted, beside Python and its libraries, within 20 % of what is measured
(`tests/figures/predicted_memory.py`). On a GPU the terms are the same, without the dense attention mask that
transformers makes there.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detector import attention
from detector.errors import ScorerError
from detector.forward import PART_TOKENS
from detector.packed import LEAST_PACK_TOKENS, PACK_TOKENS
from detector.probe import Keep
from detector.prompts import Reading
from detector.vocabulary import BLOCK_BYTES, LIVE_TENSORS, tile_shape

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_LIBRARY_BYTES = 9 << 20
"""What MKL keeps for packing once it has met matrices of this size (MKL 2024.2, one thread)."""

_HEAP_BLOCK_BYTES = 32 << 20
"""glibc gives blocks of this size back at once. What was freed in smaller ones stays resident, for reuse."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the memory of a reading depends on, of a dense decoder."""

    layers: int
    heads: int
    kv_heads: int
    head_width: int
    width: int
    intermediate: int
    vocabulary: int
    item_bytes: int
    """Of one number in the dtype that it computes in."""

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: str) -> "Sizes":
        """Read it off config.json. Raises ScorerError where that does not tell."""
        text = config.get("text_config", config)
        try:
            heads, width = text["num_attention_heads"], text["hidden_size"]
            return cls(
                layers=text["num_hidden_layers"],
                heads=heads,
                kv_heads=text.get("num_key_value_heads") or heads,
                head_width=text.get("head_dim") or width // heads,
                width=width,
                intermediate=text["intermediate_size"],
                vocabulary=text["vocab_size"],
                item_bytes=_ITEM_BYTES[dtype],
            )
        except KeyError as error:
            raise ScorerError(
                f"memory of a {config.get('model_type')} model in {dtype}: its config.json names no "
                f"{error.args[0]}, so it cannot be told before it is tried"
            ) from None


@dataclass(frozen=True, slots=True)
class Extent:
    """How much one reading of a record holds: the largest of its windows, and of its answer's segments."""

    prompt_tokens: int
    """Of the condition with all passages, the answer left out."""
    context_tokens: int
    """Of these, the passages'."""
    answer_tokens: int
    """That are read at once."""
    pieces: int
    """K: how many are left out in turn."""
    windows: int = 1

    @classmethod
    def of(cls, reading: Reading) -> "Extent":
        """The extent of a record as `prompts.read_record` lays it out."""
        largest = max(reading.windows, key=lambda window: len(window.full))
        start, stop = largest.layout.passages
        return cls(
            prompt_tokens=len(largest.full),
            context_tokens=stop - start,
            answer_tokens=max(segment.stop - segment.tail for segment in reading.segments),
            pieces=max(len(window.piece_indices) for window in reading.windows),
            windows=len(reading.windows),
        )

    def filled(self, window_tokens: int) -> "Extent":
        """The same, but for passages that take all that the rest leaves of a window."""
        more = window_tokens - self.prompt_tokens - self.answer_tokens
        prompt, context = self.prompt_tokens + more, self.context_tokens + more
        return replace(self, prompt_tokens=prompt, context_tokens=context)


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes over the loaded model while one record is read. The terms are not all there at the same time."""

    cache: int
    """Keys and values of every layer for the longest path, in one block (`forward`)."""
    activations: int
    """Of the widest node, or of its largest part (`forward`), while one layer runs: two inner arrays of the
    MLP and their product beside three of the model's width (embeddings, residual, the norm's output); or five
    of the queries' width, for them and what attention makes of them, in place of the inner ones where that is
    more.
    """
    attention: int
    """The same for the node of the answer while its attention is read, three tiles of weights (`attention`)
    and the layer's keys in float32 where they are not; 0 where none is read.
    """
    rows: int
    """States of the answer's tokens under every condition, as the walk leaves them. `passes` needs them once
    more, side by side.
    """
    kept: int
    """What is kept of attention and of states for the Trace, and the copy in which their parts are joined."""
    vocabulary: int
    """A tile of logits (`vocabulary.tile_shape`), and on a CPU the head's weights in float32 where they are
    not.
    """
    summed: int
    """What stands beside the tile, or in its place, where it is summed up."""
    holes: int
    """What lies idle between activations in the heap of a CPU (measured). The hole of an array is soon a few
    bytes short for the next one of its size, so one more of each kind is there than is in use. In `exact`,
    where every node has another length, all of that is there twice.
    """
    retained: int
    """Activations and holes, which a CPU's allocator keeps. In their place `summed` is made later."""
    libraries: int
    """What the matrix library keeps for itself."""

    @property
    def n_bytes(self) -> int:
        """The most at one time: while a layer runs, or while the vocabulary is reduced."""
        layer = self.cache + max(self.activations, self.attention) + self.holes + self.rows
        reduction = self.vocabulary + max(self.summed, self.retained) + 2 * self.rows
        return self.libraries + self.kept + max(layer, reduction)


def predict_peak(
    sizes: Sizes, extent: Extent, keep: Keep, *, block_bytes: int = BLOCK_BYTES, cuda: bool = False
) -> Peak:
    """Predict the peak of reading one record for `keep`, leave-one-out mode (exact, masked, off) included.

    Passages are taken to be of one length. `block_bytes` bounds the tile (`vocabulary.Tile`).
    """
    item, accumulator = sizes.item_bytes, max(sizes.item_bytes, 4)
    n_path = extent.prompt_tokens + extent.answer_tokens
    n_rows = extent.answer_tokens + keep.own_rows
    n_conditions = 2 + (extent.pieces if keep.leave_one_out else 0)
    n_widest, n_last = _node_tokens(extent, keep)
    if not cuda:
        n_widest, n_last = min(n_widest, PART_TOKENS), min(n_last, PART_TOKENS)

    layer_keys = sizes.kv_heads * sizes.head_width * n_path
    cache = 2 * sizes.layers * layer_keys * item

    attending = 3 * sizes.width + 5 * sizes.heads * sizes.head_width
    activations = n_widest * max(attending, 3 * sizes.width + 3 * sizes.intermediate) * item
    heap = not cuda and n_widest * sizes.intermediate * item < _HEAP_BLOCK_BYTES
    holes = _hole_bytes(activations, extent, keep) if heap else 0
    reading = 0
    if keep.shares or keep.carried:
        keys = 0 if item == accumulator else layer_keys * accumulator
        reading = n_last * attending * item + 3 * attention._TILE_BYTES + keys
    kept = n_rows * (
        2 * sizes.layers * sizes.heads * keep.attention * accumulator  # shares on passages and on the answer
        + 2 * len(keep.layers) * sizes.width * item  # states with all passages and with none
    )
    rows, columns, kept_logits = tile_shape(
        n_conditions, extent.answer_tokens, sizes.vocabulary, accumulator, block_bytes, cuda=cuda
    )
    per_column = n_conditions * rows * accumulator
    tile = per_column * sizes.vocabulary if kept_logits else 0
    weights = 0 if cuda or item == accumulator else sizes.vocabulary * sizes.width * accumulator
    return Peak(
        cache=cache,
        activations=activations,
        attention=reading,
        rows=(n_conditions + keep.foil) * n_rows * sizes.width * item,
        kept=2 * kept * extent.windows,
        vocabulary=tile + weights,
        summed=LIVE_TENSORS * per_column * min(columns, sizes.vocabulary),
        holes=holes,
        retained=activations + holes if heap else 0,
        libraries=0 if cuda else _LIBRARY_BYTES,
    )


def pack_bytes(sizes: Sizes, n_tokens: int) -> int:
    """Predict the peak of a pack of so many tokens over the loaded model, on a GPU. Not measured on one yet.

    Activations of its widest layer and states of all tokens twice over (`passes`); a tile of the vocabulary
    is reduced when the activations are gone, and is smaller.
    """
    attending = 3 * sizes.width + 5 * sizes.heads * sizes.head_width
    widest = max(attending, 3 * sizes.width + 3 * sizes.intermediate)
    return n_tokens * (widest + 2 * sizes.width) * sizes.item_bytes


def most_pack_tokens(sizes: Sizes, free_bytes: int) -> int:
    """How many tokens of a pack half of that memory holds: a power of two, so that cards of one kind, free to
    a few per cent more or less, make the same packs and with them the same numbers.

    >>> narrow = Sizes(30, 9, 3, 64, 576, 1536, 49152, 2)
    >>> [most_pack_tokens(narrow, gib << 30) for gib in (0, 1, 2, 8)]
    [4096, 32768, 65536, 131072]
    """
    room = max(1, free_bytes // 2 // pack_bytes(sizes, 1))
    return min(PACK_TOKENS, max(LEAST_PACK_TOKENS, 1 << (room.bit_length() - 1)))


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a scorer's weights in `dtype`: what the headers of its safetensors files count.

    Raises ScorerError where there are none, or where one is not what it says it is.
    """
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ScorerError(
            f"scorer {folder.name}: no weights as safetensors in its folder, so no size of them"
        )
    return sum(_count_numbers(file) for file in files) * _ITEM_BYTES[dtype]


def _node_tokens(extent: Extent, keep: Keep) -> tuple[int, int]:
    """Tokens of the widest node of a record's tree, and of the one that ends the condition with all passages.

    The text before the passages, a node of its own, counts as text after them: the two are not told apart.
    """
    context = extent.context_tokens
    after = extent.prompt_tokens - context + extent.answer_tokens
    if not keep.leave_one_out:
        return context + after, context + after
    if keep.masked:
        return max(context, after), after
    first = context // extent.pieces  # all that follows the first passage is read again without it
    return max(first, context - first) + after, first + after


def _hole_bytes(activations: int, extent: Extent, keep: Keep) -> int:
    lengths_differ = keep.leave_one_out and not keep.masked and extent.pieces > 1
    resident = activations * 4 // 3
    return resident * (1 + lengths_differ) - activations


def _count_numbers(file: Path) -> int:
    """Numbers in a safetensors file: eight bytes say how long its header is, which is JSON."""
    try:
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        return sum(math.prod(tensor["shape"]) for tensor in header.values())
    except (OSError, OverflowError, MemoryError, ValueError, AttributeError, KeyError, TypeError) as error:
        what = type(error).__name__
        raise ScorerError(f"{file}: not a safetensors file ({what}); fetch it again") from None
