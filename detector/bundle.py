"""Bundles: a trained head on disk, with a card that says what it was made from and for.

    bundle.json               the card and the tree of parts: names, numbers, short texts
    arrays.safetensors        every array of the tree, floats as float32
    <part>.lightgbm.txt       one per LightGBM model, as LightGBM writes it

Numbers and text only, never pickle: a bundle may come from anywhere. The same bundle has the same bytes.
"""

import hashlib
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from detector import head_parts
from detector.calibration import operating_threshold
from detector.errors import ProfileError
from detector.heads import Tokens
from detector.identity import ScorerInfo, shipped_bundle
from detector.probe import Keep
from detector.trace import Trace
from detector.weights import first_line

_CARD = "bundle.json"
_VERSION = 1
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a head says of one sentence.

    `states`, `attention` and `likelihood` are what each group of signals adds to the log-odds, relative to an
    average sentence; they may have any sign.
    """

    probability: float
    """That the sentence rests on nothing, in [0, 1]."""
    states: float
    attention: float
    likelihood: float


class VerdictHead(Protocol):
    """A fitted head that judges sentences and answers and can say why (`detector.ensemble`)."""

    @property
    def keep(self) -> Keep:
        """What the passes must keep for it."""
        ...

    def judge(self, trace: Trace, sentences: Sequence[Tokens]) -> tuple[list[Verdict], float]:
        """One verdict per sentence, and the probability that the answer holds unsupported text, as one
        window shows them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Card:
    """What a bundle says of itself. All of it is stored, and shown to whoever reads its scores."""

    method: str
    scorer: str
    """The name that the scorer was loaded by; its fingerprint is what must agree."""
    scorer_fingerprint: str
    profile: str
    """The prompt profile. The dtype is free: figures differ little between them."""
    keep: Keep
    operating_points: Mapping[float, float]
    """False-alarm rate -> threshold: at it or above lay that share of the supported sentences of the training
    data, each scored by a head that had not seen its source."""
    data: str
    """The training data in words, as the page names it."""
    data_fingerprint: str
    versions: Mapping[str, str]
    """leadline, torch, transformers, lightgbm, numpy: what it was fitted with."""
    figures: Mapping[str, Any]
    """What was measured on held-out sources, as free JSON."""
    limits: str
    """What it must not be trusted with, in words."""

    def threshold_at(self, false_alarm_rate: float) -> float:
        """The threshold of one operating point. Raises ProfileError where it was not measured."""
        return operating_threshold(self.operating_points, false_alarm_rate)


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A card and the parts of a head (its `to_parts`), checked and rounded to float32 when it is made, so
    that it judges alike before and after it was saved.

    Raises ProfileError for what cannot be stored (`head_parts.settle`).
    """

    card: Card
    parts: Mapping[str, Any]
    digest: str = field(init=False)
    """12 hex digits of its content: what a run that was judged by it remembers."""

    def __post_init__(self) -> None:
        _check_card(self.card)
        object.__setattr__(self, "parts", head_parts.settle(self.parts))
        digest = hashlib.sha256()
        try:
            files = self.to_files()
        except UnicodeEncodeError:
            raise ProfileError("a text in it is not Unicode") from None
        for name, data in sorted(files.items()):
            digest.update(f"{name}:{len(data)}:".encode() + data)
        object.__setattr__(self, "digest", digest.hexdigest()[:12])

    def head(self) -> VerdictHead:
        """The head that the parts describe. Raises ProfileError where they describe none."""
        if self.card.method != "ensemble":
            raise ProfileError(f"bundle {self.digest}: of method {self.card.method}; an audit reads ensemble")
        module = importlib.import_module("detector.ensemble")  # which imports Verdict from here
        try:
            head: VerdictHead = module.from_parts(self.parts)
            keep = head.keep
        except Exception as error:  # parts that somebody else wrote can fail a head in a dozen ways
            raise ProfileError(
                f"bundle {self.digest}: its parts make no {self.card.method} head of this version "
                f"({type(error).__name__}: {first_line(error)}); fit it again"
            ) from None
        if keep != self.card.keep:
            raise ProfileError(
                f"bundle {self.digest}: card and head want different passes kept; fit it again"
            )
        return head

    def check(self, scorer: ScorerInfo, profile: str) -> None:
        """Raise ProfileError unless this bundle was fitted for that scorer and prompt profile."""
        theirs, ours = self.card.scorer_fingerprint, scorer.fingerprint
        if theirs != ours:
            there, here = f"scorer {self.card.scorer} ({theirs})", f"{scorer.name} ({ours})"
        elif self.card.profile != profile:
            there, here = f"prompt profile {self.card.profile}", profile
        else:
            return
        raise ProfileError(
            f"bundle {self.digest}: fitted for the {there}, here it is {here}; use that one, a bundle of "
            "your own (`leadline fit`) or --bundle none"
        )

    def to_files(self) -> dict[str, bytes]:
        """Its files by name, the same bytes for the same content."""
        usual = asdict(Keep())
        card = asdict(self.card) | {
            "operating_points": sorted(self.card.operating_points.items()),
            # What it asks for, and no more: a later version of Leadline may know how to keep other things.
            "keep": {name: value for name, value in asdict(self.card.keep).items() if value != usual[name]},
        }
        tree = {"version": _VERSION, "card": card, "parts": head_parts.to_tree(self.parts)}
        text = json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return {_CARD: f"{text}\n".encode()} | head_parts.to_files(self.parts)

    def save(self, folder: str | Path) -> None:
        """Write it to a folder, which is made. Files of an earlier bundle there are replaced or deleted."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = self.to_files()
        for old in (folder / head_parts.ARRAYS, *folder.glob(f"*{head_parts.TREES}")):
            if old.name not in files:
                old.unlink(missing_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)

    @classmethod
    def load(cls, folder: str | Path) -> "Bundle":
        """Read what `save` wrote. Raises ProfileError for anything else, in one line."""

        def read(name: str) -> bytes:
            path = Path(folder) / name
            if path.is_file() and path.stat().st_size > _MAX_BYTES:
                raise ProfileError(f"{name} is larger than {_MAX_BYTES >> 20} MiB")
            return path.read_bytes()

        return cls.read(read, str(folder))

    @classmethod
    def read(cls, read: Callable[[str], bytes], where: str) -> "Bundle":
        """The same from anywhere: `read` gives the bytes of a file by its name or raises OSError."""
        try:
            tree = _json(read(_CARD))
            return cls(_card(tree["card"]), head_parts.from_tree(tree["parts"], read))
        except OSError as error:
            file = Path(str(error.filename)).name if error.filename else "a file of it"
            raise ProfileError(
                f"bundle {where}: {file} cannot be read ({type(error).__name__}); "
                "a bundle is a folder that `leadline fit` wrote"
            ) from None
        except ProfileError as error:
            raise ProfileError(f"bundle {where}: {error}") from None


def embedded(name: str, fingerprint: str, profile: str) -> Bundle | None:
    """The bundle that ships with the package for this scorer and prompt profile, or None."""
    folder = shipped_bundle(name)
    if folder is None:
        return None
    bundle = Bundle.load(folder)
    fits = (bundle.card.scorer_fingerprint, bundle.card.profile) == (fingerprint, profile)
    return bundle if fits else None


def _json(data: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ProfileError(f"{_CARD} is not JSON with finite numbers") from None
    if not isinstance(tree, dict) or tree.get("version") != _VERSION:
        raise ProfileError(f"{_CARD} is not of version {_VERSION}")
    _check_keys(tree, {"version", "card", "parts"}, _CARD)
    return tree


def _card(tree: Any) -> Card:
    _check_keys(tree, {f.name for f in fields(Card)}, "card")
    points = tree["operating_points"]
    if not isinstance(points, list) or not all(isinstance(p, list) and len(p) == 2 for p in points):
        raise ProfileError("card: operating_points must be pairs of a rate and a threshold")
    if not all(type(number) in (int, float) for point in points for number in point):
        raise ProfileError("card: operating_points must be numbers")
    return Card(**tree | {"keep": _keep(tree["keep"]), "operating_points": dict(points)})


def _keep(tree: Any) -> Keep:
    usual = asdict(Keep())
    if not isinstance(tree, dict) or not tree.keys() <= usual.keys():
        raise ProfileError("card: keep asks for what this version does not keep")
    values: dict[str, Any] = {}
    for name, given in tree.items():
        value = tuple(given) if isinstance(given, list) else given
        whole = not isinstance(value, tuple) or all(type(item) is int and item > 0 for item in value)
        if type(value) is not type(usual[name]) or not whole:
            raise ProfileError(f"card: keep.{name} is not what it should be")
        values[name] = value
    return Keep(**values)


def _check_card(card: Card) -> None:
    for name in ("method", "scorer", "scorer_fingerprint", "profile", "data", "data_fingerprint", "limits"):
        if not isinstance(getattr(card, name), str):
            raise ProfileError(f"card: {name} must be text")
    for name in ("operating_points", "versions", "figures"):
        if not isinstance(getattr(card, name), Mapping):
            raise ProfileError(f"card: {name} must be names and values")
    if not all(isinstance(text, str) for pair in card.versions.items() for text in pair):
        raise ProfileError("card: versions must be texts")
    for rate, threshold in card.operating_points.items():
        if not (0 < rate < 1 and 0 <= threshold < math.inf):
            raise ProfileError(f"card: no operating point: rate {rate}, threshold {threshold}")
    try:
        json.dumps(dict(card.figures), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ProfileError("card: figures must be JSON with finite numbers") from None


def _check_keys(tree: Any, known: set[str], where: str) -> None:
    if not isinstance(tree, dict):
        raise ProfileError(f"{where} must be an object")
    if tree.keys() != known:
        odd = min(tree.keys() ^ known)
        raise ProfileError(f"{where}: key {odd[:40]!r} is {'unknown' if odd in tree else 'missing'}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)
