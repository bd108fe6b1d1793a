"""The programs in examples/integrations, run as from a command line.

Each program trains with its framework and a method, then with a loop of `Workers` or the
framework's own DiLoCo. It raises an error if their parameters differ.
"""

import importlib.util
import pathlib
import re

import pytest
from outside import python


FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "integrations"
by_hand = pytest.mark.integrations


@pytest.mark.parametrize(
    "name, package",
    [
        pytest.param("flax_nnx", "flax", marks=pytest.mark.slow),
        pytest.param("dynamic_scale", "flax", marks=pytest.mark.slow),
        pytest.param("linen_logical_axes", "flax", marks=pytest.mark.slow),
        pytest.param("named_sharding", "jax", marks=pytest.mark.slow),
        pytest.param("pmap_gpt", "flax", marks=pytest.mark.slow),
        pytest.param("equinox_module", "equinox", marks=pytest.mark.slow),
        pytest.param("keras_stateless", "keras", marks=by_hand),
        pytest.param("keras_train_step", "keras", marks=by_hand),
        pytest.param("keras_fit", "keras", marks=by_hand),
        pytest.param("haiku_update", "haiku", marks=by_hand),
        pytest.param("numpyro_svi", "numpyro", marks=by_hand),
        pytest.param("closed_fit", "flowjax", marks=by_hand),
        pytest.param("brax_ppo", "brax", marks=by_hand),
        pytest.param("traced_fit", "gpjax", marks=by_hand),
        pytest.param("levanter_state", "levanter", marks=by_hand),
        pytest.param("levanter_trainer", "levanter", marks=by_hand),
        pytest.param("kauldron_trainer", "kauldron", marks=by_hand),
        pytest.param("maxtext_diloco", "maxtext", marks=by_hand),
        pytest.param("tunix_lora", "tunix", marks=by_hand),
    ],
)
def test_parameters_agree_with_our_own_loop(name, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; docs/frameworks.md says how")
    done = python(FOLDER / f"{name}.py", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "differs by" in done.stdout


def added_lines(path):
    """The lines marked "# new" in each function that has any."""
    functions = re.split(r"^(?=def )", path.read_text(), flags=re.MULTILINE)
    return [text.count("# new") for text in functions if "# new" in text]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_method_adds_at_most_five_lines_as_the_docs_say(path):
    counts = added_lines(path)
    assert max(counts, default=1) <= 5
    docs = (FOLDER.parents[1] / "docs" / "frameworks.md").read_text()
    for row in docs.splitlines() if counts else []:
        if row.startswith("|") and f"/{path.name})" in row:
            assert list(map(int, re.findall(r"\d+", row.split("|")[4]))) == counts
