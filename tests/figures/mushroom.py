"""Labelled answers of Mu-SHROOM (SemEval-2025 task 3; de, fr, hi) from the shared folder, for the figures."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from detector import Record

PATH = Path(__file__).resolve().parents[3] / "shared" / "data" / "mushroom_dev.jsonl"


@dataclass(frozen=True, slots=True)
class Marked:
    """A record and what its annotators marked as wrong (code points of the answer, end exclusive).

    `spans` is what most of them marked; `soft_spans` holds (start, end, share of annotators in (0, 1]).
    Nearly every answer holds an error: token and character figures only, never response ones.
    """

    record: Record
    language: str
    spans: tuple[tuple[int, int], ...]
    soft_spans: tuple[tuple[int, int, float], ...]


def load(path: Path = PATH) -> list[Marked]:
    """All answers, each to another question. Four (hi) have no passages, so that a scorer rejects them."""
    if not path.is_file():
        sys.exit(f"{path}: the labelled answers are not here; this figure needs the shared data folder")
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        Marked(
            Record(
                question=row["question"],
                passages=row["passages"],
                answer=row["answer"],
                response_id=row["id"],
                language=row["lang"],
                model=row["model"],
            ),
            row["lang"],
            tuple((span["start"], span["end"]) for span in row["spans"]),
            tuple((span["start"], span["end"], span["prob"]) for span in row["soft_spans"]),
        )
        for row in rows
    ]
