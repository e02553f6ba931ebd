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
        (["methods=[gasp,oracle]"], "no method 'oracle'; known: gasp"),
        (["methods=[gap]"], "'gasp' is not among methods"),
        (["loo='off'"], "off leaves out what gasp reads"),
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
    with pytest.raises(ConfigError, match="not valid YAML at line"):
        load_config(str(tmp_path / "bad.yaml"), [], {})


def test_only_what_numbers_depend_on_identifies_a_measurement():
    plain = Config().measured_by()
    same = load_config(None, ["scorer.cache_dir=/x", "judge.flag_budget=0.3", "workers.count=9"], {})
    other = load_config(None, ["scorer.name=qwen2.5-0.5b"], {})
    threads = load_config(None, ["workers.cpus_per_worker=2"], {})
    assert same.measured_by() == plain
    assert len({fingerprint(tree.measured_by()) for tree in (Config(), other, threads)}) == 3
