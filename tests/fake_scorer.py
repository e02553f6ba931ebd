"""A scorer without a model, for tests of everything around it: instant, deterministic, dies on request.

Ray workers import this module by name. What a test wants from them lies in a folder that is named as the
scorer, because the scorer's name is what reaches every worker.
"""

import json
import os
import signal
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detector.aggregate import Features, Measurement, SentenceMeasurement
from detector.bundle import Bundle, Verdict
from detector.errors import RecordRejected, RejectReason, ScorerError
from detector.noise import NoiseFloor
from detector.record import Record
from detector.trace import Piece
from jobs.config import Config
from jobs.storage import Storage

FINGERPRINT = "feedc0ffee00"


def identify(config: Config) -> dict[str, Any]:
    """What `jobs.audit.identify_scorer` says about the real one."""
    known = {"fingerprint": FINGERPRINT, "window_tokens": 2048, "dtype": "float32", "reads_attention": True}
    return {"name": config.scorer.name} | known


def load(config: Config) -> "FakeScorer":
    """What `jobs.worker.load_scorer` does for the real one."""
    order = Path(config.scorer.name) / "order.json"
    if order.is_file():
        _arm(order, **json.loads(order.read_text()))
    place = config.bundle_place
    bundle = None if place in ("auto", "none") else Bundle.load(place)
    return FakeScorer(config.scorer.name, bundle=bundle)


def load_slow(config: Config) -> "FakeScorer":
    """A scorer that takes a moment per record."""
    return FakeScorer(config.scorer.name, seconds=0.2)


def load_counting(config: Config) -> "FakeScorer":
    """A scorer that takes a moment per record and notes each in the file `measured` of its folder."""

    class Counting(FakeScorer):
        def measure(self, record: Record, **how: Any) -> Measurement:
            with (Path(self.name) / "measured").open("ab", buffering=0) as file:
                file.write(f"{record.question}\n".encode())
            return super().measure(record, **how)

    return Counting(config.scorer.name, seconds=0.1)


def load_noisy(config: Config) -> "FakeScorer":
    """One whose numbers move by a nat when nothing but the shape of a computation does."""
    return FakeScorer(config.scorer.name, noise_nats=1.0)


def load_or_die(config: Config) -> "FakeScorer":
    """A scorer that no machine here can hold."""
    raise ScorerError("scorer fake: too large for this machine")


def load_halves(config: Config) -> "FakeScorer":
    """A scorer on another kind of machine."""
    return FakeScorer(config.scorer.name, dtype="bfloat16")


def order_fault(folder: Path, kind: str, event: str, out: Path, n_markers: int = 0) -> None:
    """Let one worker fail once: at the first `event` with so many markers in `out`.

    Kinds: "kill" (`kill -9` of its own process), "error" (the storage raises). Events: "measure", "part"
    (right after one was written), "marker" (likewise).
    """
    order = {"kind": kind, "event": event, "out": str(out), "n_markers": n_markers}
    (folder / "order.json").write_text(json.dumps(order))


def withdraw_fault(folder: Path) -> bool:
    """Let no further worker fail; whether one did."""
    (folder / "order.json").unlink()
    done = (folder / "done").exists()
    (folder / "done").unlink(missing_ok=True)
    return done


def _arm(order: Path, kind: str, event: str, out: str, n_markers: int) -> None:
    def happens(what: str) -> None:
        if what == event and len(list(Path(out, "units").glob("[!.]*.json"))) >= n_markers:
            try:
                order.with_name("done").touch(exist_ok=False)
            except FileExistsError:
                return
            if kind == "error":
                raise OSError("503 SlowDown")
            os.kill(os.getpid(), signal.SIGKILL)

    measure, write, create = FakeScorer.measure, Storage.write, Storage.create

    def measure_or_fail(self: FakeScorer, *arguments: Any, **options: Any) -> Measurement:
        happens("measure")
        return measure(self, *arguments, **options)

    def write_or_fail(self: Storage, url: str, data: bytes) -> None:
        write(self, url, data)
        happens("part")

    def create_or_fail(self: Storage, url: str, data: bytes) -> bool:
        created = create(self, url, data)
        happens("marker")
        return created

    # Only in this worker's process, which no other test uses.
    FakeScorer.measure, Storage.write, Storage.create = measure_or_fail, write_or_fail, create_or_fail


@dataclass
class FakeScorer:
    """One token per word, one sentence per full stop; numbers from a checksum of the text."""

    name: str = "fake"
    fingerprint: str = FINGERPRINT
    window_tokens: int = 2048
    dtype: str = "float32"
    seconds: float = 0.0
    noise_nats: float = 1e-6
    bundle: Bundle | None = None
    packed: bool = False

    def noise_floor(self) -> NoiseFloor:
        return NoiseFloor(self.noise_nats, self.noise_nats)

    def measure_many(self, records: list[Record], **how: Any) -> list[Measurement | RecordRejected]:
        """Each by `measure`; whatever that raises but RecordRejected fails all of them."""
        found: list[Measurement | RecordRejected] = []
        for record in records:
            try:
                found.append(self.measure(record, **how))
            except RecordRejected as rejected:
                found.append(rejected)
        return found

    def measure(
        self,
        record: Record,
        *,
        leave_one_out: bool = True,
        masked: bool = False,
        least_share: float = 0.0,
        min_answer_tokens: int = 1,
    ) -> Measurement:
        if self.seconds:
            time.sleep(self.seconds)
        n_tokens = len(record.answer.split())
        if n_tokens < min_answer_tokens:
            raise RecordRejected(RejectReason.ANSWER_TOO_SHORT, f"{n_tokens} tokens")
        if "raise here" in record.answer:
            raise ValueError(f"cannot measure {record.answer!r}")
        if "die here" in record.answer:
            os.kill(os.getpid(), signal.SIGKILL)
        sentences, start = [], 0
        for text in record.answer.split(". "):
            end = start + len(text)
            features = _features(text, record, leave_one_out)
            sentences.append(
                SentenceMeasurement(
                    index=len(sentences),
                    start=start,
                    end=end,
                    n_tokens=max(1, len(text.split())),
                    n_windows=1,
                    truncated=False,
                    features=features,
                    evidence=_evidence(record, features),
                    verdict=_verdict(text) if self.bundle else None,
                )
            )
            start = end + 2
        n_context = sum(len(passage.text.split()) for passage in record.passages)
        return Measurement(
            sentences=tuple(sentences),
            features=_features(record.answer, record, leave_one_out),
            n_passages=len(record.passages),
            n_context_tokens=n_context,
            n_answer_tokens=n_tokens,
            n_computed_tokens=n_tokens + n_context,
            n_windows=1,
            truncated=False,
            ensemble=max(s.verdict.probability for s in sentences) if self.bundle else None,
        )


def _verdict(text: str) -> Verdict:
    states, attention, likelihood = (_number(text + group, 4.0) - 2.0 for group in ("h", "a", "l"))
    return Verdict(_number(text + "v", 1.0), states, attention, likelihood)


def _features(text: str, record: Record, leave_one_out: bool) -> Features:
    drops = tuple(_number(text + p.text, 2.0) for p in record.passages) if leave_one_out else ()
    jsds = tuple(_number(p.text + text, 0.6) for p in record.passages) if leave_one_out else ()
    return Features(
        gap=_number(text, 3.0) - 1.0,
        jsd_none=_number(text + "j", 0.6),
        max_drop=max(drops, default=None),
        max_jsd=max(jsds, default=None),
        surprisal=_number(text + "s", 5.0),
        entropy=_number(text + "e", 5.0),
        absent_pairs=_number(text + "p", 1.0),
        attention_share=_number(text + "t", 1.0),
        drops=drops,
        jsds=jsds,
    )


def _evidence(record: Record, features: Features) -> Piece | None:
    if not features.drops:
        return None
    index = max(range(len(features.drops)), key=lambda k: features.drops[k])
    return Piece(index, 0, len(record.passages[index].text))


def _number(text: str, scale: float) -> float:
    return zlib.crc32(text.encode()) / 0xFFFFFFFF * scale
