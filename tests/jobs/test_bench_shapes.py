"""Generated records: exactly the shape that was asked for, and the cost that the formula says."""

import pytest

from detector.probe import Keep
from detector.prompts import encode, read_record
from detector.record import Record
from detector.scorer import Scorer
from jobs.bench_gpu import write_random_scorer
from jobs.bench_peers import keep_of
from jobs.bench_shapes import WORDS, Cost, ModelSize, Shape, floor, generate
from jobs.errors import ConfigError

SHAPES = [Shape(120, 40, 1), Shape(150, 50, 2), Shape(397, 61, 5), Shape(600, 33, 7)]


@pytest.fixture(scope="module")
def tiny(tiny_scorer_dir):
    return Scorer.load(str(tiny_scorer_dir))


def reading_of(record, scorer):
    return read_record(record, scorer.tokenizer, scorer.profile, scorer.window_tokens)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("profile", ["plain", "chat", "refind"])
def test_generated_records_have_exactly_the_shape(tiny_scorer_dir, profile, shape):
    scorer = Scorer.load(str(tiny_scorer_dir), profile=profile)
    for record in generate(shape, 3, scorer.tokenizer, scorer.profile.separator):
        reading = reading_of(record, scorer)
        assert reading.n_context_tokens == shape.context_tokens
        assert len(reading.answer_ids) == shape.answer_tokens
        (window,) = reading.windows
        lengths = [stop - start for start, stop in window.spans]
        assert len(lengths) == shape.passages and max(lengths) - min(lengths) <= 1


def test_the_same_seed_gives_the_same_records_and_every_record_is_another(tiny):
    first, again, other = (generate(Shape(120, 40, 2), 4, tiny.tokenizer, "\n\n", seed) for seed in (0, 0, 1))
    assert first == again
    assert len({record.answer for record in first + other}) == 8


def test_the_words_are_words(tiny):
    (record,) = generate(Shape(120, 40, 2), 1, tiny.tokenizer, "\n\n")
    for passage in record.passages:
        assert {word.strip(".") for word in passage.text.split()} <= set(WORDS)


def test_the_package_gasp_rag_cuts_generated_contexts_at_the_passages(tiny):
    spans = pytest.importorskip("gasp.spans", reason="compares with the package gasp-rag")
    (record,) = generate(Shape(900, 40, 4), 1, tiny.tokenizer, "\n\n")
    texts = [passage.text for passage in record.passages]
    context = "\n".join(texts)
    assert [context[a:b].strip() for a, b in spans.chunk_spans(context, 4)] == texts


def test_too_few_tokens_for_a_sentence_are_refused_in_one_line(tiny):
    with pytest.raises(ConfigError, match=r"text of 2 tokens .* more --context-tokens") as refused:
        generate(Shape(10, 40, 5), 1, tiny.tokenizer, "\n\n")
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="at least one"):
        generate(Shape(100, 40, 0), 1, tiny.tokenizer, "\n\n")


@pytest.mark.parametrize("loo", ["exact", "masked", "off"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_floor_is_what_a_trace_computes(tiny, shape, loo):
    (record,) = generate(shape, 1, tiny.tokenizer, tiny.profile.separator)
    reading, (trace,) = tiny.trace(record, keep_of(loo))
    assert floor(reading, loo).tokens == trace.n_computed_tokens


@pytest.mark.parametrize("loo", ["exact", "masked", "off"])
def test_the_floor_is_the_formula_of_the_cost_model(tiny, loo):
    c, a, k = 600, 50, 4
    (record,) = generate(Shape(c, a, k), 1, tiny.tokenizer, tiny.profile.separator)
    reading = reading_of(record, tiny)
    (window,) = reading.windows
    p, s = window.layout.passages[0], len(window.full) - window.layout.passages[1]
    scored = a - 1  # the last answer token predicts nothing
    tokens = {
        "exact": (k + 2) * (s + scored) + p + c + c * (k - 1) // 2,
        "masked": (k + 2) * (s + scored) + p + c,
        "off": 2 * (s + scored) + p + c,
    }
    assert floor(reading, loo).tokens == tokens[loo]
    assert floor(reading, loo).rows == (2 if loo == "off" else k + 2) * a


def test_pairs_are_the_keys_that_each_computed_token_sees(tiny):
    (record,) = generate(Shape(90, 30, 2), 1, tiny.tokenizer, tiny.profile.separator)
    reading = reading_of(record, tiny)
    (window,) = reading.windows
    p, stop = window.layout.passages
    lengths, end = [b - a for a, b in window.spans], len(window.full) + 29
    full = sum(at + 1 for at in range(end))
    none = sum(at + 1 for at in range(p, p + end - stop))
    exact = [sum(at + 1 for at in range(p, end - lengths[0]))]
    exact.append(sum(at + 1 for at in range(p + lengths[0], end - lengths[1])))
    masked = [sum(at + 1 - length for at in range(stop, end)) for length in lengths]
    assert floor(reading, "off").pairs == full + none
    assert floor(reading, "exact").pairs == full + none + sum(exact)
    assert floor(reading, "masked").pairs == full + none + sum(masked)


def test_the_floor_adds_up_over_windows_and_segments(tiny_scorer_dir):
    scorer = Scorer.load(str(tiny_scorer_dir), window_tokens=200)
    record = Record("Who?", ["It was built in the town. " * 3] * 3, "The bridge was painted. " * 9)
    reading, traces = scorer.trace(record, Keep())
    assert len(reading.windows) > 1 and len(reading.segments) > 1
    assert floor(reading, "exact").tokens >= sum(trace.n_computed_tokens for trace in traces)


def test_flops_weigh_tokens_pairs_and_rows():
    size = ModelSize(body_parameters=1000, attention_width=10, width=7, vocabulary=100)
    assert Cost(tokens=2, pairs=3, rows=5).flops(size) == 2 * 1000 * 2 + 4 * 10 * 3 + 2 * 7 * 100 * 5


def test_the_size_of_a_model_leaves_its_embeddings_out(tiny):
    size = ModelSize.of(tiny.model)
    per_layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32  # q, o; k, v; three of the MLP; two norms
    assert size == ModelSize(2 * per_layer + 32, 2 * 32, 32, len(tiny.tokenizer))


def test_a_scorer_of_random_weights_reads_generated_records(tmp_path):
    scorer = Scorer.load(str(write_random_scorer(tmp_path, "tiny")))
    (record,) = generate(Shape(200, 40, 3), 1, scorer.tokenizer, scorer.profile.separator)
    reading, (trace,) = scorer.trace(record)
    assert reading.n_context_tokens == 200 and len(trace.token_ids) == 40
    assert 0 not in encode(scorer.tokenizer, record.answer)[0], "no unknown word"
