"""Record and Passage: the one shape that every log format is folded into."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieved passage as it was logged.

    `score` is the retriever's own (any scale, not used for scoring); `id` and `source` are passed through.
    """

    text: str
    id: str | None = None
    score: float | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One served answer: what was asked, what was retrieved, what was said.

    `passages` may be given as strings. `undivided` is True when the log held the context as one text
    without passage boundaries; the text is then `passages[0]` and is cut into groups of sentences for
    leave-one-out. `timestamp` is timezone-aware. `metadata` is passed through and never read.

    >>> Record(question="Who?", passages=["Ada wrote it."], answer="Ada.").passages[0].text
    'Ada wrote it.'
    """

    question: str
    passages: tuple[Passage, ...]
    answer: str
    response_id: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    timestamp: datetime | None = None
    app: str | None = None
    model: str | None = None
    retriever: str | None = None
    prompt_version: str | None = None
    language: str | None = None
    undivided: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        passages: Iterable[Passage | str] = self.passages
        if isinstance(passages, str):
            raise TypeError("passages must be a sequence of passages, got one string: wrap it in a list")
        object.__setattr__(self, "passages", tuple(Passage(p) if isinstance(p, str) else p for p in passages))
        if self.undivided and len(self.passages) > 1:
            raise ValueError("an undivided record holds its whole context in one passage")
