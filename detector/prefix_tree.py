"""The conditions of one record as a tree of shared token prefixes.

All conditions start alike, and leave-one-out conditions share everything before the removed piece. A node
holds tokens that are computed once for every sequence below it; the sum over nodes is what `exact` costs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens `start : start + len(tokens)` of every sequence in `sequences` (indices into the input)."""

    start: int
    tokens: Ids
    sequences: tuple[int, ...]
    children: tuple["Node", ...]

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


def build_tree(sequences: Sequence[Ids]) -> Node:
    """Merge `sequences` on equal prefixes. Equal sequences share one leaf; an empty root is allowed.

    >>> tree = build_tree([(1, 2, 3, 9), (1, 2, 9), (1, 3, 9)])
    >>> tree.tokens, tree.n_tokens
    ((1,), 7)
    """
    if not sequences:
        raise ValueError("a tree needs at least one sequence")
    return _node(sequences, tuple(range(len(sequences))), 0)


def _node(sequences: Sequence[Ids], members: tuple[int, ...], start: int) -> Node:
    # What the smallest and the largest share in dictionary order, everything between them shares too.
    low = min(sequences[i] for i in members)
    high = max(sequences[i] for i in members)
    stop = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    branches: dict[int, list[int]] = {}
    for i in members:
        if len(sequences[i]) > stop:
            branches.setdefault(sequences[i][stop], []).append(i)
    children = tuple(_node(sequences, tuple(group), stop) for group in branches.values())
    return Node(start, low[start:stop], members, children)
