"""Measured units in a folder, made from a few numbers per sentence: what the judge stage is tested with."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from jobs.commit import Run
from jobs.config import Config
from jobs.parts import put_table
from jobs.tables import DIMENSIONS, FEATURES, MEASURED_RESPONSES, MEASURED_SENTENCES, REJECTS, VERDICT

DATE = "2026-01-01"
SCORER = {"name": "tiny", "fingerprint": "f00", "reads_attention": True}
RUN = Run(
    run_id="run-1",
    date=DATE,
    started_at=f"{DATE}T00:00:00+00:00",
    leadline_version="0",
    logs=["logs"],
    files=[],
    n_units=1,
    config={},
    measured_by={"profile": "plain", "loo": "exact"},
    scorer=SCORER,
    versions={},
)
BUNDLE = {
    "digest": "b0" * 6,
    "method": "ensemble",
    "data": "Made-Up QA, English",
    "limits": "It learned nothing.",
    "operating_points": [[0.01, 0.9], [0.02, 0.8], [0.05, 0.6], [0.5, 0.3]],
}
JUDGED_RUN = replace(
    RUN,
    measured_by={"profile": "plain", "loo": "exact", "bundle": BUNDLE["digest"]},
    scorer=SCORER | {"bundle": BUNDLE},
)
"""A run whose sentences carry the verdicts of a bundle."""
SCHEMAS = {"responses": MEASURED_RESPONSES, "sentences": MEASURED_SENTENCES, "rejects": REJECTS}


def config(**judge):
    return Config.model_validate({"judge": judge})


def answer(response_id, sentences, date=DATE, app="shop", stored=True, truncated=False, position=0):
    """A response as plain data. `sentences`: dicts of feature values; each is one word of the answer."""
    return {
        "ids": {"response_id": response_id, "date": date, "app": app},
        "sentences": sentences,
        "stored": stored,
        "truncated": truncated,
        "position": position,
    }


def random_answers(n, seed=0, **options):
    """`n` answers of 0 to 4 sentences with random features, two dates, two apps."""
    rng = np.random.default_rng(seed)
    return [
        answer(
            f"r{i}",
            [
                {name: np.float32(rng.normal()) for name in FEATURES} | {"n_tokens": int(rng.integers(1, 40))}
                for _ in range(rng.integers(0, 5))
            ],
            date=f"2026-01-0{1 + i % 2}",
            app=("shop", None)[i // 2 % 2],
            position=i,
            **options,
        )
        for i in range(n)
    ]


def verdicts(n, seed=0, **options):
    """`random_answers` with a verdict of a bundle per sentence."""
    rng = np.random.default_rng(seed + 1000)
    answers = random_answers(n, seed, **options)
    for sentence in (sentence for item in answers for sentence in item["sentences"]):
        sentence |= {"ensemble": np.float32(rng.uniform())}
        sentence |= {name: np.float32(rng.normal()) for name in VERDICT[1:]}
    return answers


def put_unit(storage, out, unit_id, answers, rejects=(), path="logs/a.jsonl", backwards=False):
    """Write the parts of a unit as a worker does and return its marker. `rejects`: (date, reason) pairs.
    `backwards`: the rows of each part in reverse.
    """
    tables = {"responses": {}, "sentences": {}, "rejects": {}}
    for record_index, item in enumerate(answers):
        row = _ids(item["ids"]) | {"path": path, "position": item["position"]}
        texts = {"question": "Which?", "answer": "word " * len(item["sentences"]), "passages": PASSAGES}
        tables["responses"].setdefault(row["date"], []).append(
            row
            | (texts if item["stored"] else dict.fromkeys(texts))
            | {"record_index": record_index, **_numbers(item["sentences"][0] if item["sentences"] else {})}
            | {"n_passages": 2, "n_sentences": len(item["sentences"]), "n_context_tokens": 7}
            | {"n_answer_tokens": 5, "n_computed_tokens": 12, "n_windows": 1}
            | {"truncated": item["truncated"]}
        )
        tables["sentences"].setdefault(row["date"], []).extend(
            {
                "record_index": record_index,
                "sentence_index": index,
                "start": 5 * index,
                "end": 5 * index + 4,
                "n_tokens": int(values.get("n_tokens", 3)),
                "n_windows": 1,
                "truncated": False,
                **_numbers(values),
                **({name: values.get(name, 0.0) for name in VERDICT} if "ensemble" in values else {}),
                **_evidence(values),
            }
            for index, values in enumerate(item["sentences"])
        )
    for date, reason in rejects:
        row = _ids({"date": date}) | {"path": path, "position": 0, "reason": reason, "detail": "why"}
        tables["rejects"].setdefault(date, []).append(row)
    parts = [
        put_table(
            storage,
            out,
            f"measurements/{kind}",
            date,
            unit_id,
            pa.Table.from_pylist(rows[::-1] if backwards else rows, schema=SCHEMAS[kind]),
        )
        for kind, dates in tables.items()
        for date, rows in dates.items()
        if rows
    ]
    return {
        "unit_id": unit_id,
        "parts": parts,
        "n_read": len(answers) + len(rejects),
        "n_audited": len(answers),
        "n_rejected": len(rejects),
    }


PASSAGES = [
    {"id": "p0", "text": "The first passage.", "source": None, "score": None},
    {"id": "p1", "text": "The second one.", "source": None, "score": 0.5},
]


def _ids(values):
    return {"run_id": "run-1", "trace_id": None, "span_id": None, "response_id": None} | (
        dict.fromkeys(DIMENSIONS) | values
    )


def _numbers(values):
    measured = {name: values.get(name, 0.0) for name in FEATURES}
    return measured | {"drops": [measured["max_drop"]], "jsds": [measured["max_jsd"]]}


def _evidence(values):
    found = values.get("evidence", 1)
    return {
        "evidence_passage_index": found,
        "evidence_passage_id": None if found is None else f"p{found}",
        "evidence_start": None if found is None else 4,
        "evidence_end": None if found is None else 10,
    }
