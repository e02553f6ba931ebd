"""Predicted memory, against the tensors that are made. tests/figures/predicted_memory.py measures."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from detector import ScorerError, forward
from detector.memory import Extent, Sizes, most_pack_tokens, pack_bytes, predict_peak, weight_bytes
from detector.passes import _Pass
from detector.prefix_tree import build_tree
from detector.probe import Keep
from detector.prompts import read_record
from detector.record import Record
from detector.vocabulary import Head

SMOLLM2 = Sizes(
    layers=30,
    heads=9,
    kv_heads=3,
    head_width=64,
    width=576,
    intermediate=1536,
    vocabulary=49_152,
    item_bytes=4,
)
EXTENT = Extent(prompt_tokens=2030, context_tokens=2000, answer_tokens=200, pieces=10)
EXACT, MASKED, OFF = Keep(), Keep(masked=True), Keep(leave_one_out=False)
MODES = {"exact": EXACT, "masked": MASKED, "off": OFF}
RECORD = Record(
    question="Who built the bridge?",
    passages=[
        f"Passage {i} says that the bridge was built in 18{i}1 by one of them. " * 4 for i in range(1, 6)
    ],
    answer="Ada built it in 1891. It has been green since. Tolls ended in 1950.",
)


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


def sizes_of(scorer, dtype="float32"):
    return Sizes.of(scorer.model.config.to_dict(), dtype)


def reading_of(scorer, record=RECORD):
    return read_record(record, scorer.tokenizer, scorer.profile, scorer.window_tokens)


def test_the_cache_is_two_numbers_a_layer_key_head_width_and_token():
    assert predict_peak(SMOLLM2, EXTENT, MASKED).cache == 2 * 30 * 3 * 64 * 4 * 2230


def test_the_mlp_of_the_widest_node_makes_most_of_the_activations(mode):
    widest = {"exact": 1800 + 230, "masked": 2000, "off": 2230}
    (name,) = [name for name, keep in MODES.items() if keep == mode]
    peak = predict_peak(SMOLLM2, EXTENT, mode, cuda=True)
    assert peak.activations == widest[name] * 4 * (3 * 1536 + 3 * 576)


def test_a_narrow_mlp_leaves_the_most_to_attention():
    narrow = replace(SMOLLM2, intermediate=64)
    assert predict_peak(narrow, EXTENT, MASKED, cuda=True).activations == 2000 * 4 * (3 * 576 + 5 * 9 * 64)


def test_on_a_cpu_a_node_runs_in_parts_and_the_heap_has_holes(mode):
    peak = predict_peak(SMOLLM2, EXTENT, mode)
    part = 512 * 4 * (3 * 1536 + 3 * 576)
    assert peak.activations == part and peak.retained == part + peak.holes
    assert peak.holes == part * (5 if mode == EXACT else 1) // 3
    assert predict_peak(SMOLLM2, EXTENT, mode, cuda=True).holes == 0


def test_blocks_that_the_allocator_gives_back_leave_no_holes():
    wide = replace(SMOLLM2, intermediate=20_000)
    assert 512 * 20_000 * 4 > 32 << 20
    peak = predict_peak(wide, EXTENT, EXACT)
    assert (peak.holes, peak.retained) == (0, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_the_bytes_a_number_make_half_a_cache_and_float32_logits_all_the_same(dtype):
    full, half = predict_peak(SMOLLM2, EXTENT, EXACT, cuda=True), replace(SMOLLM2, item_bytes=2)
    gpu = predict_peak(half, EXTENT, EXACT, cuda=True)
    assert (2 * gpu.cache, 2 * gpu.activations, 2 * gpu.rows) == (full.cache, full.activations, full.rows)
    assert gpu.vocabulary == full.vocabulary
    # On a CPU the head's weights are turned into float32 for the product.
    cpu, cpu_half = (predict_peak(sizes, EXTENT, EXACT) for sizes in (SMOLLM2, half))
    assert cpu_half.vocabulary == cpu.vocabulary + 49_152 * 576 * 4


def test_more_passages_of_the_same_context_cost_their_rows_alone():
    peaks = [predict_peak(SMOLLM2, replace(EXTENT, pieces=k), MASKED) for k in (5, 50)]
    assert peaks[1].n_bytes - peaks[0].n_bytes == 45 * 200 * 576 * 4


def test_the_peak_is_that_of_a_layer_or_of_the_vocabulary_and_never_their_sum():
    long = predict_peak(SMOLLM2, EXTENT, MASKED)
    assert long.n_bytes == long.cache + long.activations + long.holes + long.rows + long.libraries
    peak = predict_peak(SMOLLM2, replace(EXTENT, prompt_tokens=130, context_tokens=100), MASKED)
    kept = max(peak.summed, peak.retained)
    assert peak.n_bytes == peak.vocabulary + kept + 2 * peak.rows + peak.libraries


def test_reading_attention_and_states_costs_its_tiles_and_what_is_kept():
    plain = predict_peak(SMOLLM2, EXTENT, MASKED)
    read = predict_peak(SMOLLM2, EXTENT, replace(MASKED, attention=True, layers=(16, 20)))
    assert plain.attention == plain.kept == 0
    assert read.attention > 3 * (8 << 20)
    assert read.kept == 2 * 201 * (2 * 30 * 9 * 4 + 2 * 2 * 576 * 4)
    assert read.rows == plain.rows * 201 // 200  # the last token's own row


def test_a_smaller_tile_takes_less_memory():
    sizes = [predict_peak(SMOLLM2, EXTENT, EXACT, block_bytes=n << 20).vocabulary for n in (64, 32, 8)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    assert all(size <= n << 20 for size, n in zip(sizes, (64, 32, 8), strict=True))


@pytest.mark.parametrize("profile", ["plain", "chat"])
def test_the_widest_node_is_that_of_the_tree(tiny_of, mode, profile):
    scorer = tiny_of(profile=profile)
    reading = reading_of(scorer)
    (window,), (segment,) = reading.windows, reading.segments
    tree = build_tree(_Pass.of(reading, window, segment, mode).sequences)
    widest = max(len(node.tokens) for node in tree.walk())
    sizes, peak = sizes_of(scorer), predict_peak(sizes_of(scorer), Extent.of(reading), mode, cuda=True)
    per_token = 4 * max(3 * sizes.width + 3 * sizes.intermediate, 3 * sizes.width + 5 * 4 * 8)
    around = len(window.full) - (window.layout.passages[1] - window.layout.passages[0])
    # The text before the passages is counted with the text after them, and a passage may begin as others do.
    assert widest <= peak.activations / per_token <= widest + around


def test_cache_and_tile_have_the_size_that_was_predicted(tiny, mode, monkeypatch):
    places, tiles = [], []
    take, logits = forward._Room.take, Head.logits

    def taken(self, like, shape):
        out = take(self, like, shape)
        places.append(out.nbytes)
        return out

    def made(self, *arguments):
        out = logits(self, *arguments)
        tiles.append(out.nbytes)
        return out

    monkeypatch.setattr(forward._Room, "take", taken)
    monkeypatch.setattr(Head, "logits", made)
    tiny.trace(RECORD, mode)
    peak = predict_peak(sizes_of(tiny), Extent.of(reading_of(tiny)), mode)
    # The last answer token predicts nothing, so it is not read where nothing is kept of it.
    assert sum(places) == pytest.approx(peak.cache, rel=0.01) and sum(places) <= peak.cache
    assert max(tiles) == peak.vocabulary


def test_the_extent_of_a_record_is_that_of_its_largest_window_and_segment(tiny_of):
    scorer = tiny_of(window_tokens=300)
    long = replace(RECORD, answer=" ".join(f"Sentence {i} says so." for i in range(40)))
    reading = reading_of(scorer, long)
    extent = Extent.of(reading)
    assert extent.windows == len(reading.windows) > 1 and len(reading.segments) > 1
    assert extent.prompt_tokens + extent.answer_tokens <= 300
    assert extent.answer_tokens < len(reading.answer_ids)
    assert 0 < extent.context_tokens < extent.prompt_tokens


def test_a_filled_extent_takes_the_window_and_keeps_answer_and_passages():
    filled = EXTENT.filled(8192)
    assert filled.prompt_tokens + filled.answer_tokens == 8192
    assert filled.prompt_tokens - filled.context_tokens == 30
    assert (filled.answer_tokens, filled.pieces) == (200, 10)


def test_sizes_are_read_off_a_configuration_before_any_weight(tiny_scorer_dir):
    tree = json.loads((tiny_scorer_dir / "config.json").read_text())
    assert Sizes.of(tree, "bfloat16") == Sizes(2, 4, 2, 8, 32, 64, tree["vocab_size"], 2)
    nested = {"model_type": "gemma3", "text_config": tree}
    assert Sizes.of(nested, "float32") == Sizes.of(tree, "float32")


def test_a_configuration_that_does_not_tell_is_one_line():
    tree = AutoConfig.for_model("gpt2").to_dict()
    with pytest.raises(ScorerError, match="gpt2") as caught:
        Sizes.of(tree, "float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_weights_take_what_the_loaded_model_takes(tiny, tiny_scorer_dir, dtype, item):
    assert weight_bytes(tiny_scorer_dir, dtype) == item * sum(p.numel() for p in tiny.model.parameters())


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x05" + b"\0" * 7 + b"{1"]
)
def test_weights_that_are_none_are_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ScorerError) as caught:
        weight_bytes(tmp_path, "float32")
    assert "\n" not in str(caught.value)


def test_places_of_a_room_are_one_large_block_and_one_too_many_stands_alone():
    room, like = forward._Room(4), torch.zeros(1)
    places = [room.take(like, shape) for shape in ((2, 3), (3, 2), (6, 1))]
    more = room.take(like, (3000, 3000))
    assert places[0].untyped_storage().nbytes() > 32 << 20  # which the allocator gives back when it is freed
    assert len({place.untyped_storage().data_ptr() for place in places}) == 1
    assert more.untyped_storage().data_ptr() != places[0].untyped_storage().data_ptr()
    for value, place in enumerate(places):
        place.fill_(value)
    assert [place.unique().tolist() for place in places] == [[0.0], [1.0], [2.0]]
    assert [tuple(place.shape) for place in (*places, more)] == [(2, 3), (3, 2), (6, 1), (3000, 3000)]


def test_a_pack_takes_what_its_widest_layer_and_its_states_take():
    half = replace(SMOLLM2, item_bytes=2)
    assert pack_bytes(half, 1000) == 1000 * 2 * (3 * 576 + 3 * 1536 + 2 * 576)
    narrow = replace(half, intermediate=64)
    assert pack_bytes(narrow, 1000) == 1000 * 2 * (3 * 576 + 5 * 9 * 64 + 2 * 576)


def test_packs_are_the_same_on_cards_that_are_free_to_a_few_per_cent_more_or_less():
    half = replace(SMOLLM2, item_bytes=2)
    whole = 2 * pack_bytes(half, 1 << 15)
    assert {most_pack_tokens(half, int(whole * part)) for part in (1.0, 1.05, 1.5, 1.99)} == {1 << 15}
    assert most_pack_tokens(half, whole - 2) == 1 << 14
