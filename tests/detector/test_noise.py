import torch

from detector import Scorer
from detector.noise import SAMPLE, noise_floor
from tests.detector.families import RECORD, make_scorer


def test_the_noise_floor_is_the_rounding_of_sums(tiny_scorer_dir):
    floor = noise_floor(Scorer.load(str(tiny_scorer_dir)), RECORD)
    assert 0 < floor.logprob < 1e-4 and 0 < floor.jsd < 1e-4


def test_a_coarser_dtype_has_a_higher_floor(tiny_scorer_dir):
    fine, coarse = (
        noise_floor(make_scorer(tiny_scorer_dir, dtype=dtype)) for dtype in (torch.float64, torch.bfloat16)
    )
    assert fine.logprob < 1e-10 and coarse.logprob > 1e-4


def test_the_sample_is_read_whole(tiny_scorer_dir):
    reading, (trace,) = Scorer.load(str(tiny_scorer_dir)).trace(SAMPLE)
    assert len(reading.pieces) == 2 and not trace.truncated
