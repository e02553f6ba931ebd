"""The page: what it says, what it hides, and that no log text can turn it against its reader."""

import re
import shlex
from pathlib import Path

import pytest

from detector.calibration import FEATURES as MEASURED
from detector.methods import METHODS
from jobs.config import load_config
from jobs.errors import ConfigError, JobError
from jobs.report import collect, render, write_report
from jobs.report.cards import anchor
from jobs.report.wording import FEATURES, PHRASES, direction, explain_decision, percent
from jobs.report.wording import REASONS as MEANINGS
from jobs.storage import Storage
from jobs.tables import REASONS
from tests.jobs.report.fake_run import LOG, Answer, Reject, Said, write_fake_run
from tests.jobs.report.reader import flat, read_page

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}</style>'&amp;"


# --- what it says


def test_verdict_counts_sentences_and_answers_with_the_wilson_interval(tmp_path: Path) -> None:
    answers = [flat(3.0 if i < 6 else -1.0, f"r{i}") for i in range(16)]
    page = read_page(tmp_path, answers, [Reject("no_passages"), Reject("malformed_row")])
    assert page.inside["h1"] == ["6 of 16 sentences in 6 of 16 answers lean least on their passages"]
    assert "6 of 16, 95 % Wilson interval 18.5 % to 61.4 %" in page.words.replace("\xa0", " ")
    assert "18 = 16 audited + 2 rejected, from 2 files (1 empty)" in page.words
    assert "no passage was retrieved" in page.words


def test_own_threshold_is_called_a_budget_and_not_an_error_rate(tmp_path: Path) -> None:
    words = read_page(tmp_path, [flat(3.0, "r1")]).words.replace("\xa0", " ")
    assert "display budget: it shows at most 10 % of this run’s sentences" in words
    assert "not an error rate, because no calibrated profile was given" in words
    assert "“worth reading first”, not “proven false”" in words


def test_given_threshold_is_said_to_come_from_its_profile(tmp_path: Path) -> None:
    words = read_page(tmp_path, [flat(3.0, "r1")], threshold_from="00aa11bb22cc").words
    assert "comes from a given profile" in words
    assert "run 00aa11bb22cc" in words
    assert "display budget" not in words
    assert "the budget is" not in words


def test_one_flagged_sentence_is_singular(tmp_path: Path) -> None:
    page = read_page(tmp_path, [flat(3.0, "r1")])
    assert page.inside["h1"] == ["1 of 1 sentence in 1 of 1 answer leans least on its passages"]


def test_nothing_flagged(tmp_path: Path) -> None:
    page = read_page(tmp_path, [flat(-1.0, "r1"), flat(-2.0, "r2")])
    assert page.inside["h1"] == ["None of 2 sentences in 2 answers reaches the threshold"]


def test_nothing_read(tmp_path: Path) -> None:
    page = read_page(tmp_path, threshold=None, files=[])
    assert page.inside["h1"] == ["No answer could be audited"]
    assert "No row was read." in page.words
    assert "No row was rejected." in page.words


def test_everything_rejected(tmp_path: Path) -> None:
    page = read_page(tmp_path, [], [Reject(reason) for reason in REASONS], threshold=None)
    assert page.inside["h1"] == ["No answer could be audited"]
    assert all(MEANINGS[reason] in page.words for reason in REASONS)


def test_every_reason_has_a_meaning() -> None:
    assert set(MEANINGS) == set(REASONS)


def test_slices_are_ordered_by_excess_and_not_by_rate(tmp_path: Path) -> None:
    big, tiny = {"app": "big"}, {"app": "tiny"}
    answers = [flat(3.0 if i < 30 else -1.0, f"b{i}", dimensions=big) for i in range(60)]
    answers += [flat(3.0, "t0", dimensions=tiny)]
    answers += [flat(-1.0, f"o{i}", dimensions={"app": "other"}) for i in range(40)]
    config = write_fake_run(str(tmp_path), answers)
    slices = collect(str(tmp_path), Storage(), config).where.together.slices
    assert [row.values[0] for row in slices] == ["big", "tiny", "other"]
    assert [row.small for row in slices] == [False, True, False]
    assert [round(row.excess, 3) for row in slices] == [11.584, 0.693, -12.277]
    assert slices[0].card == anchor("b0")


def test_each_dimension_that_varies_is_also_shown_alone(tmp_path: Path) -> None:
    answers = [
        flat(3.0 if i % 2 else -1.0, f"r{i}", dimensions={"app": f"a{i % 2}", "retriever": f"b{i // 2 % 2}"})
        for i in range(8)
    ]
    config = write_fake_run(str(tmp_path), answers)
    where = collect(str(tmp_path), Storage(), config).where
    assert [(row.values, row.excess) for row in where.alone.slices] == [
        (("app", "a1"), 2.0),
        (("app", "a0"), -2.0),
        (("retriever", "b0"), 0.0),
        (("retriever", "b1"), 0.0),
    ]
    assert where.overall == 0.5


def test_dimensions_that_do_not_vary_are_left_out(tmp_path: Path) -> None:
    answers = [flat(1.0, f"r{i}", dimensions={"prompt_version": f"v{i}", "language": "en"}) for i in (1, 2)]
    config = write_fake_run(str(tmp_path), answers)
    where = collect(str(tmp_path), Storage(), config).where
    assert where.alone.slices == ()
    assert where.together.columns == ("app", "model", "retriever", "prompt_version")


def test_slices_of_several_dates_are_added_up(tmp_path: Path) -> None:
    answers = [flat(3.0, "r1", date="2026-11-28"), flat(-1.0, "r2", date="2026-11-29")]
    config = write_fake_run(str(tmp_path), answers)
    page = collect(str(tmp_path), Storage(), config)
    assert page.dates == "2026-11-28 to 2026-11-29"
    assert [(row.share.count, row.share.total) for row in page.where.together.slices] == [(1, 2)]


def test_more_slices_than_fit_are_counted(tmp_path: Path) -> None:
    answers = [flat(1.0, f"r{i}", dimensions={"app": f"app-{i}"}) for i in range(70)]
    assert "10 more rows with less excess are in the summary table" in read_page(tmp_path, answers).words


# --- judged by a bundle


def test_operating_point_is_said_to_be_measured_on_other_data(tmp_path: Path) -> None:
    page = read_page(tmp_path, [flat(0.9, "r1"), flat(0.2, "r2")], threshold=0.6, bundle=True)
    words = page.words.replace("\xa0", " ")
    assert page.inside["h1"] == ["1 of 2 sentences in 1 of 2 answers is judged to rest on nothing"]
    assert "The method that judged is ensemble." in words
    assert (
        "trained on (Made-Up QA, English) it flags 5 % of the sentences that people found supported" in words
    )
    assert "was not measured on this traffic" in words
    assert "budget" not in words
    for fact in ("b0b1b2b3b4b5, trained on Made-Up QA, English", "0.6000, operating point of bundle"):
        assert fact in words
    assert "It learned <b>nothing</b>." in words
    assert "leadline judge" in words and "--target-fpr 0.02" in words


def test_each_sentence_says_which_signals_its_verdict_rests_on(tmp_path: Path) -> None:
    said = [Said("Invented.", 0.9), Said("Supported.", 0.1)]
    page = read_page(tmp_path, [Answer(said)], threshold=0.6, bundle=True)
    assert "mostly by" in page.inside["th"]
    assert "states +1.40" in page.inside[f"#{anchor('r-1')}-1"][0]  # what adds most to a flag
    assert "likelihood −0.30" in page.inside[f"#{anchor('r-1')}-2"][0]  # what speaks most against one
    assert "what the scorer holds inside while it reads (states)" in page.words


def test_label_free_page_names_its_method_and_has_no_column_for_reasons(tmp_path: Path) -> None:
    page = read_page(tmp_path, [flat(3.0, "r1")])
    assert "The method that judged is blend." in page.words
    assert "mostly by" not in page.words and "operating point" not in page.words


def test_page_says_what_the_deciding_method_reads_and_which_way_it_counts(tmp_path: Path) -> None:
    page = read_page(tmp_path, [flat(3.0, "r1")])
    assert (
        "how far the predictions move when all passages go; what share of it stands in no passage even two "
        "words in a row; how much the scorer looks at the passages and not back at the answer; how long it "
        "is (logarithm of its tokens)." in page.words
    )
    assert (
        "they are added up. The smaller the first and the third and the larger the second and the fourth, "
        "the higher the score: less grounded." in page.words
    )
    assert "The smaller, the higher the score" in " ".join(explain_decision("gasp", "exact", 0.05))
    assert "The larger, the higher the score" in " ".join(explain_decision("length", "exact", 0.05))
    assert "hidden from the answer" in " ".join(explain_decision("length", "masked", 0.05))


def test_every_method_and_every_statistic_has_its_words() -> None:
    assert set(PHRASES) == set(METHODS)
    assert set(FEATURES) == set(MEASURED)


def test_command_of_a_run_with_defaults_sets_nothing(tmp_path: Path) -> None:
    config = write_fake_run(str(tmp_path), [], threshold=0.6, bundle=True)
    command = shlex.split(collect(str(tmp_path), Storage(), config).provenance.audit_command)
    assert command == ["leadline", "audit", "/logs/2026-11-29", "--out", "NEW_OUT"]


def test_command_of_a_run_names_the_bundle_and_the_method_that_were_asked_for(tmp_path: Path) -> None:
    settings = {"bundle": "s3://b/head", "judge": {"deciding_method": "gap"}}
    config = write_fake_run(str(tmp_path), [], threshold=0.6, bundle=True, settings=settings)
    command = shlex.split(collect(str(tmp_path), Storage(), config).provenance.audit_command)
    assert 'bundle="s3://b/head#b0b1b2b3b4b5"' in command and 'judge.deciding_method="gap"' in command


# --- cards


def test_flagged_answers_come_first_then_the_highest_score(tmp_path: Path) -> None:
    answers = [flat(score, f"r{score}") for score in (-1.0, 2.5, 0.5, 4.0, 1.9)]
    config = write_fake_run(str(tmp_path), answers, per_part=2, settings={"report": {"cards": 4}})
    cards = collect(str(tmp_path), Storage(), config).cards
    assert [card.response_id for card in cards] == ["r4.0", "r2.5", "r1.9", "r0.5"]
    assert [card.flagged for card in cards] == [True, True, False, False]


def test_page_without_cards(tmp_path: Path) -> None:
    page = read_page(tmp_path, [flat(3.0, "r1")], settings={"report": {"cards": 0}})
    assert "card" not in page.inside
    assert "No answer to show." in page.words


def test_answer_stands_as_it_was_served(tmp_path: Path) -> None:
    said = [
        Said("First.", 0.0, after="\n\n\t "),
        Said("Zweiter — Satz!", 3.0, after="  "),
        Said("三。", 1.0, after="\n"),
    ]
    page = read_page(tmp_path, [Answer(said)])
    assert page.inside["answer"][-1] == "First.\u20601\n\n\t Zweiter — Satz!\u20602  三。\u20603\n"


def test_higher_scores_are_darker_and_flags_are_underlined(tmp_path: Path) -> None:
    said = [Said(f"Sentence {score}.", score, after=" ") for score in (-6.0, -1.0, 0.5, 1.9, 2.0, 6.0)]
    config = write_fake_run(str(tmp_path), [Answer(said)])
    card = collect(str(tmp_path), Storage(), config).cards[0]
    levels = [row.level for row in card.rows]
    assert levels == sorted(levels) and levels[0] == 0 and levels[-1] == 6
    html = render(collect(str(tmp_path), Storage(), config))
    assert len(re.findall(r'<a class="l\d f" href', html)) == 2


def test_sentence_leads_to_its_row_and_the_row_to_its_passage(tmp_path: Path) -> None:
    passages = [
        {"id": "kb-1", "text": "Nothing here."},
        {"id": "kb-2", "text": "The warranty lasts two years."},
    ]
    said = [Said("Two years.", -1.0, 1, 0.84), Said("Five, in fact.", 3.0)]
    page = read_page(tmp_path, [Answer(said, passages)])
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    targets = [attributes["href"] for tag, attributes in page.tags if tag == "a" and "href" in attributes]
    assert len(ids) == len(set(ids))
    assert {target.removeprefix("#") for target in targets} <= set(ids)
    r = anchor("r-1")
    assert f"#{r}-p2" in targets
    assert "passage 2" in page.inside[f"#{r}-1"][0] and "0.84" in page.inside[f"#{r}-1"][0]
    assert "no passage matters" in page.inside[f"#{r}-2"][0]
    assert "evidence for 1" in page.inside[f"#{r}-p2"][0]
    assert "evidence" not in page.inside[f"#{r}-p1"][0]


def test_only_the_piece_that_matters_is_marked(tmp_path: Path) -> None:
    passage = "Sold in boxes. The warranty lasts two years. Made in Turin."
    said = [
        Said("Two years.", -1.0, 0, piece="The warranty lasts two years. "),
        Said("From Turin.", -1.0, 0, piece="Made in Turin."),
    ]
    page = read_page(tmp_path, [Answer(said, [passage])])
    assert page.inside["mark"][1:] == ["The warranty lasts two years. ", "Made in Turin."]  # [0]: the legend
    assert passage in page.inside["passage"][0]


def test_passage_that_matters_as_a_whole_is_one_mark(tmp_path: Path) -> None:
    config = write_fake_run(str(tmp_path), [Answer([Said("Two years.", -1.0, 0)])])
    (view,) = collect(str(tmp_path), Storage(), config).cards[0].passages
    assert view.whole
    assert [run.sentences for run in view.excerpt.visible] == [(1,)]


def test_evidence_of_a_run_without_leave_one_out_is_not_measured(tmp_path: Path) -> None:
    settings = {"loo": "off", "methods": ["gap"], "judge": {"deciding_method": "gap"}}
    page = read_page(tmp_path, [flat(3.0, "r1")], settings=settings)
    assert "not measured" in page.inside[f"#{anchor('r1')}-1"][0]
    assert "no passage matters" not in page.words


def test_text_that_was_not_stored_leaves_offsets_and_scores(tmp_path: Path) -> None:
    said = [Said("Two years.", -1.0, 0), Said("Five, in fact.", 3.0)]
    page = read_page(tmp_path, [Answer(said)], store_text=False)
    assert "was not stored" in page.words
    assert "0–10" in page.inside[f"#{anchor('r-1')}-1"][0] and "3.00" in page.inside[f"#{anchor('r-1')}-2"][0]
    assert "Two years" not in page.words


def test_answer_without_sentences_has_a_card(tmp_path: Path) -> None:
    page = read_page(tmp_path, [Answer([], response_id="silent")])
    assert "0 of 0 flagged highest score –" in page.words


def test_answer_without_an_id_has_a_card(tmp_path: Path) -> None:
    page = read_page(tmp_path, [flat(3.0, "r1"), Answer([Said("Yes.", 4.0)], response_id=None)])
    assert "no id" in page.words


def test_card_shows_the_answer_that_was_judged_and_not_its_duplicate(tmp_path: Path) -> None:
    judged = Answer([Said("Two years.", 3.0)], response_id="twice")
    other = Answer([Said("Another answer under the same id, and longer.", 3.0)], response_id="twice")
    write_fake_run(str(tmp_path / "a"), [other])
    config = write_fake_run(str(tmp_path / "b"), [judged])
    name = "measurements/responses/date=2026-11-29"
    (part,) = (tmp_path / "a" / name).iterdir()
    part.rename(tmp_path / "b" / name / "000000-000000000000.parquet")  # listed before the judged one
    card = collect(str(tmp_path / "b"), Storage(), config).cards[0]
    assert [stretch.text for stretch in card.stretches if stretch.number] == ["Two years."]


def test_right_to_left_languages_say_so(tmp_path: Path) -> None:
    page = read_page(tmp_path, [flat(1.0, "r1", dimensions={"language": "ar-EG"})])
    assert {"lang": "ar-EG", "dir": "rtl"}.items() <= next(
        a for tag, a in page.tags if tag == "h3" and "dir" in a
    ).items()
    assert [direction(name) for name in ("fa_IR", "HE", "de", "", None)] == [
        "rtl",
        "rtl",
        "ltr",
        "auto",
        "auto",
    ]


# --- numbers


def test_no_number_is_infinite_or_undefined(tmp_path: Path) -> None:
    answers = [Answer([], response_id="silent"), Answer([Said("Same.", 2.0)], response_id="same")]
    page = read_page(tmp_path, answers, threshold=2.0)
    assert not re.search(r"\b(nan|inf|infinity|none)\b", page.words.replace("with none", ""), re.IGNORECASE)
    assert "−0.00" not in page.words


def test_percent_keeps_three_digits_and_never_rounds_something_to_nothing() -> None:
    shares = (0, 1e-9, 0.00012, 0.0341, 0.375, 1)
    assert [percent(share).replace("\xa0", " ") for share in shares] == [
        *("0 %", "under 0.001 %", "0.012 %", "3.41 %", "37.5 %", "100 %")
    ]


def test_same_run_gives_the_same_bytes_however_it_was_cut(tmp_path: Path) -> None:
    answers = [flat(i * 1.37 % 5 - 2, f"r{i:02d}", dimensions={"app": f"a{i % 3}"}) for i in range(20)]
    pages = set()
    for per_part in (3, 7, 7, 20):
        out = tmp_path / "out"
        config = write_fake_run(str(out), answers, per_part=per_part)
        pages.add(Path(write_report(str(out), Storage(), config)).read_bytes())
        out.rename(tmp_path / f"{len(list(tmp_path.iterdir()))}")
    assert len(pages) == 1


# --- rejects and provenance


def test_first_rejects_are_listed_with_place_and_reason(tmp_path: Path) -> None:
    rejects = [Reject("malformed_row", f"detail {i}", position=i) for i in range(30)]
    page = read_page(tmp_path, [], rejects, threshold=None)
    assert "The first 20 are below" in page.words
    assert "detail 19" in page.words and "detail 20" not in page.words
    assert page.inside["td"][5:9] == ["malformed_row", LOG, "byte 1", "–"]


def test_credentials_in_a_path_are_masked(tmp_path: Path) -> None:
    secret = "s3://key:hunter2@bucket/log.jsonl?X-Amz-Signature=hunter2"
    files = [{"url": secret, "size": 0, "etag": "e", "format": "jsonl", "compression": None}]
    settings = {"storage": {"secret": "hunter2"}}
    page = read_page(tmp_path, [], [Reject("malformed_row", path=secret)], files=files, settings=settings)
    assert "hunter2" not in (tmp_path / "report" / "index.html").read_text()
    assert "s3://***@bucket/log.jsonl" in page.words
    assert "storage options" in page.words


def test_command_on_the_page_repeats_the_settings(tmp_path: Path) -> None:
    settings = {
        "fields": {"answer": "out.text", "question": "it's"},
        "profile": "chat",
        "scorer": {"window_tokens": 512},
        "methods": ["gap"],
        "judge": {"deciding_method": "gap"},
    }
    config = write_fake_run(str(tmp_path), [], settings=settings, threshold=None)
    command = shlex.split(collect(str(tmp_path), Storage(), config).provenance.audit_command)
    assert command[:5] == ["leadline", "audit", "/logs/2026-11-29", "--out", "NEW_OUT"]
    assert load_config(None, command[6::2], {}) == config


def test_provenance_names_scorer_threshold_and_statistics(tmp_path: Path) -> None:
    words = read_page(tmp_path, [flat(3.0, "r1")]).words
    for fact in ("smollm2-135m", "5a1f00c2d9e4", "8,192 tokens", "2.0000, from run 3f9a1c77b2e0", "max_drop"):
        assert fact in words


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json"):
        write_report(str(tmp_path), Storage(), load_config(None, [], {}))
    assert not (tmp_path / "report").exists()


def test_run_that_is_not_judged_yet_is_refused(tmp_path: Path) -> None:
    config = write_fake_run(str(tmp_path), [flat(3.0, "r1")])
    (tmp_path / "profile.json").unlink()
    with pytest.raises(JobError, match="not judged yet"):
        write_report(str(tmp_path), Storage(), config)


def test_cut_off_part_is_named(tmp_path: Path) -> None:
    config = write_fake_run(str(tmp_path), [flat(3.0, "r1")])
    (part,) = tmp_path.glob("findings/responses/*/*.parquet")
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(JobError, match=f"{part.name}: not a whole Parquet file"):
        write_report(str(tmp_path), Storage(), config)
