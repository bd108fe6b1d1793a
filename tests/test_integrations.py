"""The programs in examples/integrations, each as it is run by hand.

A program trains by its framework with a method in it, then by a loop of `Workers` or by the
framework's own DiLoCo. It raises if their parameters differ.
"""

import importlib.util
import pathlib
import subprocess
import sys

import pytest


FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "integrations"
by_hand = pytest.mark.integrations


@pytest.mark.parametrize(
    "name, package",
    [
        ("flax_nnx", "flax"),
        pytest.param("equinox_module", "equinox", marks=pytest.mark.slow),
        pytest.param("keras_stateless", "keras", marks=by_hand),
        pytest.param("levanter_state", "levanter", marks=by_hand),
        pytest.param("maxtext_diloco", "maxtext", marks=by_hand),
        pytest.param("tunix_lora", "tunix", marks=by_hand),
    ],
)
def test_the_numbers_are_those_of_our_own_loop(name, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; docs/frameworks.md says how")
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "differs by" in done.stdout
