"""Page: everything the report shows, as plain values. `collect` fills it from OUT, `render` makes it HTML."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `total` with the 95 % Wilson interval of the share; rates are None where `total` is 0."""

    count: int
    total: int
    rate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """How many rows were rejected for one reason, and what the reason means in plain words."""

    reason: str
    count: int
    meaning: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """Where every row went: read = audited + rejected. `empty_files` are the first of `n_empty_files`."""

    n_read: int
    n_audited: int
    n_rejected: int
    reasons: tuple[ReasonCount, ...]
    n_files: int
    n_empty_files: int
    empty_files: tuple[str, ...]
    n_truncated: int


@dataclass(frozen=True, slots=True)
class Basis:
    """What the flags of this page rest on.

    The threshold marks the `flag_budget` share of the sentences of the run `threshold_from`; `given`: that
    was another run, so it came with a profile. Both are None where there was nothing to rank. With a
    `target_fpr` it is an operating point of a bundle instead, measured on its training `data`.
    """

    given: bool
    threshold_from: str | None
    flag_budget: float | None
    target_fpr: float | None = None
    data: str | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """Score range of the shading: `low` and below is unshaded, `high` and above is darkest."""

    low: float
    high: float
    threshold: float

    def level(self, score: float) -> int:
        """Shade of a score, 0 (none) to 6 (darkest)."""
        return round(6 * min(max((score - self.low) / (self.high - self.low), 0.0), 1.0))


@dataclass(frozen=True, slots=True)
class Slice:
    """Answers that share these dimension values.

    `excess` = flagged answers beyond what the overall rate would give for as many answers. `card` is the
    anchor of the slice's worst answer on the page, where there is one.
    """

    values: tuple[str | None, ...]
    share: Share
    excess: float
    small: bool
    card: str | None


@dataclass(frozen=True, slots=True)
class SliceTable:
    """Slices, largest excess first; their values stand under `columns`. `n_hidden` more are not shown."""

    columns: tuple[str, ...]
    slices: tuple[Slice, ...]
    n_hidden: int


@dataclass(frozen=True, slots=True)
class Where:
    """Where flagged answers concentrate: by each dimension that varies, and by all of them together.

    `alone` has the columns dimension and value, and is empty where fewer than two dimensions vary.
    Interval bars run from 0 to `axis`; `overall` is the rate of all answers; slices of fewer than
    `small_below` answers are marked as small.
    """

    alone: SliceTable
    together: SliceTable
    overall: float
    axis: float
    small_below: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of the answer: one sentence, or (number None) the text between two.

    `n_hidden` code points after `text` are not on the page; `n_hidden_sentences` says how many sentences
    they hold.
    """

    text: str
    number: int | None = None
    level: int = 0
    flagged: bool = False
    n_hidden: int = 0
    n_hidden_sentences: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """The passage (counted from 1) whose removal costs the sentence most; `shown`: it is on this card."""

    passage: int
    passage_id: str | None
    drop_nats: float | None
    shown: bool


@dataclass(frozen=True, slots=True)
class SentenceRow:
    """One sentence's numbers. `number` counts from 1; `start:end` are code points of the answer.

    `evidence` is None where no passage matters or none was taken away; `scores`: the other methods'.
    `reason` and `weight`: the group of signals that speaks most for the verdict of a trained head, and what
    it adds to the log-odds; None where another method decides.
    """

    number: int
    start: int
    end: int
    score: float
    level: int
    flagged: bool
    evidence: Evidence | None
    scores: tuple[float | None, ...]
    reason: str | None = None
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of passage text and the numbers of the shown sentences that rest on it."""

    text: str
    sentences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The part of a passage that is on the page: `visible` at once, the rest on demand.

    `n_before` and `n_after` code points around it are not on the page.
    """

    n_before: int
    folded_before: tuple[Fragment, ...]
    visible: tuple[Fragment, ...]
    folded_after: tuple[Fragment, ...]
    n_after: int


@dataclass(frozen=True, slots=True)
class PassageView:
    """One passage of a card, counted from 1.

    `sentences`: the shown sentences that rest on it; `whole`: each of them on all of it.
    """

    number: int
    id: str | None
    source: str | None
    score: float | None
    n_characters: int
    sentences: tuple[int, ...]
    whole: bool
    excerpt: Excerpt


@dataclass(frozen=True, slots=True)
class Card:
    """One of the worst answers. `stretches` is empty where the text was not stored."""

    anchor: str
    response_id: str | None
    trace_id: str | None
    date: str
    dimensions: tuple[tuple[str, str | None], ...]
    language: str | None
    direction: str
    question: str | None
    question_hidden: int
    has_text: bool
    flagged: bool
    n_sentences: int
    n_flagged: int
    score_max: float | None
    n_windows: int
    truncated: bool
    stretches: tuple[Stretch, ...]
    rows: tuple[SentenceRow, ...]
    passages: tuple[PassageView, ...]
    n_passages_hidden: int
    withheld: str | None = None
    """Why a text that the run's settings would store is not there."""


@dataclass(frozen=True, slots=True)
class RejectRow:
    """One rejected row: where it stands and why it was not audited."""

    reason: str
    path: str
    position: str
    response_id: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class File:
    """One input file as it was listed."""

    url: str
    size_bytes: int | None
    etag: str
    form: str


@dataclass(frozen=True, slots=True)
class Statistic:
    """Mean and standard deviation that one sentence feature was standardised with."""

    feature: str
    meaning: str
    mean: float
    sd: float


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the page comes from and how to get it again. `statistics_from` is a run id."""

    facts: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]
    statistics: tuple[Statistic, ...]
    statistics_from: str
    n_statistics_sentences: int
    files: tuple[File, ...]
    n_files_hidden: int
    audit_command: str
    judge_command: str
    has_storage_options: bool


@dataclass(frozen=True, slots=True)
class Page:
    """The whole report."""

    title: str
    run_id: str
    dates: str
    basis: Basis
    method: str
    trained: bool
    answers: Share
    sentences: Share
    n_without_evidence: int
    leave_one_out: bool
    evidence_floor_nats: float
    coverage: Coverage
    where: Where
    scale: Scale | None
    methods: tuple[str, ...]
    cards: tuple[Card, ...]
    rejects: tuple[RejectRow, ...]
    provenance: Provenance
    decides: tuple[str, ...]
    limits: tuple[str, ...]
    store_text: str
    n_withheld: int
    """Flagged answers whose text could not be read from the logs again."""
