"""Run the conditions of a record through a causal language model (`exact` leave-one-out).

The tree is walked depth first over one key-value cache: a node's tokens are computed once, on the cache of
the path above it, and the cache is cut back to the branch point before the next child. Only the hidden
states of answer rows are kept; the model's own output head never runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from detector.prefix_tree import Ids, Node, build_tree


@torch.inference_mode()
def last_rows(body: Any, sequences: Sequence[Ids], n_rows: int) -> tuple[Tensor, int]:
    """Hidden states (len(sequences), n_rows, D) at the last `n_rows` positions of each sequence.

    `body` is the model below its output head (final norm included). Also returns how many tokens were
    computed. To score A answer tokens pass prompt + answer without its last token and n_rows = A: the row at
    a position predicts the token after it, so the first answer token is scored by the last prompt row.
    """
    tree = build_tree(sequences)
    device = next(body.parameters()).device
    # Without a config every layer keeps all positions. Sliding-window layers then mask instead of
    # forgetting, which is what lets the cache be cut back to any branch point.
    cache = DynamicCache()
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for node in tree.walk():
        if not node.tokens:
            continue
        cache.crop(node.start - cache.get_seq_length())
        tokens = torch.tensor([node.tokens], device=device)
        states = body(input_ids=tokens, cache=cache, use_cache=True).last_hidden_state[0]
        for index in node.sequences:
            rows[index].extend(_overlap(states, node, len(sequences[index]), n_rows))
    return torch.stack([torch.cat(parts) for parts in rows]), tree.n_tokens


def _overlap(states: Tensor, node: Node, length: int, n_rows: int) -> list[Tensor]:
    """The rows of this node that are among the last `n_rows` of a sequence of `length` tokens."""
    first, stop = max(node.start, length - n_rows), min(node.stop, length)
    return [states[first - node.start : stop - node.start]] if first < stop else []
