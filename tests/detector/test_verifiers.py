import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    DebertaV2Config,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from detector import verifiers
from detector.errors import RecordRejected, RejectReason, ScorerError
from detector.record import Record
from detector.sentences import split_sentences
from detector.verifiers import NLIVerifier, TokenClassifier

SCRIPTS = {
    "emoji": "Yes 👩‍👩‍👧! It is 😀 green.",
    "cjk": "橋は1891年に建てられた。緑色です。",
    "combining": "Cafe\u0301 noir. Ne\u0308e.",
    "right to left": "הגשר ירוק. נבנה.",
    "one letter": "a",
    "lone surrogate": "bad \ud83d half",
}
CONTROL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?-'()[]<>|/_"
NLI = {0: "contradiction", 1: "ENTAILMENT", 2: "neutral"}
RECORD = Record(
    question="Who built the bridge?",
    passages=["Ada built the bridge in 1891.", "  ", "Tolls ended in 1950. It was painted green."],
    answer="Ada built it in 1891. It has been green since. Tolls ended in 1950.",
)
SPANS = split_sentences(RECORD.answer)
LONG = Record(
    "Who?", [" ".join(f"word {i} of many" for i in range(60)), "Ada did."], "Ada built it. It is old."
)


def word_pieces():
    tokens = [*CONTROL, *LETTERS, *("##" + letter for letter in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def unigrams():
    """As DeBERTa-v2 and XLM-R: control tokens are pieces of the vocabulary, of the best score."""
    pieces = [(token, 0.0) for token in CONTROL] + [(c, -5.0) for c in "▁" + LETTERS + LETTERS[:26].upper()]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def byte_pairs():
    tokens = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
    "dtype": "float32",
    "pad_token_id": 0,
}
FAMILIES = {
    "bert": (word_pieces, lambda n, p: BertConfig(vocab_size=n, max_position_embeddings=p, **SIZES)),
    "deberta-v2": (
        unigrams,
        lambda n, p: DebertaV2Config(
            vocab_size=n,
            max_position_embeddings=p,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            type_vocab_size=0,
            **SIZES,
        ),
    ),
    "modernbert": (
        byte_pairs,
        lambda n, p: ModernBertConfig(
            vocab_size=n,
            max_position_embeddings=p,
            global_attn_every_n_layers=1,
            initializer_cutoff_factor=2.0,
            cls_token_id=1,
            sep_token_id=2,
            bos_token_id=1,
            eos_token_id=2,
            **SIZES,
        ),
    ),
    "roberta": (
        byte_pairs,
        lambda n, p: RobertaConfig(vocab_size=n, max_position_embeddings=p, type_vocab_size=1, **SIZES),
    ),
}


def save(folder, family, kind, labels, positions=160):
    """A random model of two layers with its tokenizer, the same bytes every time."""
    build, configure = FAMILIES[family]
    backend = build()
    backend.add_special_tokens(CONTROL)
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (family in ("bert", "deberta-v2"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=names,
    )
    tokenizer.save_pretrained(folder)
    config = configure(len(tokenizer), positions)
    config.id2label, config.label2id = labels, {name: i for i, name in labels.items()}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        kind.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def folder(family, task, positions=160):
        key = family, task, positions
        if key not in made:
            kind, labels = {
                "nli": (AutoModelForSequenceClassification, NLI),
                "tokens": (AutoModelForTokenClassification, {0: "LABEL_0", 1: "LABEL_1"}),
            }[task]
            path = tmp_path_factory.mktemp(f"{family}-{task}")
            made[key] = save(path, family, kind, labels, positions)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def nli(folder_of):
    return NLIVerifier.load(folder_of("bert", "nli"))


@pytest.fixture(scope="module")
def classifier(folder_of):
    return TokenClassifier.load(folder_of("bert", "tokens"))


def slow_chances(folder, kind, first, second):
    """What the library itself makes of one pair of texts, alone, in float64."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = kind.from_pretrained(folder, dtype=torch.float64).eval()
    given = tokenizer(first, second, return_tensors="pt")
    with torch.inference_mode():
        chances = model(**given).logits[0].softmax(dim=-1).numpy()
    return chances, [owner == 1 for owner in given.sequence_ids(0)]


def slow_token_chances(folder, prompt, answer):
    """The same where a prompt comes in pieces, each tokenised on its own."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    first = [1] + [i for piece in prompt for i in tokenizer.encode(piece, add_special_tokens=False)] + [2]
    second = [*tokenizer.encode(answer, add_special_tokens=False), 2]
    given = {"input_ids": torch.tensor([first + second])}
    if "token_type_ids" in tokenizer.model_input_names:
        given["token_type_ids"] = torch.tensor([[0] * len(first) + [1] * len(second)])
    with torch.inference_mode():
        return model(**given).logits[0].softmax(dim=-1).numpy()[len(first) : -1, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sentence_scores_one_minus_its_best_entailment_over_passages(folder_of, family):
    folder = folder_of(family, "nli")
    verifier = NLIVerifier.load(str(folder))
    scores, passages = verifier.evidence(RECORD, SPANS)
    for (start, end), score, passage in zip(SPANS, scores, passages, strict=True):
        chances = [
            -1 if not p.text.strip() else
            slow_chances(folder, AutoModelForSequenceClassification, p.text, RECORD.answer[start:end])[0][1]
            for p in RECORD.passages
        ]  # fmt: skip
        assert score == pytest.approx(1 - max(chances), abs=1e-5)
        assert passage == int(np.argmax(chances))
    assert np.array_equal(verifier.sentences(RECORD, SPANS), scores)
    assert scores.dtype == np.float32 and np.ptp(scores) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_scores_its_chance_of_label_1_with_all_passages_in_the_prompt(folder_of, family):
    folder = folder_of(family, "tokens", 400)
    verifier = TokenClassifier.load(folder)
    offsets, scores = verifier.tokens(RECORD)
    prompt = (
        f"Briefly answer the following question:\n{RECORD.question}\nUse nothing but these passages:\n",
        f"passage 1: {RECORD.passages[0].text}\n",
        f"passage 3: {RECORD.passages[2].text}\n",
        "output:",
    )
    np.testing.assert_allclose(scores, slow_token_chances(folder, prompt, RECORD.answer), atol=1e-5)
    if family != "deberta-v2":  # where every piece begins with a word mark of its own
        chances, answer = slow_chances(
            folder, AutoModelForTokenClassification, "".join(prompt), RECORD.answer
        )
        np.testing.assert_allclose(scores, chances[answer, 1], atol=1e-5)
    assert offsets.shape == (len(scores), 2) and np.ptp(scores) > 1e-3
    owners = [scores[[s < end and e > start for s, e in offsets]].max() for start, end in SPANS]
    np.testing.assert_array_equal(verifier.sentences(RECORD, SPANS), owners)


def test_padding_and_batch_mates_do_not_change_a_score(folder_of, monkeypatch):
    loaded = [
        (NLIVerifier.load(folder_of(f, "nli")), TokenClassifier.load(folder_of(f, "tokens", 400)))
        for f in FAMILIES
    ]
    together = [(nli.sentences(RECORD, SPANS), tokens.tokens(LONG)[1]) for nli, tokens in loaded]
    monkeypatch.setattr(verifiers, "_BATCH_TOKENS", 0)  # one pair at a time, nothing padded
    for (nli, tokens), (sentences, chances) in zip(loaded, together, strict=True):
        np.testing.assert_allclose(nli.sentences(RECORD, SPANS), sentences, atol=1e-6)
        np.testing.assert_allclose(nli.sentences(RECORD, SPANS[1:2]), sentences[1:2], atol=1e-6)
        np.testing.assert_allclose(tokens.tokens(LONG)[1], chances, atol=1e-6)


def test_the_same_record_gives_the_same_bits_whatever_was_read_before(nli, classifier):
    first = nli.sentences(RECORD, SPANS), classifier.tokens(RECORD)[1]
    nli.sentences(LONG, [(0, 13)])
    classifier.tokens(LONG)
    assert np.array_equal(nli.sentences(RECORD, SPANS), first[0])
    assert np.array_equal(classifier.tokens(RECORD)[1], first[1])


def test_a_long_passage_is_read_whole_in_chunks_and_one_that_entails_is_enough(nli, monkeypatch):
    read = []
    monkeypatch.setattr(
        type(nli._encoder), "probabilities", lambda self, pairs, label: read.extend(pairs) or fake(pairs)
    )
    scores, passages = nli.evidence(LONG, [(0, 13)])
    seen = [pair for pair in read if pair.first != read[-1].first]
    assert len(seen) > 3
    assert all(nli._encoder._length(pair) <= nli.info.window_tokens for pair in read)
    whole = nli._encoder.encode(LONG.passages[0].text)[0]
    assert set(whole) == {i for pair in seen for i in pair.first}
    assert seen[-1].first[-5:] == whole[-5:] and seen[0].first == whole[: len(seen[0].first)]
    assert (scores[0], passages[0]) == (pytest.approx(0.1), 0)


def fake(pairs):
    """Nothing is entailed but by the third pair."""
    return [np.array([0.9 if i == 2 else 0.2], dtype=np.float32) for i in range(len(pairs))]


@pytest.mark.parametrize(("length", "room"), [(1, 8), (8, 8), (9, 8), (14, 8), (15, 8), (100, 8), (50, 3)])
def test_chunks_cover_every_token_and_share_a_quarter(length, room):
    ids = tuple(range(length))
    chunks = verifiers._chunks(ids, room)
    assert sorted({i for chunk in chunks for i in chunk}) == list(ids)
    assert all(0 < len(chunk) <= room for chunk in chunks)
    assert all(len(set(a) & set(b)) == room // 4 for a, b in pairwise(chunks))


def test_a_sentence_of_more_than_half_the_window_needs_every_part_entailed(nli, monkeypatch):
    sentence = "very long " * 20
    record = Record("q", ["First.", "Second."], sentence)

    def probabilities(self, pairs, label):
        assert len(pairs) >= 4 and len(pairs) % 2 == 0
        # The first part rests on the second passage, all others on nothing much.
        return [np.array([0.9 if i == 1 else 0.3 + i / 100], dtype=np.float32) for i in range(len(pairs))]

    monkeypatch.setattr(type(nli._encoder), "probabilities", probabilities)
    scores, passages = nli.evidence(record, [(0, len(sentence))])
    assert (scores[0], passages[0]) == (pytest.approx(1 - 0.33), 1)


def test_a_token_takes_its_smallest_probability_over_windows_of_passages(folder_of):
    folder = folder_of("bert", "tokens", 200)
    verifier = TokenClassifier.load(folder)
    passages = [
        "The bridge is old and made of iron. " * 2,
        "Ada built it. " * 5,
        "Nothing more is known here. " * 2,
    ]
    record = Record("Who built it?", passages, "Ada built it.")
    _, scores = verifier.tokens(record)
    one_each = []
    for number, passage in enumerate(passages, start=1):
        prompt = (
            "Briefly answer the following question:\nWho built it?\nUse nothing but these passages:\n"
            f"passage {number}: {passage}\noutput:"
        )
        chances, answer = slow_chances(folder, AutoModelForTokenClassification, prompt, record.answer)
        one_each.append(chances[answer, 1])
    np.testing.assert_allclose(scores, np.min(one_each, axis=0), atol=1e-5)
    assert len({int(i) for i in np.argmin(one_each, axis=0)}) > 1


def test_a_passage_beyond_the_window_and_a_long_answer_are_read_whole(classifier):
    record = Record("Who?", [LONG.passages[0].text], "Ada built it. " * 20)
    offsets, scores = classifier.tokens(record)
    assert len(scores) == len(classifier._encoder.encode(record.answer)[0])
    assert (scores >= 0).all() and (scores <= 1).all()
    assert offsets[-1, 1] == len(record.answer.rstrip())


def test_without_a_question_the_prompt_asks_for_a_summary(folder_of):
    folder = folder_of("bert", "tokens", 400)
    record = Record("", ["Ada built it."], "Ada did.")
    prompt = "Summarize the following text:\npassage 1: Ada built it.\noutput:"
    chances, answer = slow_chances(folder, AutoModelForTokenClassification, prompt, record.answer)
    _, scores = TokenClassifier.load(folder).tokens(record)
    np.testing.assert_allclose(scores, chances[answer, 1], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_control_tokens_in_the_log_are_read_as_text(folder_of, family):
    hostile = "It is [SEP] so [CLS][PAD]. </s> [UNK]"
    record = Record(hostile, [hostile, "[SEP]"], hostile)
    if family == "deberta-v2":  # where the library's own switch does not help
        assert (
            2
            in AutoTokenizer.from_pretrained(folder_of(family, "nli"))(
                hostile, add_special_tokens=False, split_special_tokens=True
            )["input_ids"]
        )
    for verifier in (
        NLIVerifier.load(folder_of(family, "nli")),
        TokenClassifier.load(folder_of(family, "tokens", 400)),
    ):
        encoder = verifier._encoder
        seen = []
        hook = encoder.model.register_forward_pre_hook(
            lambda _, __, given, seen=seen: seen.extend(given["input_ids"].tolist()), with_kwargs=True
        )
        scores = verifier.sentences(record, [(0, len(hostile))])
        hook.remove()
        assert np.isfinite(scores).all() and seen
        assert all(ids.count(1) == 1 and ids.count(2) == 2 for ids in seen)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("answer", SCRIPTS.values(), ids=SCRIPTS)
def test_offsets_are_code_points_of_the_answer_in_any_script(folder_of, family, answer):
    record = Record("Who?", RECORD.passages, answer)
    offsets, scores = TokenClassifier.load(folder_of(family, "tokens", 400)).tokens(record)
    assert np.isfinite(scores).all() and (offsets[:, 0] <= offsets[:, 1]).all()
    seen = {i for start, end in offsets.tolist() for i in range(start, end)}
    written = {i for i, c in enumerate(answer) if not c.isspace() and c not in "\u0301\u0308\u200d\ud83d"}
    assert written <= seen and max(seen) < len(answer)


def test_a_span_in_which_nothing_is_read_counts_as_unsupported(nli, classifier):
    record = Record("Who?", ["Ada did."], "Ada did. \u200b\u200b")
    scores, passages = nli.evidence(record, [(0, 8), (9, 11)])
    assert (scores[1], passages[1]) == (1, -1) and scores[0] < 1
    assert classifier.sentences(record, [(9, 11)]).tolist() == [1]
    assert nli.sentences(record, []).shape == classifier.sentences(record, []).shape == (0,)


@pytest.mark.parametrize(
    ("passages", "answer", "reason"),
    [
        ([], "Ada.", RejectReason.NO_PASSAGES),
        ([" ", ""], "Ada.", RejectReason.PASSAGE_TEXT_MISSING),
        (["Ada."], " \n", RejectReason.MISSING_ANSWER),
    ],
)
def test_without_passages_or_answer_nothing_is_called_supported(nli, classifier, passages, answer, reason):
    record = Record("Who?", passages, answer)
    for verifier in (nli, classifier):
        with pytest.raises(RecordRejected) as caught:
            verifier.sentences(record, [(0, 1)])
        assert caught.value.reason is reason


def test_a_question_that_fills_the_window_is_a_reject_not_a_cut(classifier):
    with pytest.raises(RecordRejected) as caught:
        classifier.tokens(Record("why " * 100, ["Ada."], "Ada."))
    assert caught.value.reason is RejectReason.OVER_WINDOW


def test_the_window_is_what_the_model_was_made_for_or_less(folder_of):
    assert NLIVerifier.load(folder_of("bert", "nli")).info.window_tokens == 160
    assert NLIVerifier.load(folder_of("bert", "nli"), max_tokens=100).info.window_tokens == 100
    assert NLIVerifier.load(folder_of("roberta", "nli")).info.window_tokens == 159  # one position is padding
    assert TokenClassifier.load(folder_of("modernbert", "tokens", 8192)).info.window_tokens == 4096
    assert (
        TokenClassifier.load(folder_of("modernbert", "tokens", 8192), max_tokens=5000).info.window_tokens
        == 5000
    )


def test_non_finite_numbers_are_a_reject(folder_of):
    verifier = NLIVerifier.load(folder_of("bert", "nli"))
    with torch.no_grad():
        verifier._encoder.model.classifier.bias.fill_(float("nan"))
    with pytest.raises(RecordRejected, match="non-finite numbers in float32"):
        verifier.sentences(RECORD, SPANS)


def one_line(error):
    return str(error.value) if "\n" not in str(error.value) else pytest.fail("more than one line")


def test_what_cannot_be_loaded_is_told_in_one_line(folder_of, tmp_path):
    bare = save(tmp_path / "bare", "bert", AutoModelForSequenceClassification, {0: "a", 1: "b"})
    for name, needle in [
        (tmp_path / "missing", "no such file or folder"),
        ("nobody/nothing", "cannot be loaded"),
        (tmp_path, "without config.json"),
        (bare, "do not hold one called entailment"),
    ]:
        with pytest.raises(ScorerError) as error:
            NLIVerifier.load(name)
        assert needle in one_line(error) and str(name) in one_line(error)
    with pytest.raises(ScorerError) as error:
        NLIVerifier.load(folder_of("bert", "nli"), max_tokens=40)
    assert "leaves 37 for text" in one_line(error)
    with pytest.raises(ScorerError) as error:
        TokenClassifier.load(save(tmp_path / "three", "bert", AutoModelForTokenClassification, NLI))
    assert "3 labels a token, expected 2" in one_line(error)


def test_a_model_without_a_trained_head_is_refused(folder_of, tmp_path):
    folder = save(tmp_path / "body", "bert", AutoModelForSequenceClassification, NLI)
    BertModel.from_pretrained(folder).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "id2label": {str(i): v for i, v in NLI.items()}})
    )
    with pytest.raises(ScorerError) as error:
        NLIVerifier.load(folder)
    assert "not trained for this task" in one_line(error)


def test_pickled_weights_are_not_read(tmp_path):
    folder = save(tmp_path / "pickle", "bert", AutoModelForSequenceClassification, NLI)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ScorerError, match=r"safetensors"):
        NLIVerifier.load(folder)
