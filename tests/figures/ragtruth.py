"""Labelled answers of RAGTruth (QA, train split) from the shared folder, for the figures."""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from detector import Record

PATH = Path(__file__).resolve().parents[3] / "shared" / "data" / "ragtruth_qa_train.jsonl"


@dataclass(frozen=True, slots=True)
class Labelled:
    """A record, the question it shares with others, and the spans that people marked as unsupported."""

    record: Record
    source_id: str
    spans: tuple[tuple[int, int], ...]


def load(path: Path = PATH) -> list[Labelled]:
    """All answers of good quality (refusals and cut-off answers are left out of headline figures)."""
    if not path.is_file():
        sys.exit(f"{path}: the labelled answers are not here; this figure needs the shared data folder")
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        Labelled(
            Record(
                question=row["question"],
                passages=row["passages"],
                answer=row["answer"],
                response_id=row["id"],
                language=row["lang"],
            ),
            row["source_id"],
            tuple((span["start"], span["end"]) for span in row["spans"]),
        )
        for row in rows
        if row["quality"] == "good"
    ]


def sample(n: int, seed: int) -> list[Labelled]:
    """`n` answers, half of them with unsupported text, in a random order that the seed fixes."""
    answers = load()
    chooser = random.Random(seed)
    chooser.shuffle(answers)
    bad = [answer for answer in answers if answer.spans][: n // 2]
    good = [answer for answer in answers if not answer.spans][: n - n // 2]
    chosen = bad + good
    chooser.shuffle(chosen)
    return chosen
