"""What of a log's texts is stored, and that nothing else of them is."""

import re
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from detector.errors import RecordRejected
from detector.record import Passage, Record
from jobs.config import Config, load_config
from jobs.errors import ConfigError
from jobs.formats import read_unit
from jobs.judge import judge
from jobs.redaction import load_redaction, mask_contacts, stored_texts
from jobs.report import write_report
from jobs.storage import Storage
from jobs.texts import LOST, read_texts
from tests.jobs.test_judge import read
from tests.jobs.test_worker import Bench
from tests.runs import row

STORAGE = Storage()
CONTACTS = "jobs.redaction:mask_contacts"
SECRET = "ada@example.com"


def shorten(text: str) -> str:
    return text[1:]


def fail_on_shelves(text: str) -> str:
    if "shelf 7." in text:
        raise KeyError(text)
    return text


def bytes_of(text: str) -> bytes:
    return text.encode()


def torn(text: str) -> str:
    return "\ud800" * len(text)


def everything(out: str) -> str:
    """All that lies in OUT, tables as text."""
    kinds = ("measurements/responses", "measurements/sentences", "measurements/rejects", "texts")
    tables = [read(out, kind) for kind in (*kinds, "findings/sentences", "findings/responses", "summary")]
    others = [path.read_text() for path in Path(out).rglob("*") if path.suffix in (".json", ".html")]
    return str(tables) + "".join(others)


def judged(bench: Bench, marker: dict, config: Config | None = None) -> str:
    """Everything in OUT once the unit is judged and shown."""
    config = config or bench.config.resolved(None, reads_attention=True)
    judge(bench.out, STORAGE, config, bench.run, [marker])
    write_report(bench.out, STORAGE, config)
    return everything(bench.out)


def settings(**tree: object) -> Config:
    return Config.model_validate({"judge": {"flag_budget": 0.3}} | tree)


class TestFunction:
    def test_addresses_and_long_numbers_are_painted_over_in_place(self):
        text = f"Write to {SECRET}, ring +44 20 7946 0018 or 0123-456.789; hall 42, since 1950."
        masked = mask_contacts(text)
        assert len(masked) == len(text)
        assert masked == "Write to " + "*" * 15 + ", ring +" + "*" * 15 + " or " + "*" * 12 + (
            "; hall 42, since 1950."
        )

    @pytest.mark.parametrize("text", ["a" * 200_000, "1 " * 100_000, "a@" * 100_000, "a@b." * 50_000])
    def test_hostile_text_does_not_hold_it_up(self, text):
        began = time.process_time()
        assert len(mask_contacts(text)) == len(text)
        assert time.process_time() - began < 5

    @pytest.mark.parametrize(
        ("place", "message"),
        [
            ("jobs.redaction", "write it as package.module:function"),
            ("no.such.package:mask", "cannot be imported (ModuleNotFoundError: No module named 'no')"),
            ("jobs.redaction:absent", "cannot be imported (AttributeError"),
            ("tests.jobs.test_redaction:shorten", "characters of"),
            ("tests.jobs.test_redaction:bytes_of", "gave a bytes, not a text"),
            ("tests.jobs.test_redaction:torn", "cannot be written as UTF-8"),
            ("tests.jobs.test_redaction:SECRET", "failed with TypeError"),
        ],
    )
    def test_what_cannot_redact_is_refused_before_anything_is_read(self, place, message):
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            load_redaction(place)
        assert str(caught.value).startswith("setting redact: ") and "\n" not in str(caught.value)

    def test_a_module_that_fails_to_load_is_a_bad_setting(self, tmp_path, monkeypatch):
        (tmp_path / "broken_mask.py").write_text("raise RuntimeError('first\\nsecond')")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ConfigError, match=r"\(RuntimeError: first\);"):
            load_redaction("broken_mask:mask")
        assert "broken_mask" not in sys.modules

    def test_question_answer_and_passages_are_redacted_and_ids_are_not(self):
        passage = Passage(text=SECRET, id=f"7 {SECRET}", source=SECRET, score=0.5)
        record = Record(question=SECRET, passages=(passage,), answer=SECRET)
        stars = "*" * len(SECRET)
        assert stored_texts(record, mask_contacts) == {
            "question": stars,
            "answer": stars,
            "passages": [{"id": f"7 {SECRET}", "text": stars, "source": stars, "score": 0.5}],
        }

    def test_a_text_on_which_it_fails_is_told_without_quoting_it(self):
        record = Record(question="Where?", passages=("On shelf 7.",), answer="There.")
        with pytest.raises(RecordRejected) as caught:
            stored_texts(record, fail_on_shelves)
        assert caught.value.detail == "the redact function failed with KeyError"

    def test_a_run_remembers_it(self):
        config = load_config(None, [], {"redact": CONTACTS})
        assert config.measured_by()["redact"] == CONTACTS
        assert "redact" not in Config().measured_by()


class TestStored:
    def test_the_scorer_reads_the_text_and_the_tables_hold_what_redaction_left(self, tmp_path):
        personal = row(0, answer=f"Ask {SECRET} about it. It is green.")
        plain, masked = (
            Bench(tmp_path / name, [personal], settings(redact=place))
            for name, place in (("plain", None), ("masked", CONTACTS))
            if (tmp_path / name).mkdir() is None
        )
        first, second = plain.audit(), masked.audit()
        numbers = [
            [
                {name: one[name] for name in ("start", "end", "gap", "drops")}
                for one in bench.rows(marker, "sentences")
            ]
            for bench, marker in ((plain, first), (masked, second))
        ]
        assert numbers[0] == numbers[1]
        assert SECRET in judged(plain, first) and SECRET not in judged(masked, second)
        (finding, _) = read(masked.out, "findings/sentences")
        assert finding["text"] == "Ask *************** about it"

    @pytest.mark.parametrize("mode", ["full", "flagged"])
    def test_a_record_that_cannot_be_redacted_is_a_reject_and_not_stored(self, tmp_path, mode):
        config = settings(redact="tests.jobs.test_redaction:fail_on_shelves", store_text=mode)
        bench = Bench(tmp_path, [row(0), row(1), row(2)], config)
        marker = bench.audit()
        (reject,) = bench.rows(marker, "rejects")
        assert (reject["response_id"], reject["detail"]) == ("r1", "the redact function failed with KeyError")
        assert "shelf 7." not in judged(bench, marker)


class TestFlagged:
    ROWS = [row(n, response_id=f"r{n:02}") for n in range(12)]  # noqa: RUF012

    def test_texts_are_stored_of_flagged_answers_alone(self, tmp_path):
        bench = Bench(tmp_path, self.ROWS, settings(store_text="flagged"))
        marker = bench.audit()
        assert "painted" not in everything(bench.out)
        stored = judged(bench, marker)
        flagged = {one["response_id"] for one in read(bench.out, "findings/responses") if one["flagged"]}
        assert 0 < len(flagged) < len(self.ROWS)
        for one in self.ROWS:
            for text in (one["question"], one["passages"][0]["text"], one["answer"][-20:-1]):
                assert (text in stored) == (one["response_id"] in flagged)
        assert "No sentence of this answer is flagged, so its text was not stored" in stored

    def test_what_is_stored_of_a_flagged_answer_is_what_full_stores(self, tmp_path):
        found = {}
        for mode in ("full", "flagged"):
            (tmp_path / mode).mkdir()
            bench = Bench(tmp_path / mode, self.ROWS, settings(store_text=mode, redact=CONTACTS))
            judged(bench, bench.audit())
            rows = read(bench.out, "findings/sentences")
            found[mode] = [{name: one[name] for name in one if name != "run_id"} for one in rows]
        flagged = {one["response_id"] for one in found["full"] if one["flagged"]}
        for full, kept in zip(found["full"], found["flagged"], strict=True):
            texts = {} if full["response_id"] in flagged else {"text": None, "evidence_text": None}
            assert kept == full | texts

    def test_another_threshold_takes_away_what_is_no_longer_flagged(self, tmp_path):
        bench = Bench(tmp_path, self.ROWS, settings(store_text="flagged"))
        marker = bench.audit()
        judged(bench, marker)
        n_before = len(read(bench.out, "texts"))
        fewer = settings(store_text="flagged", judge={"flag_budget": 0.05})
        judged(bench, marker, fewer.resolved(None, reads_attention=True))
        texts = read(bench.out, "texts")
        assert 0 < len(texts) < n_before
        assert {one["response_id"] for one in texts} == {
            one["response_id"] for one in read(bench.out, "findings/responses") if one["flagged"]
        }

    @pytest.mark.parametrize("what", ["gone", "changed since"])
    def test_a_log_that_is_not_there_any_more_is_said_on_the_page(self, tmp_path, what):
        bench = Bench(tmp_path, self.ROWS, settings(store_text="flagged"))
        marker = bench.audit()
        log = tmp_path / "logs.jsonl"
        log.unlink()
        if what == "changed since":
            log.write_text("{}\n")
        stored = judged(bench, marker)
        n_flagged = sum(one["flagged"] for one in read(bench.out, "findings/responses"))
        assert [one["answer"] for one in read(bench.out, "texts")] == [None] * n_flagged
        assert f"The text of {n_flagged} flagged answers could not be read from the logs again" in stored
        assert what in stored and "painted" not in stored

    def test_a_row_that_is_not_found_for_certain_gets_no_text(self, tmp_path, monkeypatch):
        bench = Bench(tmp_path, self.ROWS[:2], settings(store_text="flagged"))
        marker = bench.audit()
        there, other = bench.rows(marker, "responses")
        wanted = pa.Table.from_pylist([there, other | {"position": 1}])
        found = read_texts(marker, wanted, STORAGE, bench.config, None)
        assert [found[one]["withheld"] for one in (0, 1)] == [None, LOST]
        monkeypatch.setattr("jobs.texts.read_unit", lambda *unit: [*read_unit(*unit), *read_unit(*unit)])
        found = read_texts(marker, wanted, STORAGE, bench.config, None)
        assert (found[0]["answer"], found[0]["withheld"]) == (None, LOST)


@pytest.mark.parametrize("store_text", ["full", "flagged", "none"])
def test_a_source_that_stands_for_an_id_is_redacted_as_both(tmp_path, store_text):
    source = "crm/u/ada@example.com"
    line = row(0) | {"passages": [{"page_content": "Number 0 stands on shelf 0.", "source": source}]}
    bench = Bench(tmp_path, [line], settings(redact="jobs.redaction:mask_contacts", store_text=store_text))
    found = judged(bench, bench.audit())
    assert "ada@example.com" not in found
    assert "crm/u/***" in found


def test_an_id_of_a_passage_s_own_stays_as_logged():
    passages = [Passage("text", id="ada@example.com", source="s"), Passage("text")]
    found = stored_texts(Record(question="q", passages=passages, answer="a"), mask_contacts)
    assert [passage["id"] for passage in found["passages"]] == ["ada@example.com", None]
