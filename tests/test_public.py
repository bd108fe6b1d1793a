"""The public names, their types, and imports without circles."""

import ast
import pathlib
import subprocess
import sys

import pytest

import lsgd_jax as lj


ROOT = pathlib.Path(__file__).parents[1]

# A change of these lists is a change of the public API and belongs in CHANGELOG.md.
NAMES = {
    "lsgd_jax": """
        AggregateState AnchorState CenterState Detector Diagnostics Exchange ExchangeState
        Fragment Group Guard LeaderState Outer OuterState PairwiseState ParleState Phase
        Pull PullOptions PullState PushSumState Rule Shared SumWeightState TopK Wire
        WireFormat Workers adpsgd aggregate allreduce anchored aot apply_updates
        asynchronous average butterfly center cge checks combine_then_adapt consensus
        consensus_distance contrib coordinate_median diagnostics diloco downpour dpsgd
        easgd emulate_devices exchange following fragment geometric_median gosgd
        inside_axes is_finite krum
        largest_dimension leader licm local_sgd lsgd moving_center neighbors osgp outer
        pairwise parle push_sum resize robust_mean scoping sgp slowmo static_args topology
        trimmed_mean tune_cpu unrolled wagma waiting with_state
    """,
    "lsgd_jax.aot": """
        Chip Collective Memory Pod Program Report Seconds check_quiet gpu report report_of
        tpu
    """,
    "lsgd_jax.asynchronous": """
        ADPSGD Coordinator DecoupledDiLoCo DiLoCo GridPosition LSGD Method NETWORKS
        Network OSGP Pairwise Peer Pulls Report Speeds StaleWorkerError Status Training
        Transport UnreachableError WAGMA Worker island simulator work
    """,
    "lsgd_jax.contrib": """
        GradientNormState NoLoCoState desloc gradient_weighted grawa noloco sparse_diloco
        sparta
    """,
    "lsgd_jax.checks": """
        check_fraction check_not_negative check_option check_period check_positive_int
    """,
    "lsgd_jax.topology": """
        Graph Topology bipartite_exponential complete exponential from_edges
        matchings metropolis ring
    """,
}


def public(module):
    return sorted(name for name in vars(module) if not name.startswith("_"))


@pytest.mark.parametrize("module", NAMES)
def test_the_public_names_are_these(module):
    found = {
        "lsgd_jax": lj,
        "lsgd_jax.aot": lj.aot,
        "lsgd_jax.asynchronous": lj.asynchronous,
        "lsgd_jax.checks": lj.checks,
        "lsgd_jax.contrib": lj.contrib,
        "lsgd_jax.topology": lj.topology,
    }[module]
    # `ray_engine` is imported on demand, perhaps already by another test.
    names = set(public(found)) - {"importlib", "Any", "ray_engine", "TYPE_CHECKING"}
    names -= {"warnings"}
    assert sorted(names) == NAMES[module].split()


def test_old_names_of_contrib_work_with_a_warning():
    with pytest.warns(DeprecationWarning, match="lsgd_jax.noloco is lsgd_jax.contrib.nolo"):
        assert lj.noloco is lj.contrib.noloco
    assert set(lj._MOVED) == set(NAMES["lsgd_jax.contrib"].split())
    with pytest.raises(AttributeError, match="no attribute 'nolocos'"):
        lj.nolocos  # noqa: B018


def test_no_import_leads_in_a_circle():
    """Imports under `if TYPE_CHECKING` and inside functions count as well."""
    files = {}
    for path in (ROOT / "lsgd_jax").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    imports = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            found = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module in files:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [each if each in files else node.module for each in inner]
            imports[name] |= set(found) & set(files)
    done = []

    def visit(name, above):
        if name in above:
            circle = " -> ".join([*above[above.index(name) :], name])
            raise AssertionError(f"a circle of imports: {circle}")
        if name not in done:
            for other in sorted(imports[name]):
                visit(other, [*above, name])
            done.append(name)

    for name in files:
        visit(name, [])


RIGHT = """
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

import lsgd_jax as lj

outer: lj.Exchange = lj.diloco(4, wire="int8", part=["head"])
tx = optax.chain(optax.sgd(0.1), lj.exchange(lj.Pull(lj.average(), 0.5), outer))
workers = lj.Workers(nodes=2, locals=2)
params = workers.put({"head": jnp.ones((4, 3))})
model = lj.center(params, workers.map(tx.init)(params))
due: bool = outer.is_due(4)
speeds = lj.asynchronous.simulator.run
"""
WRONG = {
    'lj.diloco("4")': 'incompatible type "str"; expected "int"',
    'lj.diloco(4, wire="int9")': 'expected "Wire | TopK | Literal',
    "workers.foo()": '"Workers" has no attribute "foo"',
    "lj.average().is_due(1)": '"Rule" has no attribute "is_due"',
    "lj.asynchronous.simulator.foo": "has no attribute",
    "lj.asynchronous.ray_engine.foo": "has no attribute",
}


@pytest.mark.slow
def test_mypy_strict_accepts_a_right_program_and_finds_wrong_calls(tmp_path):
    package = pathlib.Path(lj.__file__).parent  # in this checkout, or an installed wheel
    assert (package / "py.typed").exists()
    path = {"MYPYPATH": str(ROOT)} if package.parent == ROOT else {}
    program = tmp_path / "program.py"
    program.write_text(RIGHT + "\n".join(WRONG))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
        + ["--no-error-summary", "--cache-dir", tmp_path / "cache", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**path, "PATH": ""},
        timeout=300,
    )
    lines = done.stdout.splitlines()
    first = len(RIGHT.splitlines()) + 1
    errors = [line for line in lines if ": error: " in line]
    for i, (call, message) in enumerate(WRONG.items()):
        assert any(f":{first + i}: " in e and message in e for e in errors), (call, lines)
    assert len(errors) == len(WRONG), done.stdout + done.stderr
