"""Run the conditions of a record through a causal language model.

The tree is walked depth first over one key-value cache: a node's tokens are computed once, on the cache of
the path above it, and the cache is cut back to the branch point before the next child. Tokens that may not
see a span (masked leave-one-out) run on the same cache and leave that span out. Only the hidden states of
answer rows are kept; the model's own output head never runs.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from detector.attention import NAME, Hiding, Rows
from detector.errors import ScorerError
from detector.prefix_tree import Ids, Node, build_tree
from detector.probe import Probe, blocks


@torch.inference_mode()
def last_rows(
    body: Any, sequences: Sequence[Ids], n_rows: Sequence[int], probes: Sequence[Probe] = ()
) -> tuple[list[Tensor], int]:
    """Hidden states (n_rows[i], D) at the last `n_rows[i]` positions of each sequence i.

    `body` is the model below its output head (final norm included). Also returns how many tokens were
    computed. To score A answer tokens pass prompt + answer without its last token and A rows: the row at
    a position predicts the token after it, so the first answer token is scored by the last prompt row.
    `probes` watch their sequences on the way, where nothing is hidden. Raises ScorerError where something
    is hidden and a layer of the model would see it all the same.
    """
    tree = build_tree(sequences)
    device = next(body.parameters()).device
    # Without a config every layer keeps all positions. Sliding-window layers then mask instead of
    # forgetting, which is what lets the cache be cut back to any branch point.
    cache = DynamicCache()
    parts: list[list[Tensor]] = [[] for _ in sequences]

    def see(*operands: Any) -> None:
        for probe in probes:
            probe.see(*operands)

    with ExitStack() as stack:
        for probe in probes:
            stack.enter_context(probe.watching())
        for node in tree.walk():
            if not node.tokens:
                continue
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
            for index, found in rows.items():
                parts[index].append(states[found.start : found.stop])
    hidden = [torch.cat(part) for part in parts]
    for probe in probes:
        probe.finish(hidden)
    return hidden, tree.n_tokens


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
