import pytest

from detector.gasp_prompts import conditions, sentence_spans
from detector.record import Record

CONTEXT = "One is here.  Two\nis there! Three? Four. Five is e.g. odd. Six.\n\nSeven ends"
RECORD = Record(question="Why?", passages=CONTEXT.split("\n\n"), answer="Because.")


def test_v2_slices_and_keeps_the_header(tiny):
    plan = conditions(RECORD, tiny.tokenizer, "gasp-v2", 5)
    context = "\n".join(p.text for p in RECORD.passages)
    assert plan.full == f"Context:\n{context}\n\nQuestion: Why?\n\nAnswer: "
    assert plan.none == "Context:\n\n\nQuestion: Why?\n\nAnswer: "
    removed = context.replace("One is here.  Two\nis there! ", "")
    assert plan.without[0] == f"Context:\n{removed}\n\nQuestion: Why?\n\nAnswer: "


def test_v1_joins_with_single_spaces_and_drops_the_header(tiny):
    plan = conditions(RECORD, tiny.tokenizer, "gasp-v1", 3)
    assert plan.none == "Question: Why?\n\nAnswer: "
    # Eight sentences ("Five is e.g." is one to the author), three a chunk.
    assert plan.without[0] == (
        "Context:\nFour. Five is e.g. odd. Six. Seven ends\n\nQuestion: Why?\n\nAnswer: "
    )


def test_pieces_point_into_the_passage_that_a_chunk_starts_in(tiny):
    plan = conditions(RECORD, tiny.tokenizer, "gasp-v2", 8)
    found = [RECORD.passages[p.passage_index].text[p.start : p.end].strip() for p in plan.pieces]
    assert found[0] == "One is here." and found[-1] == "Seven ends"


def test_a_long_context_is_cut_and_says_so(tiny):
    record = Record(question="q", passages=["x. " * 1200], answer="a")
    plan = conditions(record, tiny.tokenizer, "gasp-v1", 5)
    assert plan.truncated and plan.n_context_tokens == 700


@pytest.mark.parametrize("text", ["", "   ", "A. B! C", "No end", "Wait... what?! Yes.", "a.b c. "])
def test_spans_are_those_of_the_authors_package(text):
    gasp = pytest.importorskip("gasp", reason="compares with the package gasp-rag")
    assert sentence_spans(text) == gasp.sentence_spans(text)
