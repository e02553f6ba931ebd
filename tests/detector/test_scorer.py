import dataclasses
import json
import shutil
import subprocess
import sys
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from detector import Record, RecordRejected, Scorer, ScorerError, attention
from detector.aggregate import Measurement
from detector.calibration import Reference
from detector.identity import fingerprint
from detector.probe import Keep
from detector.scorers import READABLE
from detector.trace import Trace
from detector.windows import Layout
from tests.detector.reference import separate_passes
from tests.figures.exact_equals_separate import compare, tiny_float64

RECORD = Record(
    question="Who built the bridge?",
    passages=["Ada built the bridge in 1891.", "It was painted green in 1920.", "Tolls ended in 1950."],
    answer="Ada built it in 1891. It has been green since. Tolls ended in 1950.",
    response_id="r1",
)


def numbers(measurement: Measurement) -> np.ndarray:
    rows = [
        [s.features.gap, s.features.jsd_none, *s.features.drops, *s.features.jsds]
        for s in measurement.sentences
    ]
    return np.array(rows)


@pytest.mark.parametrize("passages", [1, 3])
def test_exact_equals_separate_passes_to_1e_9_in_float64(tiny_scorer_dir, passages):
    record = Record(RECORD.question, RECORD.passages[:passages], RECORD.answer)
    logprob, jsd = compare(tiny_float64(tiny_scorer_dir), record, torch.float64)
    assert logprob < 1e-9 and jsd < 1e-9


@pytest.mark.parametrize("profile", ["chat", "gasp-v1", "gasp-v2"])
def test_every_profile_equals_separate_passes(tiny_of, profile):
    scorer = tiny_of(profile=profile)
    reading, (trace,) = scorer.trace(RECORD)
    (window,) = reading.windows
    prompts = (window.full, window.none, *window.without)
    logprob, _ = separate_passes(scorer.model, prompts, reading.answer_ids, torch.float32)
    ours = np.concatenate([trace.logprob[None], trace.logprob_no_context[None], trace.logprob_without])
    np.testing.assert_allclose(ours, logprob, atol=1e-5)


def test_the_model_is_handed_exactly_the_tokens_of_the_plan(tiny):
    reading, _ = tiny.trace(RECORD)
    (window,) = reading.windows
    prompts = (window.full, window.none, *window.without)
    seen = []
    hook = tiny.model.base_model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    _, (trace,) = tiny.trace(RECORD)
    hook.remove()
    distinct = {
        (prompt + reading.answer_ids[:-1])[:n]
        for prompt in prompts
        for n in range(1, len(prompt) + len(reading.answer_ids))
    }
    assert sum(seen) == trace.n_computed_tokens == len(distinct)


def test_two_equal_passages_share_one_condition(tiny):
    twice = Record("q", ["Same text here.", "Same text here."], "An answer.")
    _, (trace,) = tiny.trace(twice)
    np.testing.assert_array_equal(trace.logprob_without[0], trace.logprob_without[1])


def test_loo_off_takes_two_passes_and_keeps_gap(tiny):
    full, two = tiny.measure(RECORD), tiny.measure(RECORD, leave_one_out=False)
    assert two.n_computed_tokens < full.n_computed_tokens
    assert [s.features.gap for s in two.sentences] == pytest.approx(
        [s.features.gap for s in full.sentences], abs=1e-5
    )
    assert two.sentences[0].features.max_drop is None and two.sentences[0].evidence is None


def test_loo_masked_reads_the_context_once_and_keeps_gap(tiny):
    full, masked = tiny.measure(RECORD), tiny.measure(RECORD, masked=True)
    assert masked.n_computed_tokens < full.n_computed_tokens
    assert [s.features.gap for s in masked.sentences] == pytest.approx(
        [s.features.gap for s in full.sentences], abs=1e-5
    )
    drops = [np.array([s.features.drops for s in measured.sentences]) for measured in (full, masked)]
    assert drops[0].shape == drops[1].shape and np.abs(drops[0] - drops[1]).max() > 1e-3
    assert all(sentence.evidence is not None for sentence in masked.sentences)


def test_a_long_answer_is_scored_whole_in_segments(tiny_of):
    scorer = tiny_of(window_tokens=300)
    answer = " ".join(f"Sentence {i} says so." for i in range(60))
    found = scorer.measure(Record("q", ["A passage.", "Another one."], answer))
    assert len(found.sentences) == 60 and not found.truncated
    assert found.n_answer_tokens > 300
    assert np.isfinite(numbers(found)).all()


def test_a_long_context_is_read_in_windows_and_finds_its_evidence_index(tiny_of):
    passages = [f"Passage {i} " + "about many things " * 6 for i in range(9)]
    found = tiny_of(window_tokens=400).measure(Record("q", passages, "An answer. Another."))
    assert found.n_windows > 1
    for sentence in found.sentences:
        drops = sentence.features.drops
        known = [d for d in drops if d is not None]
        assert len(drops) == 9 and 0 < len(known) < 9
        assert drops[sentence.evidence.passage_index] == max(known)


def test_audit_orders_sentences_and_names_evidence(tiny):
    found = tiny.audit(RECORD)
    assert [s.text for s in found.sentences] == [
        "Ada built it in 1891.",
        "It has been green since.",
        "Tolls ended in 1950.",
    ]
    assert all(s.evidence.text == RECORD.passages[s.evidence.passage_index].text for s in found.sentences)
    assert found.threshold is None and not any(s.flagged for s in found.sentences)


def test_audit_flags_at_the_threshold_of_a_reference(tiny):
    scores = sorted(s.score for s in tiny.audit(RECORD).sentences)
    plain = Reference.identity()
    reference = Reference.from_json(
        plain.to_json().replace('"threshold": null', f'"threshold": {scores[-1]}')
    )
    assert sum(s.flagged for s in tiny.audit(RECORD, reference).sentences) == 1


def test_too_short_an_answer_is_rejected(tiny):
    with pytest.raises(RecordRejected, match="answer_too_short: 1 tokens, 5 needed"):
        tiny.measure(Record("q", ["p"], "a"), min_answer_tokens=5)


def test_fingerprint_follows_the_weights(tiny_scorer_dir, tmp_path, tiny):
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(tiny_scorer_dir, tmp_path / "copy")
    assert fingerprint(str(copy)).fingerprint == tiny.fingerprint
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(str(copy)).fingerprint != tiny.fingerprint


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", "no such file or folder"),
        (lambda folder: folder, "without config.json"),
        (lambda folder: write(folder / "config.json", "{").parent, "not valid JSON"),
        (lambda folder: write(folder / "config.json", "{}").parent, "names no model_type"),
        (
            lambda folder: write(folder / "config.json", '{"model_type": "llama"}').parent,
            "no \\*.safetensors",
        ),
        (lambda folder: write(folder / "notes.txt", "hello"), "not .gguf"),
        (lambda folder: write(folder / "bad.gguf", "not a model"), "not a GGUF model"),
    ],
)
def test_a_path_that_is_no_model_is_one_clear_line(tmp_path, make, message):
    with pytest.raises(ScorerError, match=message) as caught:
        Scorer.load(str(make(tmp_path)), cache_dir=str(tmp_path / "cache"))
    assert "\n" not in str(caught.value)


def write(path, text):
    path.write_text(text)
    return path


def test_pickled_weights_are_refused(tiny_scorer_dir, tmp_path):
    copy = shutil.copytree(tiny_scorer_dir, tmp_path / "copy")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ScorerError, match="weights as safetensors is all that is read"):
        Scorer.load(str(copy))


def test_weights_that_do_not_fit_the_configuration_are_one_line(tiny_scorer_dir, tmp_path):
    copy = shutil.copytree(tiny_scorer_dir, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ScorerError, match="cannot be loaded"):
        Scorer.load(str(copy))


def test_a_scorer_is_identified_without_importing_transformers(tiny_scorer_dir):
    code = (
        "import sys; from detector.identity import fingerprint; "
        f"fingerprint({str(tiny_scorer_dir)!r}); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("family", READABLE)
def test_every_layer_of_a_readable_family_shows_the_attention_that_eager_has(family):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "initializer_range": 0.3}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    known = AutoConfig.for_model(family).to_dict()
    layers = {"layer_types": known["layer_types"][:2]} if known.get("layer_types") else {}
    config = AutoConfig.for_model(family, **{k: v for k, v in sizes.items() if k in known} | layers)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    ids, seen = torch.arange(9)[None], {}

    def see(layer, query, key, mask, scaling):
        seen[layer] = attention.shares(query, key, mask, scaling, attention.Rows(0, 9), Layout((1, 4), 6))

    attention.register()
    model.set_attn_implementation(attention.NAME)
    with torch.inference_mode():
        model.base_model(input_ids=ids, use_cache=False, see=see)
        model.set_attn_implementation("eager")
        maps = model.base_model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    assert sorted(seen) == [0, 1]
    for layer, weights in enumerate(maps):
        np.testing.assert_allclose(seen[layer].passages, weights[0, :, :, 1:4].sum(-1), atol=1e-5)
        np.testing.assert_allclose(seen[layer].answer, weights[0, :, :, 6:].sum(-1), atol=1e-5)


def unreadable(scorer):
    """As a family with soft-capped scores is loaded: with an attention of its own, known to be unreadable."""
    model = deepcopy(scorer.model)
    model.set_attn_implementation("eager")
    info = dataclasses.replace(scorer.info, reads_attention=False)
    return Scorer(model, scorer.tokenizer, info, scorer.profile)


def test_a_scorer_whose_attention_cannot_be_read_is_audited_without_it(tiny):
    blind = unreadable(tiny)
    assert tiny.reads_attention and not blind.reads_attention
    with pytest.raises(ScorerError, match="cannot be read"):
        blind.trace(RECORD, Keep(attention=True))
    for ours, theirs in zip(blind.measure(RECORD).sentences, tiny.measure(RECORD).sentences, strict=True):
        assert ours.features.attention_share is None and 0 < theirs.features.attention_share < 1
        assert ours.features.absent_pairs == theirs.features.absent_pairs
        assert ours.features.gap == pytest.approx(theirs.features.gap, abs=1e-4)
    assert [f.text for f in blind.audit(RECORD).sentences] == [f.text for f in tiny.audit(RECORD).sentences]


@pytest.mark.parametrize(("family", "readable"), [("llama", True), ("gemma2", False), (["llama"], False)])
def test_the_family_says_whether_attention_can_be_read_before_weights_are_loaded(
    tiny_scorer_dir, tmp_path, family, readable
):
    copied = shutil.copytree(tiny_scorer_dir, tmp_path / "copy")
    config = json.loads((copied / "config.json").read_text()) | {"model_type": family}
    (copied / "config.json").write_text(json.dumps(config))
    assert fingerprint(str(copied)).reads_attention is readable


def test_attention_is_read_whatever_the_configuration_prefers(tiny_scorer_dir, tmp_path):
    copied = shutil.copytree(tiny_scorer_dir, tmp_path / "copy")
    config = json.loads((copied / "config.json").read_text()) | {"_attn_implementation": "eager"}
    (copied / "config.json").write_text(json.dumps(config))
    measured = Scorer.load(str(copied)).measure(RECORD, leave_one_out=False)
    assert measured.features.attention_share is not None


def test_a_model_that_changes_its_logits_unannounced_is_refused(tiny_scorer_dir, monkeypatch):
    from transformers import LlamaForCausalLM

    original = LlamaForCausalLM.forward

    def doubled(self, *arguments, **settings):
        out = original(self, *arguments, **settings)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(ScorerError, match="changes its logits"):
        Scorer.load(str(tiny_scorer_dir))


def test_records_import_without_torch():
    code = "import sys; from detector import Record; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


TOGETHER = [
    RECORD.answer,
    "Ada built it in 1891. Tolls ended in 1950.",  # shares its first tokens with the one before
    "Ada built it",  # is the start of both
    "Nobody knows.",
    RECORD.answer,
    "b",
]


@pytest.mark.parametrize(
    "keep",
    [Keep(), Keep(False), Keep(extremes=True, attention=True, layers=(1, 3), carried=True)],
    ids=["default", "two passes", "everything"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_answers_read_together_have_the_traces_that_each_has_alone(
    tiny, tiny_scorer_dir, dtype, tolerance, keep
):
    scorer = tiny if dtype == "float32" else tiny_float64(tiny_scorer_dir)
    records = [Record(RECORD.question, RECORD.passages, answer) for answer in TOGETHER]
    alone = [scorer.trace(record, keep) for record in records]
    together = scorer.trace_together(records, keep)
    for (reading, (trace,)), (reading_alone, (trace_alone,)) in zip(together, alone, strict=True):
        assert reading == reading_alone
        for field in dataclasses.fields(Trace):
            if field.name == "n_computed_tokens":
                continue
            ours, theirs = getattr(trace, field.name), getattr(trace_alone, field.name)
            assert type(ours) is type(theirs), field.name
            if isinstance(ours, np.ndarray):
                # Hidden states have no fixed scale.
                scale = max(1.0, float(np.abs(theirs).max())) if field.name in ("states", "carried") else 1.0
                np.testing.assert_allclose(
                    ours / scale, theirs / scale, atol=tolerance, rtol=0, err_msg=field.name
                )
            else:
                assert ours == theirs, field.name
    cost = sum(trace.n_computed_tokens for _, (trace,) in together)
    assert cost < sum(trace.n_computed_tokens for _, (trace,) in alone) / 2


def test_answers_that_do_not_fit_one_reading_are_read_one_by_one(tiny_of):
    scorer = tiny_of(window_tokens=400)
    passages = [f"Passage {i} " + "about many things " * 6 for i in range(9)]
    records = [Record("q", passages, "An answer."), Record("q", ["A passage."], "Another. " * 50)]
    together = scorer.trace_together(records)
    assert len(together[0][0].windows) > 1 and len(together[1][0].segments) > 1
    for record, (_, traces) in zip(records, together, strict=True):
        for trace, alone in zip(traces, scorer.trace(record)[1], strict=True):
            np.testing.assert_array_equal(trace.logprob, alone.logprob)


def test_extremes_are_those_of_whole_distributions(tiny):
    reading, (trace,) = tiny.trace(RECORD, Keep(extremes=True))
    (window,) = reading.windows
    n_answer = len(reading.answer_ids)
    assert trace.top_logprob.shape == trace.bottom_logprob.shape == trace.rank.shape == (2, n_answer)
    for condition, prompt in enumerate((window.full, window.none)):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *reading.answer_ids]])
            logits = tiny.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits.double(), dim=-1).numpy()
        np.testing.assert_allclose(trace.top_logprob[condition], logp.max(-1), atol=1e-4)
        np.testing.assert_allclose(trace.bottom_logprob[condition], logp.min(-1), atol=1e-4)
        realised = logp[np.arange(n_answer), reading.answer_ids]
        assert trace.rank[condition].tolist() == (logp > realised[:, None]).sum(-1).tolist()
