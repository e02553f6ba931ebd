"""What a worker needs for records like those of a sample: memory, and windows where contexts are long.

Computed from the scorer's files on this machine with its tokenizer. Loads no weights, fetches nothing.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from detector.errors import DetectorError, RecordRejected, ScorerError
from detector.identity import ScorerInfo, fingerprint, locate, no_model, place
from detector.record import Record
from detector.scorers import EMBEDDED
from detector.weights import default_cache, embedded_folder
from jobs.bench_shapes import floor
from jobs.bundles import find_bundle
from jobs.config import Config
from jobs.errors import JobError
from jobs.storage import Storage

if TYPE_CHECKING:
    from detector.memory import Extent
    from detector.probe import Keep
    from detector.prompts import Reading

_EVERYTHING = 1 << 30  # a window that holds any record


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory of one worker and the cost of windows.

    Bytes are predictions (`detector.memory`), beside Python and its libraries. Computed tokens are those of
    `bench_shapes.floor`.
    """

    n_records: int
    """Of the sample, that this scorer reads. What follows is about them."""
    model_bytes: int
    longest_bytes: int
    """Over the loaded model, at the peak of the record that takes most."""
    longest_tokens: int
    """Of that record: the longest prompt, and the answer."""
    window_bytes: int
    """The same for a record that fills the window, with as many passages and as long an answer."""
    window_tokens: int
    n_workers: int | None
    """On this machine; None where a cluster decides."""
    n_windowed: int
    """Records that need more than one window."""
    most_windows: int
    windowed_tokens: int
    """Computed for the records that need more than one."""
    unwindowed_tokens: int
    """What they would take with one window of their size each."""
    device: str
    """Of a worker, as far as this machine can tell: `cuda` or `cpu`."""
    loo: str
    """`exact`, `masked` or `off`: what the settings come to."""
    tokens_per_record: tuple[int, ...]
    """Computed for each record of the sample, in order; 0 for one that this scorer does not read."""
    pack_bytes: int | None = None
    """Where workers have a GPU: over the loaded model, for the largest pack; None where none is run."""

    def to_lines(self) -> list[str]:
        """For a person on a terminal."""
        memory = (
            f"memory: model {_megabytes(self.model_bytes)} + up to {_megabytes(self.longest_bytes)} per "
            f"worker for the longest record of the sample ({self.longest_tokens:,} tokens), up to "
            f"{_megabytes(self.window_bytes)} for one that fills the window ({self.window_tokens:,} tokens)"
        )
        if self.n_workers is not None:
            total = self.n_workers * (self.model_bytes + max(self.longest_bytes, self.window_bytes))
            memory += f"; {self.n_workers:,} worker{'s'[: self.n_workers > 1]}: {_megabytes(total)}"
        if self.pack_bytes is not None:
            memory += (
                f"; on a GPU records run in packs of up to {_megabytes(self.pack_bytes)}, or of half "
                "of the memory that is free, where that is less"
            )
        windows = f"windows: every record that can be read fits one of {self.window_tokens:,} tokens"
        if self.n_windowed:
            windows = (
                f"windows: {self.n_windowed:,} of {self.n_records:,} records need more than one (up to "
                f"{self.most_windows:,}); they take {self.windowed_tokens:,} computed tokens, "
                f"{self.windowed_tokens / self.unwindowed_tokens:.2f} times those of one window of their size"
            )
        return [f"{memory}, beside Python and its libraries", windows]


def find_needs(records: Sequence[Record], config: Config, storage: Storage) -> Needs | str:
    """Read the records' tokens as the scorer would; in one line why not, where that cannot be done."""
    try:
        return _find(records, config, storage)
    except (DetectorError, JobError) as error:
        return str(error)


def audit_keep(config: Config, scorer: ScorerInfo, storage: Storage) -> "Keep":
    """What an audit with these settings keeps of the passes (`Scorer.measure`). Raises as `find_bundle`."""
    return _settle(config, scorer, storage)[1]


def _settle(config: Config, scorer: ScorerInfo, storage: Storage) -> tuple[str, "Keep"]:
    """Which leave-one-out mode the settings come to, and what is kept."""
    from detector.probe import audit_keep as keep_of

    bundle = find_bundle(config, asdict(scorer), storage)
    keep = None if bundle is None else bundle.card.keep
    loo = config.resolved(
        None if bundle is None else bundle.digest,
        reads_attention=scorer.reads_attention,
        exact=keep is not None and keep.leave_one_out,
    ).loo
    return loo, keep_of(
        keep,
        leave_one_out=loo != "off",
        masked=loo == "masked",
        least_share=config.least_share,
        reads_attention=scorer.reads_attention,
    )


def scorer_folder(config: Config) -> Path:
    """Where the scorer's files lie on this machine. Raises ScorerError where they do not; fetches nothing."""
    name, cache = config.scorer.name, config.scorer.cache_dir
    folder = Path(name).expanduser()
    if name == EMBEDDED:
        folder = embedded_folder(Path(cache).expanduser() if cache else default_cache())
    elif folder.is_file():
        raise ScorerError(f"scorer {name}: a GGUF file, which its first audit makes readable")
    elif not folder.is_dir():
        from transformers.utils import cached_file

        source = str(locate(name, cache))
        with suppress(OSError):
            folder = Path(cached_file(source, "config.json", local_files_only=True)).parent
    if not folder.is_dir():
        raise ScorerError(f"scorer {name}: not on this machine yet; its first audit fetches it")
    return folder


def _find(records: Sequence[Record], config: Config, storage: Storage) -> Needs | str:
    folder = scorer_folder(config)
    scorer = fingerprint(**config.scorer.model_dump())
    device, dtype = place(config.scorer.device, config.scorer.dtype)
    loo, keep = _settle(config, scorer, storage)
    # From here on torch and transformers are imported, which takes seconds.
    from detector.memory import Extent, Sizes, pack_bytes, predict_peak, weight_bytes
    from detector.packed import PACK_TOKENS

    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes, model_bytes = Sizes.of(tree, dtype), weight_bytes(folder, dtype)

    def peak(extent: "Extent") -> int:
        return predict_peak(sizes, extent, keep, cuda=device == "cuda").n_bytes

    found = _read_windows(records, folder, config, scorer.window_tokens)
    windows = [pair for pair in found if pair is not None]
    readings = [reading for reading, _ in windows]
    if not readings:
        return "none of the sample's records can be read by this scorer"
    longest = max(map(Extent.of, readings), key=peak)
    windowed = [(reading, whole) for reading, whole in windows if len(reading.windows) > 1]
    worker_device = _worker_device(config, device)
    return Needs(
        n_records=len(readings),
        model_bytes=model_bytes,
        longest_bytes=peak(longest),
        longest_tokens=longest.prompt_tokens + longest.answer_tokens,
        window_bytes=peak(longest.filled(scorer.window_tokens)),
        window_tokens=scorer.window_tokens,
        n_workers=_count_workers(config, device),
        n_windowed=len(windowed),
        most_windows=max(len(reading.windows) for reading in readings),
        windowed_tokens=sum(floor(reading, loo).tokens for reading, _ in windowed),
        unwindowed_tokens=sum(floor(whole, loo).tokens for _, whole in windowed),
        device=worker_device,
        loo=loo,
        tokens_per_record=tuple(0 if pair is None else floor(pair[0], loo).tokens for pair in found),
        pack_bytes=pack_bytes(sizes, PACK_TOKENS) if worker_device == "cuda" else None,
    )


def _read_windows(
    records: Sequence[Record], folder: Path, config: Config, window_tokens: int
) -> list[tuple["Reading", "Reading"] | None]:
    """Each record in its windows, and in one that holds all of it; None for one that cannot be read."""
    from transformers import AutoTokenizer

    from detector.prompts import PROFILES, read_record

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ScorerError(no_model(config.scorer.name, error)) from None
    found: list[tuple[Reading, Reading] | None] = []
    for record in records:
        found.append(None)
        with suppress(RecordRejected):
            reading = read_record(record, tokenizer, PROFILES[config.profile], window_tokens)
            whole = reading
            if len(reading.windows) > 1:
                whole = read_record(record, tokenizer, PROFILES[config.profile], _EVERYTHING)
            found[-1] = reading, whole
    return found


def _worker_device(config: Config, device: str) -> str:
    """`cuda` too where workers are asked to have a GPU and this machine has none: the cluster's do."""
    if config.workers.device == "auto":
        return device
    return "cuda" if config.workers.device == "gpu" else "cpu"


def _count_workers(config: Config, device: str) -> int | None:
    """As `dispatch` counts them on this machine; None where a cluster has other machines."""
    workers = config.workers
    if workers.count or workers.address:
        return workers.count
    if device == "cuda" and workers.device != "cpu":
        import torch

        return torch.cuda.device_count()
    return max(1, (os.cpu_count() or 1) // workers.cpus_per_worker)


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"
