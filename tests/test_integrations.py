"""The programs in examples/integrations, run as from a command line.

Each program trains with its framework and a method, then with a loop of `Workers` or the
framework's own DiLoCo. It raises an error if their parameters differ.
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
def test_parameters_agree_with_our_own_loop(name, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; docs/frameworks.md says how")
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "differs by" in done.stdout
