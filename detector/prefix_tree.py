"""The conditions of one record as a tree of shared token prefixes.

All conditions start alike, and leave-one-out conditions share everything before the removed piece. A node
holds tokens that are computed once for every sequence below it; the sum over nodes is what a record costs.

Where a piece is hidden instead of removed, a token carries the span that its row may not see (`hide`). It is
then another token than the same one with everything in sight, and the tree needs to know nothing more.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import ne

Ids = tuple[int, ...]
"""Token ids, each below 2^32, or with the span that is hidden from its row above them (`hide`)."""

_BITS = 32
_LOW = (1 << _BITS) - 1


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens `start : start + len(tokens)` of every sequence in `sequences` (indices into the input)."""

    start: int
    tokens: Ids
    sequences: tuple[int, ...]
    children: tuple["Node", ...]
    hidden: tuple[int, int] | None = None
    """Positions `start:stop` that none of these tokens may see. They come before the node."""

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    def walk(self) -> Iterator["Node"]:
        """This node, then everything below it, depth first: a parent always comes before its children."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def n_tokens(self) -> int:
        """Tokens that go through the model when each node is computed once."""
        return sum(len(node.tokens) for node in self.walk())


def hide(ids: Ids, start: int, stop: int) -> Ids:
    """The same tokens, with positions `start:stop` of their sequence hidden from their rows.

    The span must come before the tokens: what was computed earlier can be left out, not undone.
    """
    code = (start << _BITS) + (stop << 2 * _BITS) if start < stop else 0
    return tuple(token + code for token in ids)


def build_tree(sequences: Sequence[Ids]) -> Node:
    """Merge `sequences` on equal prefixes. Equal sequences share one leaf; an empty root is allowed.

    Raises ValueError for a hidden span that does not come before the tokens it is hidden from.

    >>> tree = build_tree([(1, 2, 3, 9), (1, 2, 9), (1, 3, 9)])
    >>> tree.tokens, tree.n_tokens
    ((1,), 7)
    """
    if not sequences:
        raise ValueError("a tree needs at least one sequence")
    return _node(sequences, tuple(range(len(sequences))), 0)


class Forest:
    """How many tokens a tree of these sequences would hold, without making it; sequences may be added."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self._sorted: list[Ids] = []

    def add(self, sequences: Sequence[Ids]) -> int:
        """Add sequences, and return how many tokens more the tree holds with them."""
        before = self.n_tokens
        for ids in sequences:
            # Nothing in the tree shares more with a sequence than its neighbours in dictionary order do.
            at = bisect_left(self._sorted, ids)
            self.n_tokens += len(ids) - max(
                (_n_shared(ids, other) for other in self._sorted[max(0, at - 1) : at + 1]), default=0
            )
            self._sorted.insert(at, ids)
        return self.n_tokens - before


def _n_shared(one: Ids, other: Ids) -> int:
    """How many tokens two sequences have in common from the start."""
    differ = map(ne, one, other)
    return next((at for at, differs in enumerate(differ) if differs), min(len(one), len(other)))


def _node(sequences: Sequence[Ids], members: tuple[int, ...], start: int) -> Node:
    # What the smallest and the largest share in dictionary order, everything between them shares too.
    low = min(sequences[i] for i in members)
    high = max(sequences[i] for i in members)
    stop = _n_shared(low, high)
    code = low[start] >> _BITS if start < stop else 0
    stop = next((at for at in range(start, stop) if low[at] >> _BITS != code), stop)
    hidden = (code & _LOW, code >> _BITS) if code else None
    if hidden is not None and hidden[1] > start:
        raise ValueError(f"positions {hidden} cannot be hidden from position {start}")
    branches: dict[int, list[int]] = {}
    for i in members:
        if len(sequences[i]) > stop:
            branches.setdefault(sequences[i][stop], []).append(i)
    children = tuple(_node(sequences, tuple(group), stop) for group in branches.values())
    tokens = tuple(symbol & _LOW for symbol in low[start:stop])
    return Node(start, tokens, members, children, hidden)
