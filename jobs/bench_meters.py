"""What is measured, and with what: rounds on a clock, shares of time, a matrix-product rate, peak memory.

`detector/` has no clock. Where its time goes is found out from outside: hooks on the body, and stand-ins for
the attention function, the vocabulary step and the head's product while one run is watched. A watched run is
never one of the timed ones.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from detector import passes
from detector.record import Passage, Record
from detector.scorer import Scorer
from detector.vocabulary import Head
from jobs.bench_peers import Read, ScorerSpec, reader
from jobs.errors import JobError

PARTS = ("body", "attention", "head", "reductions", "else")

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
FIRST_USE = Record("Who built it?", ["Ada built it in 1891.", "It was painted."], "It was built by Ada.")
"""Read once before anything is measured, so that first-use allocations count for nobody."""


def wait(device: torch.device) -> None:
    """Return when the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_rounds(
    tasks: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    """Seconds of each task in each round. The tasks take turns, so that a drift of the machine hits all."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for index in range(repeats):
        for name, task in tasks.items():
            say(f"round {index + 1} of {repeats}: {name}")
            wait(device)
            started = time.perf_counter()
            task()
            wait(device)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations per second of a square matrix product, the best of five."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=dtype)  # a GPU draws less power for constants
    b = torch.randn_like(a)
    spent = time_rounds({"product": lambda: a @ b}, 6, device, lambda _: None)["product"]
    return 2 * size**3 / min(spent[1:])  # the first one warms up


def shares_of_time(scorer: Scorer, task: Callable[[], object]) -> dict[str, float]:
    """Shares of `task`'s time, adding up to one, in the parts that `PARTS` names."""
    with _watched(scorer) as spent:
        total = time_rounds({"all": task}, 1, scorer.model.device, lambda _: None)["all"][0]
    parts = {
        "body": spent["body"] - spent["attention"],
        "attention": spent["attention"],
        "head": spent["head"],
        "reductions": spent["vocabulary"] - spent["head"],
        "else": total - spent["body"] - spent["vocabulary"],
    }
    return {name: seconds / total for name, seconds in parts.items()}


@contextmanager
def _watched(scorer: Scorer) -> Iterator[dict[str, float]]:
    """Seconds inside the body, the attention function, the vocabulary step and the head, while it lasts."""
    device = scorer.model.device
    spent = dict.fromkeys(("body", "attention", "head", "vocabulary"), 0.0)

    def tick(name: str, sign: int) -> None:
        wait(device)
        spent[name] += sign * time.perf_counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            tick(name, -1)
            try:
                return function(*args, **kwargs)
            finally:
                tick(name, 1)

        return run

    implementation = scorer.model.config._attn_implementation
    attention = AttentionInterface().get(implementation)
    step, product, kernel_for = passes.reduce_vocabulary, Head.logits, passes.kernel_for

    def timed_kernel(*args: Any) -> Any:
        kernel = kernel_for(*args)
        return kernel and timed("vocabulary", kernel)  # its own product with the head is part of it

    body = scorer.model.base_model
    hooks = [
        body.register_forward_pre_hook(lambda *_: tick("body", -1)),
        body.register_forward_hook(lambda *_: tick("body", 1)),
    ]
    try:
        if attention is not None:  # `eager` is not in the table: its time counts as the body's
            AttentionInterface.register(implementation, timed("attention", attention))
        passes.reduce_vocabulary, passes.kernel_for = timed("vocabulary", step), timed_kernel
        Head.logits = timed("head", product)  # type: ignore[method-assign]
        yield spent
    finally:
        for hook in hooks:
            hook.remove()
        if attention is not None:
            AttentionInterface.register(implementation, attention)
        passes.reduce_vocabulary, passes.kernel_for = step, kernel_for
        Head.logits = product  # type: ignore[method-assign]


def extra_peak_bytes(
    name: str, spec: ScorerSpec, read: Read, record: Record, device: torch.device
) -> int | None:
    """The most memory that reading `record` takes beyond the loaded model, in a fresh process of its own.

    On a GPU torch counts exactly and nothing else is counted, so `read` is run in this process. None where
    the system cannot set back its high-water mark (Linux can). Raises JobError where the process fails.
    """
    if device.type == "cuda":
        return _peak_here(read, record, device)
    asked = {"name": name, "spec": asdict(spec), "record": _as_dict(record)}
    done = subprocess.run(
        [sys.executable, "-m", "jobs.bench_meters"], input=json.dumps(asked), capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}: out of memory?"])[-1]
        raise JobError(f"bench: the process that measures the memory of {name} failed: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    return None if found is None else int(found)


def _peak_here(read: Read, record: Record, device: torch.device) -> int | None:
    read(FIRST_USE)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        read(record)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with suppress(OSError, AttributeError):  # what loading has freed goes back to the system, where it can
        ctypes.CDLL(None).malloc_trim(0)
    try:
        before = _resident_bytes("VmRSS")
        _CLEAR.write_text("5")  # the high-water mark becomes what is resident now
    except OSError:
        return None
    read(record)
    return max(0, _resident_bytes("VmHWM") - before)


def _resident_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _as_dict(record: Record) -> dict[str, Any]:
    texts = [passage.text for passage in record.passages]
    return {
        "question": record.question,
        "passages": texts,
        "answer": record.answer,
        "undivided": record.undivided,
        "language": record.language,
    }


def machine() -> dict[str, Any]:
    """The processor, its cores, torch's threads, and the GPU where there is one."""
    lines: Sequence[str] = ()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "unknown",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _child() -> None:
    asked = json.load(sys.stdin)
    texts = asked["record"].pop("passages")
    record = Record(passages=tuple(Passage(text) for text in texts), **asked["record"])
    print(
        json.dumps(
            _peak_here(reader(asked["name"], ScorerSpec(**asked["spec"])), record, torch.device("cpu"))
        )
    )


if __name__ == "__main__":
    _child()
