"""Slow, obvious references that the fast code is compared with."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def separate_passes(
    model: Any, prompts: Sequence[Sequence[int]], answer_ids: Sequence[int], dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """One full forward pass per condition, whole logits, no cache; then the textbook formulas.

    Returns log-probabilities (C, A) and the JSD (C - 1, A) of each later condition from the first.
    """
    answer = torch.tensor(answer_ids)
    logps = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([[*prompt, *answer_ids]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].to(dtype)
            logps.append(torch.log_softmax(logits, dim=-1))
    realised = torch.stack([logp[torch.arange(len(answer)), answer] for logp in logps])
    divergences = [jensen_shannon(logps[0], other) for other in logps[1:]]
    return realised.numpy(), torch.stack(divergences).numpy()


def jensen_shannon(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """(KL(P|M) + KL(Q|M)) / 2 over the last axis, in float64, 0 log 0 = 0."""
    p, q = logp.double().exp(), logq.double().exp()
    mixture = (p + q) / 2
    kl_p = torch.where(p > 0, p * (p.log() - mixture.log()), 0.0).sum(-1)
    kl_q = torch.where(q > 0, q * (q.log() - mixture.log()), 0.0).sum(-1)
    return ((kl_p + kl_q) / 2).to(logp.dtype)
