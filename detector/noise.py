"""Noise floor: how far a scorer's numbers move when nothing but the shape of the computation does.

A sum of rounded products depends on the order in which it is made, and that order on how many rows are made
together. What moves by less than this when a passage goes has not been shown to react to it.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from detector.probe import Keep
from detector.record import Passage, Record

if TYPE_CHECKING:
    from detector.scorer import Scorer

SAMPLE = Record(
    question="When was the bridge at Ardley built, and who paid for it?",
    passages=(
        Passage(
            "The bridge at Ardley was built between 1887 and 1891 by the engineer Ada Holm. It has four "
            "arches of grey stone and a footway on the northern side. The parish paid for it with a toll of "
            "one penny."
        ),
        Passage(
            "Tolls were taken at the eastern end until 1950, when the county bought the bridge for 3,000 "
            "pounds. The toll house is a museum now and opens on Sundays from May to September."
        ),
    ),
    answer="The bridge was built between 1887 and 1891. The parish paid for it with a toll of one penny, "
    "which was taken until 1950. Since then it has belonged to the county.",
)
"""Read where no record of one's own is at hand: of ordinary length, so that sums are ordinary ones."""


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """Largest differences over the tokens of one answer, in nats."""

    logprob: float
    jsd: float


def noise_floor(scorer: "Scorer", record: Record = SAMPLE) -> NoiseFloor:
    """The full condition alone and beside another answer to the same question, which is another batch shape.

    Raises RecordRejected for a record that cannot be read.
    """
    keep = Keep(leave_one_out=False)
    beside = replace(record, answer=record.answer.split(maxsplit=1)[-1])
    alone = scorer.trace(record, keep)[1][0]
    together = scorer.trace_together([record, beside], keep)[0][1][0]
    return NoiseFloor(
        logprob=float(np.abs(alone.logprob - together.logprob).max()),
        jsd=float(np.abs(alone.jsd_no_context - together.jsd_no_context).max()),
    )
