import pytest

from jobs.config import Config, fingerprint, load_config
from jobs.errors import ConfigError


def test_flags_go_over_set_over_yaml_over_defaults(tmp_path):
    path = tmp_path / "leadline.yaml"
    path.write_text("loo: 'off'\nmethods: [gap]\njudge: {deciding_method: gap, flag_budget: 0.3}\n")
    found = load_config(str(path), ["judge.flag_budget=0.2", "read.unit_rows=7"], {"read.limit": 5})
    assert (found.loo, found.judge.flag_budget, found.read.unit_rows, found.read.limit) == ("off", 0.2, 7, 5)
    assert load_config(str(path), [], {"judge.flag_budget": None}).judge.flag_budget == 0.3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["jduge.flag_budget=0.2"], "setting jduge: unknown; known here: scorer, profile"),
        (["judge.flag_budget=2"], "setting judge.flag_budget"),
        (["judge.flag_budget"], "write it as --set key.path=value"),
        (["loo='off'", "loo.x=1"], "loo is a value, not a section"),
        (["methods=[gasp,oracle]"], "no method 'oracle'; known: ensemble, blend, gasp"),
        (["methods=[gap]", "judge.deciding_method=blend"], "'blend' is not among methods"),
        (["methods=[]"], "setting methods"),
        (["loo='off'", "methods=[gasp]"], "off leaves out what gasp reads; leave gasp out of --methods"),
        (["loo='off'", "methods=[ensemble,gasp]"], "off leaves out what gasp reads"),
        (["bundle=none", "methods=[ensemble]"], "ensemble needs a bundle"),
        (["bundle=none", "judge.deciding_method=ensemble"], "'ensemble' is not among methods"),
        (["bundle=none", "judge.target_fpr=0.02"], "no false-alarm rate of blend was measured"),
        (["judge.target_fpr=0.02", "judge.flag_budget=0.1"], "give one of them"),
        (["judge.target_fpr=1"], "setting judge.target_fpr"),
        (["judge=[1"], "not valid YAML"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_read(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, overrides, {})
    assert "\n" not in str(caught.value)


def test_a_config_file_that_is_not_there_or_not_yaml_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(tmp_path / "no.yaml"), [], {})
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2")
    (tmp_path / "latin.yaml").write_bytes("loo: 'é'".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(str(tmp_path / "latin.yaml"), [], {})
    with pytest.raises(ConfigError, match="not valid YAML at line"):
        load_config(str(tmp_path / "bad.yaml"), [], {})


def test_off_needs_no_quotes_in_yaml_and_in_set(tmp_path):
    path = tmp_path / "leadline.yaml"
    path.write_text("loo: off\nread: {allow_missing_question: off}\nstorage: {use_ssl: off}\n")
    for found in (load_config(str(path), [], {}), load_config(None, ["loo=off", "storage.use_ssl=no"], {})):
        assert (found.loo, found.storage, found.read.allow_missing_question) == (
            "off",
            {"use_ssl": False},
            False,
        )
    with pytest.raises(ConfigError, match="setting loo"):
        load_config(None, ["loo=on"], {})


def test_only_what_numbers_depend_on_identifies_a_measurement():
    plain = Config().measured_by()
    same = load_config(None, ["scorer.cache_dir=/x", "judge.flag_budget=0.3", "workers.count=9"], {})
    other = load_config(None, ["scorer.name=qwen2.5-0.5b"], {})
    threads = load_config(None, ["workers.cpus_per_worker=2"], {})
    assert same.measured_by() == plain
    assert len({fingerprint(tree.measured_by()) for tree in (Config(), other, threads)}) == 3


FREE = ("blend", "gasp", "jsd_none", "gap", "perplexity", "length")
TWO_PASSES = tuple(name for name in FREE if name != "gasp")
BUNDLE = "0" * 12


@pytest.mark.parametrize(
    ("overrides", "digest", "methods", "deciding"),
    [
        ([], None, FREE, "blend"),
        ([], BUNDLE, ("ensemble", *FREE), "ensemble"),
        (["loo='off'"], None, TWO_PASSES, "blend"),
        (["loo='off'"], BUNDLE, ("ensemble", *TWO_PASSES), "ensemble"),
        (["methods=[gap,gasp]"], BUNDLE, ("gap", "gasp"), "gasp"),
        (["methods=[gap,ensemble]"], BUNDLE, ("gap", "ensemble"), "ensemble"),
        (["methods=[gap]"], None, ("gap",), "gap"),
        (["judge.deciding_method=gap"], BUNDLE, ("ensemble", *FREE), "gap"),
        (["judge.deciding_method=gap"], None, FREE, "gap"),
    ],
)
def test_the_best_method_decides_where_nothing_else_was_said(overrides, digest, methods, deciding):
    found = load_config(None, overrides, {}).resolved(digest, reads_attention=True)
    assert (found.methods, found.judge.deciding_method) == (methods, deciding)
    assert found.resolved(digest, reads_attention=True) == found


@pytest.mark.parametrize(
    ("overrides", "digest", "left_out", "deciding"),
    [
        ([], None, {"blend"}, "gasp"),
        (["loo='off'"], None, {"blend", "gasp"}, "jsd_none"),
        ([], BUNDLE, {"blend"}, "ensemble"),
    ],
)
def test_a_scorer_whose_attention_cannot_be_read_is_judged_by_the_best_of_the_others(
    overrides, digest, left_out, deciding
):
    found = load_config(None, overrides, {}).resolved(digest, reads_attention=False)
    assert set(FREE) - set(found.methods) == left_out and found.judge.deciding_method == deciding
    with pytest.raises(ConfigError, match="blend reads attention") as caught:
        load_config(None, ["methods=[blend]"], {}).resolved(digest, reads_attention=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "attention", "exact", "loo"),
    [
        ({}, True, False, "masked"),
        ({}, False, False, "exact"),  # nothing can be hidden from such a scorer
        ({}, True, True, "exact"),  # the bundle was fitted on passes with pieces removed
        ({"profile": "gasp-v2"}, True, False, "exact"),  # the author removes
        ({"loo": "off"}, True, False, "off"),
        ({"loo": "exact"}, True, False, "exact"),
    ],
)
def test_passages_are_hidden_unless_something_speaks_for_removing_them(settings, attention, exact, loo):
    digest = BUNDLE if exact else None
    assert Config(**settings).resolved(digest, reads_attention=attention, exact=exact).loo == loo


def test_passages_are_hidden_only_from_a_scorer_whose_attention_can_be_had():
    config = load_config(None, ["loo=masked"], {})
    assert config.resolved(None, reads_attention=True).methods == FREE
    with pytest.raises(ConfigError, match=r"setting loo: masked .* use --loo exact") as caught:
        config.resolved(None, reads_attention=False)
    assert "\n" not in str(caught.value)


def test_passages_are_passed_over_only_where_attention_can_be_read_and_a_run_remembers_it():
    config = load_config(None, ["least_share=0.2"], {})
    assert config.measured_by() == Config().measured_by() | {"least_share": 0.2}
    assert config.resolved(None, reads_attention=True)
    with pytest.raises(ConfigError, match=r"setting least_share: .* leave it at 0"):
        config.resolved(None, reads_attention=False)


@pytest.mark.parametrize("overrides", [["methods=[ensemble]"], ["judge.target_fpr=0.02"]])
def test_what_only_a_bundle_could_do_is_refused_once_there_is_none(overrides):
    config = load_config(None, overrides, {})
    assert config.resolved(BUNDLE, reads_attention=True)
    with pytest.raises(ConfigError) as caught:
        config.resolved(None, reads_attention=True)
    assert "\n" not in str(caught.value)


def resolved(digest, **settings):
    return Config(**settings).resolved(digest, reads_attention=True)


def test_a_measurement_is_identified_by_the_content_of_its_bundle_and_not_by_its_place():
    plain = Config(loo="masked").measured_by()
    assert resolved(None).measured_by() == Config(bundle="none", loo="masked").measured_by() == plain
    here, there = (resolved("ab12" * 3, bundle=place) for place in ("/a/b", "s3://bucket/b"))
    assert here.bundle == "/a/b#ab12ab12ab12"
    assert (here.bundle_place, here.bundle_digest) == ("/a/b", "ab12ab12ab12")
    assert here.measured_by() == there.measured_by() == plain | {"bundle": "ab12ab12ab12"}
    assert resolved("cd34" * 3, bundle="/a/b").measured_by() != here.measured_by()
    assert Config(bundle="/a/b").measured_by() != here.measured_by()


def test_a_field_that_is_not_ours_is_a_bad_setting():
    with pytest.raises(ConfigError, match="setting fields: no field 'questoin'; known: response_id, "):
        load_config(None, ["fields.questoin=a.b"], {})
