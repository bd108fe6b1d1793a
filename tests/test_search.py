"""The search of the site, asked with the words of the field."""

import shutil
import subprocess

import pytest
from outside import ROOT


FIRST = {
    "bf16": "wire_formats",
    "compression": "wire_formats",
    "quantization": "wire_formats",
    "int8": "wire_formats",
    "custom rule": "writing_a_rule",
    "multi host": "clusters",
    "multi-node": "clusters",
    "lower bandwidth": "slow_networks",
    "cost pod": "pods",
    "MFU": "pods",
    "sharding": "sharded_workers",
    "FSDP": "sharded_workers",
    "install gpu": "quick_start",
    "spot": "faults",
    "preemption": "faults",
    "heterogeneous": "asynchronous",
    "throughput": "is_it_worth_it",
    "simulation": "is_it_worth_it",
    "nan": "faults",
    "XLA flags": "pods",
    "perplexity": "results/text",
    "checkpoint": "checkpoints",
    "byzantine": "methods/robust",
    "how many workers": "faq",
    "how many workers do I need": "faq",
    "lr scaling": "faq",
    "learning rate": "faq",
    "batch size": "faq",
    "plot": "trainer",
    "plot the losses": "trainer",
    "does it work with pmap": "in_your_program",
    "does this work with flax": "in_your_program",
    "my own data": "faq",
    "gpu": "clusters",
    "multi gpu": "clusters",
    "my own model": "in_your_program",
    "numpy arrays": "trainer",
    "imagenet": "trainer",
    "it hangs": "faq",
    "pytorch": "frameworks",
    "csv": "faq",
    "held-out loss": "faq",
    "convergence guarantee": "faq",
    "freeze layers": "recipes",
    "which method": "choosing",
    "which method should I use": "choosing",
    "resume after preemption": "faults",
    "train on two sites": "two_sites",
    "compare methods": "trainer",
    "how long does it take": "is_it_worth_it",
    "cite": "index",
}


@pytest.mark.slow  # builds the site
def test_a_search_finds_the_guide_first(tmp_path):
    pytest.importorskip("sphinx", reason="needs the extra `docs`")
    node = shutil.which("node")
    if node is None:
        pytest.skip("the search of a site is a program for node")
    build = ["sphinx-build", "-q", ROOT / "docs", tmp_path / "site"]
    subprocess.run(build, check=True, timeout=600)
    ask = [node, ROOT / "tests/search.js", tmp_path / "site", *FIRST]
    found = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=60)
    first = [line.partition(" ")[0] for line in found.stdout.splitlines()]
    assert dict(zip(FIRST, first, strict=True)) == FIRST
