"""The dry run of the comparison; its numbers are a GPU's to give."""

import os
from importlib.util import find_spec

import pytest

from jobs import bench_kernel
from jobs.errors import ConfigError


def test_a_machine_without_triton_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(bench_kernel, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install triton"):
        bench_kernel.compare(1, print)


def test_without_a_gpu_the_interpreter_must_have_been_asked_for(monkeypatch):
    monkeypatch.setattr(bench_kernel, "find_spec", lambda _: True)
    monkeypatch.setattr(bench_kernel.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        bench_kernel.compare(1, print)


@pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton and TRITON_INTERPRET=1",
)
def test_the_dry_run_compares_the_kernel_and_torch(capsys):
    said = []
    cases = bench_kernel.compare(1, said.append)
    assert len(cases) == len(said) == len(bench_kernel.DRY)
    assert all(case["right"] and {"torch", "kernel"} <= case["ways"].keys() for case in cases)
    bench_kernel.show(cases)
    assert capsys.readouterr().out.startswith("dry run")
