"""Packs against the cached walk, their mask against a walk up the tree, FlexAttention against the mask."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch.nn.attention import flex_attention as flex_module
from transformers import AutoConfig, AutoModelForCausalLM

from detector import RecordRejected, ScorerError, attention, forward, passes
from detector.aggregate import Measurement
from detector.errors import RejectReason
from detector.forward import can_pack, last_rows, packed_rows, prefers_packs
from detector.packed import BLOCK, EVERYTHING, LEAST_PACK_TOKENS, PACK_TOKENS, Pack, flex, plan_forest
from detector.prefix_tree import Forest, build_tree, hide
from detector.probe import Keep
from detector.record import Record
from detector.scorers import READABLE
from detector.trace import Trace
from tests.detector.families import FAMILIES, RECORD, make_scorer
from tests.detector.test_vocabulary import FULL

KEEPS = {
    "exact": Keep(extremes=True, attention=True, layers=(1, 4), carried=True, piece_attention=True),
    "masked": Keep(masked=True, attention=True, layers=(2, 4), carried=True),
    "two passes": Keep(leave_one_out=False),
}
RECORDS = [
    RECORD,
    Record("Who was it?", ["Ada built the bridge in 1891.", "Nobody paid."], "It was Ada. She built it."),
    dataclasses.replace(RECORD, answer="Ada built it in 1890."),  # shares its prompt with the first
    Record("q", ["A passage."], "a"),
]


def assert_same(found, wanted, tolerance):
    """Traces are equal but for rounding, and but for the tokens that others have paid for."""
    for field in dataclasses.fields(Trace):
        ours, theirs = getattr(found, field.name), getattr(wanted, field.name)
        assert type(ours) is type(theirs), field.name
        if field.name == "rank" and theirs is not None:  # of two tokens that are as likely
            assert np.abs(ours - theirs).max() <= (tolerance > 1e-9)
        elif isinstance(theirs, np.ndarray):
            scale = max(1.0, float(np.abs(theirs).max())) if field.name in ("states", "carried") else 1.0
            np.testing.assert_allclose(
                ours / scale, theirs / scale, atol=tolerance, rtol=0, err_msg=field.name
            )
        elif field.name != "n_computed_tokens":
            assert ours == theirs, field.name


def walked(scorer, records, keep):
    scorer.packed = False
    return [scorer.trace(record, keep)[1] for record in records]


def handed_over(scorer, run):
    """The lengths of all that the body was given."""
    lengths = []
    hook = scorer.model.base_model.register_forward_pre_hook(
        lambda _module, _args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        return run(), lengths
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("mode", "dtype", "tolerance"),
    [*((mode, torch.float64, 1e-10) for mode in KEEPS), ("masked", torch.float32, 2e-5)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_has_the_numbers_of_the_walk_alone_together_and_in_any_order(
    tiny_scorer_dir, family, dtype, mode, tolerance
):
    scorer, keep = make_scorer(tiny_scorer_dir, family, dtype=dtype), KEEPS[mode]
    records = [RECORDS[i] for i in (0, 2, 3)]
    wanted = walked(scorer, records, keep)
    scorer.packed = True
    (_, (alone,)), lengths = handed_over(scorer, lambda: scorer.trace(RECORD, keep))
    assert_same(alone, wanted[0][0], tolerance)
    assert alone.n_computed_tokens == wanted[0][0].n_computed_tokens
    assert len(lengths) == 1 and 0 <= lengths[0] - alone.n_computed_tokens < 2 * BLOCK
    order = [2, 1, 0] if mode == "exact" else [0, 1, 2]
    together, lengths = handed_over(scorer, lambda: scorer.trace_many([records[i] for i in order], keep))
    n_tokens = 0
    for index, (_, traces) in zip(order, together, strict=True):
        assert_same(traces[0], wanted[index][0], tolerance)
        n_tokens += traces[0].n_computed_tokens
    # Each token once, though two records share a prompt, and padding is not among them.
    assert len(lengths) == 1 and 0 <= lengths[0] - n_tokens < 2 * BLOCK
    assert n_tokens < sum(trace.n_computed_tokens for (trace,) in wanted)


@pytest.mark.parametrize("family", READABLE)
def test_every_readable_family_can_be_packed(family):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "initializer_range": 0.3}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    known = AutoConfig.for_model(family).to_dict()
    layers = {"layer_types": known["layer_types"][:2]} if known.get("layer_types") else {}
    if known.get("sliding_window"):
        layers["sliding_window"] = 12
    config = AutoConfig.for_model(family, **{k: v for k, v in sizes.items() if k in known} | layers)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = AutoModelForCausalLM.from_config(config).eval().base_model
    attention.register()
    body.set_attn_implementation(attention.NAME)
    ids = tuple(range(5, 45))
    sequences = [ids, ids[:9] + ids[20:], ids[:30] + hide(ids[30:], 3, 25)]
    assert can_pack(body)
    found, n_tokens = packed_rows(body, sequences, [6, 3, 8])
    wanted, n_walked = last_rows(body, sequences, [6, 3, 8])
    assert n_tokens == n_walked
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def forests(n, seed=0):
    """Random trees with deep and shallow branches, equal sequences and hidden spans."""
    source = random.Random(seed)
    for _ in range(n):
        made = [tuple(source.choices(range(3), k=source.randint(1, 90)))]
        for _ in range(source.randint(1, 9)):
            start = source.choice(made)
            cut = source.randint(0, len(start))
            rest = tuple(source.choices(range(3), k=source.randint(1, 90)))
            if cut > 2 and source.random() < 0.4:
                rest = hide(rest, *sorted(source.sample(range(cut), 2)))
            made.append(start[:cut] + rest)
        yield [*made, made[-1]]


def up_the_tree(tree, pack, window):
    """(T, T) what each token may see, found by following every sequence by itself."""
    seen = np.eye(len(pack.tokens), dtype=bool)
    seen[: pack.n_tokens] = False
    for sequence in tree.sequences:
        path = pack.places(sequence).tolist()
        nodes = [node for node in tree.walk() if sequence in node.sequences]
        hidden = [node.hidden or (0, 0) for node in nodes for _ in node.tokens]
        for row, (start, stop) in enumerate(hidden):
            for at in range(max(0, row - window + 1), row + 1):
                seen[path[row], path[at]] = not start <= at < stop
    return seen


@pytest.mark.parametrize("window", [EVERYTHING, 17])
def test_a_token_sees_its_path_without_what_is_hidden_and_what_has_slid_out(window):
    for sequences in forests(25):
        tree = build_tree(sequences)
        pack = Pack.of(tree)
        seen = pack.dense_mask(window).numpy()
        np.testing.assert_array_equal(seen, up_the_tree(tree, pack, window))
        blocked = seen.reshape(len(seen) // BLOCK, BLOCK, -1, BLOCK)
        some, every = (blocks.numpy() for blocks in pack.blocks(window))
        assert not (blocked.any((1, 3)) & ~some).any() and not (every & ~blocked.all((1, 3))).any()
        assert not (every & ~some).any()
        for index, sequence in enumerate(sequences):
            at = pack.places(index)
            assert pack.tokens[at].tolist() == [token & 0xFFFFFFFF for token in sequence]
            assert pack.positions[at].tolist() == list(range(len(sequence)))
            assert torch.equal(pack.places(index, 1), at[-1:])


def test_blocks_of_siblings_hidden_spans_and_slid_out_positions_are_never_visited():
    read, rest = tuple(range(8 * BLOCK)), tuple(range(2 * BLOCK))
    sequences = [read + rest, read + hide((7, *rest[1:]), 2 * BLOCK + 5, 5 * BLOCK)]
    pack = Pack.of(build_tree(sequences))
    some, every = pack.blocks()
    assert some.shape == (12, 12)
    assert some[10].tolist() == [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True, False]
    assert every[11].tolist() == [True, True] + [False] * 3 + [True] * 3 + [False] * 2 + [True, False]
    some, _ = pack.blocks(BLOCK)
    assert some[9].tolist() == [False] * 8 + [True, True] + [False] * 2


def operands(pack, n_heads=6, n_kv=2):
    torch.manual_seed(0)
    return [torch.randn(1, n, len(pack.tokens), 16) for n in (n_heads, n_kv, n_kv)]


@pytest.mark.parametrize("window", [EVERYTHING, 17])
def test_flex_attention_with_our_mask_is_attention_with_the_dense_one(monkeypatch, window):
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    pack = Pack.of(build_tree(next(forests(1, seed=3))))
    query, key, value = operands(pack)
    found = flex(query, key, value, 0.3, pack.columns, pack.block_lists(window), window)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=pack.dense_mask(window), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_flex_attention_is_traced_once_for_all_lengths_and_windows():
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    run = torch.compile(flex, dynamic=True, backend=counter)
    torch._dynamo.reset()
    for n_tokens, window in ((300, EVERYTHING), (500, 40)):
        pack = Pack.of(build_tree([tuple(range(n_tokens)), (*range(n_tokens // 2), 7, 8)]))
        run(*operands(pack), 0.3, pack.columns, pack.block_lists(window), window)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["gemma 3, mixed layers", "llama with shared keys"])
def test_a_whole_model_on_flex_attention_has_the_numbers_of_the_walk(tiny_scorer_dir, monkeypatch, family):
    scorer = make_scorer(tiny_scorer_dir, family)
    (((wanted,)),) = walked(scorer, [RECORD], KEEPS["masked"])
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention, "_has_flex", lambda _: True)
    monkeypatch.setattr(attention, "compiled_flex", lambda: flex)
    monkeypatch.setattr(Pack, "dense_mask", None)
    scorer.packed = True
    assert_same(scorer.trace(RECORD, KEEPS["masked"])[1][0], wanted, 2e-5)


def test_windows_and_segments_are_packed_with_the_records_around_them(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir, window_tokens=260, dtype=torch.float64)
    answer = " ".join(f"Sentence {i} says so." for i in range(9))
    passages = [f"Passage {i} is about many things and more." for i in range(4)]
    records = [RECORDS[3], Record("q", passages, answer), RECORDS[3]]
    wanted = walked(scorer, records, KEEPS["masked"])
    scorer.packed = True
    found = scorer.trace_many(records, KEEPS["masked"])
    reading, traces = found[1]
    assert len(reading.windows) == len(traces) > 1 and len(reading.segments) > 1
    for (_, ours), theirs in zip(found, wanted, strict=True):
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their, 1e-10)
    assert found[2][1][0].n_computed_tokens == 0 < found[0][1][0].n_computed_tokens


def test_answers_to_one_question_and_a_foil_are_packed_too(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir, dtype=torch.float64)
    records, keep = [RECORDS[0], RECORDS[2]], Keep(foil=True, masked=True)
    (traces,) = walked(scorer, records[:1], KEEPS["exact"])
    _, (plain,) = scorer.trace(RECORD, keep, foil=RECORDS[1].passages)
    scorer.packed = True
    assert_same(scorer.trace_together(records, KEEPS["exact"])[0][1][0], traces[0], 1e-10)
    assert_same(scorer.trace(RECORD, keep, foil=RECORDS[1].passages)[1][0], plain, 1e-10)


def test_a_pack_skips_the_same_pieces_but_saves_nothing(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir, dtype=torch.float64)
    keep = Keep(least_share=0.34)
    (((wanted,)),) = walked(scorer, [RECORD], keep)
    scorer.packed = True
    _, (found,) = scorer.trace(RECORD, keep)
    assert found.skipped == wanted.skipped != ()
    assert_same(found, wanted, 1e-10)
    assert found.n_computed_tokens > wanted.n_computed_tokens


def test_a_forest_counts_what_its_tree_would_hold():
    for sequences in forests(40):
        forest = Forest()
        assert sum(forest.add([one]) for one in sequences) == forest.n_tokens
        assert forest.n_tokens == build_tree(sequences).n_tokens


def test_loads_keep_the_order_and_the_budget_and_split_no_record():
    records = [list(sequences) for sequences in forests(30, seed=1)]
    for budget in (1, 150, 400, 3000, 1 << 20):
        loads = plan_forest(records, budget)
        assert [i for load in loads for i in range(load.start, load.stop)] == list(range(30))
        for load, after in itertools.zip_longest(loads, loads[1:]):
            own = [one for record in records[load.start : load.stop] for one in record]
            assert load.n_tokens == build_tree(own).n_tokens
            assert load.fits == (load.n_tokens <= budget) and (load.fits or load.stop - load.start == 1)
            if after is not None and load.fits:  # the next one would not have gone in as well
                assert build_tree(own + records[after.start]).n_tokens > budget
        assert loads == plan_forest(records, budget)


def runs_of(scorer, monkeypatch, fail=lambda n_records, packed: False):
    """What `Passes._run` is asked for, as (passes, packed); it fails where it is told to."""
    asked, original = [], passes.Passes._run

    def run(self, given, keep, *, packed):
        asked.append((len(given), packed))
        if fail(len(given), packed):
            raise FULL["torch"]
        return original(self, given, keep, packed=packed)

    monkeypatch.setattr(passes.Passes, "_run", run)
    return asked


def test_a_record_over_the_budget_is_walked_between_packs(tiny, monkeypatch):
    asked = runs_of(tiny, monkeypatch)
    long = Record("q", ["A passage about many things. " * 9], "An answer.")
    wanted = [trace for (trace,) in walked(tiny, [RECORDS[3], long, RECORDS[3]], Keep())]
    asked.clear()
    monkeypatch.setattr(tiny._passes, "pack_tokens", wanted[0].n_computed_tokens + 9)
    monkeypatch.setattr(tiny._passes, "_packed", True)
    found = tiny.trace_many([RECORDS[3], long, RECORDS[3], RECORDS[3]])
    assert asked == [(1, True), (1, False), (2, True)]
    np.testing.assert_array_equal(found[1][1][0].logprob, wanted[1].logprob)
    asked.clear()
    assert tiny.trace(long)[1][0].n_computed_tokens == wanted[1].n_computed_tokens
    assert asked == [(1, False)]


def test_a_pack_that_memory_does_not_hold_is_halved_until_it_does(tiny, monkeypatch):
    monkeypatch.setattr(tiny._passes, "_packed", True)
    monkeypatch.setattr(tiny._passes, "pack_tokens", PACK_TOKENS)
    asked = runs_of(tiny, monkeypatch, lambda n, packed: packed and n > 2)
    found = tiny.trace_many([dataclasses.replace(RECORD, question=f"Who built {i}?") for i in range(6)])
    assert [n for n, _ in asked] == [6, 2, 4, 1, 3, 1, 2] and all(packed for _, packed in asked)
    assert len(found) == 6
    assert tiny._passes.pack_tokens == LEAST_PACK_TOKENS  # these packs were smaller than that


def test_what_no_pack_holds_is_walked_and_what_a_walk_does_not_hold_is_one_reject(tiny, monkeypatch):
    monkeypatch.setattr(tiny._passes, "_packed", True)
    monkeypatch.setattr(tiny._passes, "pack_tokens", PACK_TOKENS)
    asked = runs_of(tiny, monkeypatch, lambda n, packed: packed)
    assert tiny.trace(RECORD)[1] and tiny.trace_many([RECORD])[0][1]
    assert asked == [(1, True), (1, False)] * 2
    with monkeypatch.context() as patch:
        runs_of(tiny, patch, lambda n, packed: True)
        (rejected,) = tiny.trace_many([RECORD])
        assert rejected.reason is RejectReason.SCORING_FAILED and "memory" in rejected.detail
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            tiny.trace(RECORD)


@pytest.mark.parametrize("packs", [False, True])
def test_many_are_measured_as_each_alone_and_rejects_keep_their_place(tiny_scorer_dir, packs):
    scorer = make_scorer(tiny_scorer_dir, dtype=torch.float64)
    records = [RECORD, Record("q", [" "], "a"), RECORDS[1], Record("q", ["A passage."], " "), RECORDS[3]]
    scorer.packed = packs
    found = scorer.measure_many(records, masked=True, min_answer_tokens=2)
    kinds = [one.reason if isinstance(one, RecordRejected) else type(one) for one in found]
    too_short = RejectReason.ANSWER_TOO_SHORT
    assert kinds == [
        *(Measurement, RejectReason.PASSAGE_TEXT_MISSING, Measurement, RejectReason.MISSING_ANSWER, too_short)
    ]
    scorer.packed = False
    for index in (0, 2):
        alone = scorer.measure(records[index], masked=True)
        if not packs:
            assert found[index] == alone
        for ours, theirs in zip(found[index].sentences, alone.sentences, strict=True):
            assert ours.features.gap == pytest.approx(theirs.features.gap, abs=1e-9)
            assert ours.features.drops == pytest.approx(theirs.features.drops, abs=1e-9)


def test_on_a_cpu_records_are_walked(tiny_scorer_dir):
    scorer = make_scorer(tiny_scorer_dir)
    assert can_pack(scorer.model.base_model) and not prefers_packs(scorer.model.base_model)
    assert not scorer.packed


def test_on_a_gpu_free_memory_bounds_packs(tiny_scorer_dir, monkeypatch):
    for free_bytes, n_tokens in ((0, LEAST_PACK_TOKENS), (200 << 30, PACK_TOKENS)):
        scorer = make_scorer(tiny_scorer_dir)
        assert scorer._passes.pack_tokens == PACK_TOKENS
        monkeypatch.setattr(passes, "prefers_packs", lambda _: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free_bytes: (free, 2 * free))
        assert scorer.packed and scorer._passes.pack_tokens == n_tokens


@pytest.mark.parametrize("change", ["eager", "gpt2", "longrope", "dynamic"])
def test_what_a_pack_would_change_is_not_packed(tiny_scorer_dir, change):
    body = make_scorer(tiny_scorer_dir).model.base_model
    if change == "eager":
        body.set_attn_implementation("eager")
        with pytest.raises(ScorerError, match="Leadline's interface"):
            packed_rows(body, [(5, 6)], [1])
    elif change == "gpt2":
        body.config.model_type = change
    else:
        body.config.rope_parameters = {"rope_type": change}
    assert not can_pack(body)


def test_a_layer_that_slides_unannounced_is_refused(tiny_scorer_dir):
    body = make_scorer(tiny_scorer_dir, "mistral, sliding window").model.base_model
    body.config.layer_types = ["full_attention"] * 3
    with pytest.raises(ScorerError, match="cannot be packed") as caught:
        packed_rows(body, [(5, 6)], [1])
    assert "\n" not in str(caught.value)


def trial(monkeypatch, tiny_scorer_dir, outcome):
    """`prefers_packs` of a model that says it is on a GPU, where a pack's run ends as told."""
    body = make_scorer(tiny_scorer_dir).model.base_model
    monkeypatch.setattr(forward.importlib.util, "find_spec", lambda _: True)
    original = forward.packed_rows

    def run(*arguments):
        if isinstance(outcome, Exception):
            raise outcome
        rows, n_tokens = original(*arguments)
        return [row + outcome for row in rows], n_tokens

    monkeypatch.setattr(forward, "packed_rows", run)
    monkeypatch.setattr(forward, "_on_cuda", lambda _: True)
    return prefers_packs(body)


@pytest.mark.parametrize(
    ("outcome", "prefers"), [(0.0, True), (9.0, False), (RuntimeError("no C compiler"), False)], ids=str
)
def test_a_trial_decides_whether_a_gpu_runs_packs(monkeypatch, tiny_scorer_dir, outcome, prefers):
    assert trial(monkeypatch, tiny_scorer_dir, outcome) is prefers
