"""Methods of the user: --method MODULE:FUNCTION, from the command line to a trained run."""

import json
import pickle
import re
import sys

import jax.numpy as jnp
import optax
import pytest
import tiny
from outside import ROOT, python

import lsgd_jax as lj
import train
from train import compare, simulate
from train.__main__ import main
from train.config import methods, settings
from train.metrics import log as records
from train.run import cli


MINE = '''
from __future__ import annotations

from typing import Unpack

import optax
import lsgd_jax as lj

number, exchange = 3, lj.local_sgd()


@lj.rules.takes_options()
def pulled(
    period: float = 4.0, strength: float = 0.5, **options: Unpack[lj.rules.PullOptions]
) -> lj.Exchange:
    """Pulls toward the mean.

    Args:
      period: steps between two pulls, which may be a float.
      strength: how far a worker is pulled.
      **options: see `lj.rules.PullOptions`.
    """
    return lj.exchange(lj.Pull(lj.rules.average(), strength, int(period)), **options)


@lj.rules.takes_options()
def plain(period=3, graph=lj.topology.ring, learning_rate=0.1, *more: int, **options):
    plain.called_with = period, graph, learning_rate
    return lj.local_sgd(period, **options)


def aggregated(until: int = 4) -> optax.GradientTransformationExtraArgs:
    return lj.allreduce(until=until)


def apart(period: int = 4) -> lj.asynchronous.Method:
    return lj.asynchronous.Pulls(lj.local_sgd(period))


def without_default(period: int):
    return lj.local_sgd(period)


def of_unknown_type(period: Missing = 4):
    return lj.local_sgd(period)


def a_number():
    return 3


def not_annotated():
    return lj.allreduce()


def wrongly_annotated() -> optax.GradientTransformation:
    return lj.local_sgd()
'''


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """The module `mine` in the current folder, from which Python imports."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("raise KeyError('x')")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    forget()


def forget():
    for name in ("mine", "broken", "median"):
        sys.modules.pop(name, None)
    methods.find.cache_clear()


def method_of(line):
    return cli.parse(["digits", *line.split()]).method


def test_help_explains_the_parameters_of_the_function(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["digits", "--method", "mine:pulled", "--method.strength", "0.25", "--help"])
    assert stop.value.code == 0
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "--method.period FLOAT steps between two pulls, which may be a float." in text
    assert "--method.strength FLOAT how far a worker is pulled. (default: 0.25)" in text
    assert re.search(r"--method.wire {float32,[^}]*} the format in which param", text)
    assert "--method.part {None}|STR the parameters to exchange, by their paths" in text
    assert "--method.local-period" not in text


def test_options_reach_the_function():
    method = method_of("--method mine:pulled --method.period 8.5 --method.wire int8")
    assert isinstance(method.exchanges(1.0), lj.Exchange)
    (pull,) = method.exchanges(1.0).pulls
    assert (pull.every, pull.strength, pull.wire) == (8, 0.5, "int8")
    assert method.first_exchange() == 8 and not method.is_asynchronous
    assert pickle.loads(pickle.dumps(method)) == method


def test_parameters_without_annotations_have_the_types_of_their_defaults():
    line = "--method mine:plain --method.period 5 --method.graph exponential"
    assert method_of(line).exchanges(0.7).pulls[0].every == 5
    seen = sys.modules["mine"].plain.called_with
    assert seen == (5, lj.topology.exponential, 0.7)


def test_a_factory_of_the_library_is_the_row_of_the_table():
    line = ".period 4 --method.fragments 2 --method.wire int4"
    of_row = method_of(f"--method local-sgd --method{line}")
    own = method_of(f"--method lsgd_jax:local_sgd --method{line}")
    assert vars(own) == vars(of_row) and own.exchanges(1.0) == of_row.exchanges(1.0)


def test_the_annotation_says_where_a_method_stands():
    count = lambda method, kind: sum(
        isinstance(x, kind) for x in method.around(optax.sgd(0.1)).init(jnp.zeros(3))
    )
    first, last = methods.make("mine:aggregated"), methods.make("mine:pulled")
    assert (first.first, last.first) == (True, False)
    assert count(first, lj.AggregateState) == 1 and count(last, lj.ExchangeState) == 1
    state = first.around(optax.sgd(0.1)).init(jnp.zeros(3))
    assert isinstance(state[0], lj.AggregateState)
    apart = methods.make("mine:apart", period=8)
    assert apart.is_asynchronous and apart.asynchronous().exchange == lj.local_sgd(8)
    assert cli.parse("digits --method mine:apart --ray.timeout 3".split()).ray.timeout == 3
    grid = "digits --method mine:pulled --ray.processes 2".split()
    assert cli.parse(grid).ray.processes == 2


def test_a_configuration_keeps_the_name_and_the_options(tmp_path):
    config = cli.parse("digits --method mine:pulled --method.period 8".split())
    settings.write(config, path := tmp_path / "config.json")
    kept = json.loads(path.read_text())["method"]
    assert (kept["name"], kept["period"], kept["wire"]) == ("mine:pulled", 8.0, "float32")
    forget()  # as in another process
    assert settings.read(path).method.exchanges(1.0) == config.method.exchanges(1.0)
    again = cli.parse(["--config", str(path), "--method.strength", "0.1"])
    assert again.method == methods.make("mine:pulled", period=8.0, strength=0.1)
    resume = ["digits", "--resume", "--run-dir", str(tmp_path)]
    assert cli.parse(resume).method == methods.make("mine:pulled", period=8.0)
    with pytest.raises(ValueError, match="method.strength: the run has 0.5, the comm"):
        cli.parse([*resume, "--method.strength", "0.1"])


@pytest.mark.slow  # all tests above are of its parts
def test_a_run_trains_resumes_and_loads(tmp_path, monkeypatch):
    """With strength 1 the method is local SGD."""
    tiny.install(set=monkeypatch.setattr)
    quick = "digits --workers.nodes 1 --workers.locals 2 --log-every 2".split()
    own = "--method mine:pulled --method.strength 1 --method.period 2".split()
    table = "--method local-sgd --method.period 2".split()
    run = [*quick, "--run-dir", "own"]
    assert main([*run, *own, "--steps", "4"]) == 0
    forget()
    assert main([*run, "--resume", "--steps", "8"]) == 0
    assert main([*quick, *table, "--run-dir", "table", "--steps", "8"]) == 0
    own, table = (records.read(tmp_path / x)["test"][-1] for x in ("own", "table"))
    same = "step", "center_loss", "bytes_sent"
    assert [own[x] for x in same] == [table[x] for x in same]
    assert own["step"] == 8 and own["bytes_sent"] > 0
    forget()
    assert train.load("own").config.method.strength == 1
    forget()
    (tmp_path / "mine.py").unlink()
    with pytest.raises(ValueError, match="own/config.json cannot be read: .*No module na"):
        train.load("own")


HOW = "`method` must be MODULE:FUNCTION, with a module in the current folder or on PYTHON"
WRONG = [  # a command line, and a part of the message
    ("absent:pulled", "method='absent:pulled': ModuleNotFoundError: No module named 'abse"),
    ("broken:pulled", "method='broken:pulled': KeyError: 'x'"),
    (":pulled", "method=':pulled': ValueError: Empty module name"),
    ("mine:puled", "mine has no function puled; did you mean pulled?"),
    ("mine:number", "mine has no function number"),
    ("mine:exchange", "mine has no function exchange"),
    ("mine:without_default", "TypeError: missing a required argument: 'period'"),
    ("mine:of_unknown_type", "NameError: name 'Missing' is not defined"),
    ("mine:a_number", "it returned int, its annotation says nothing"),
    ("mine:not_annotated", "it returned GradientTransformationExtraArgs, its annotation s"),
    ("mine:wrongly_annotated", "it returned Exchange, its annotation says GradientTransf"),
]


@pytest.mark.parametrize("method, message", WRONG)
def test_a_method_that_cannot_be_used_is_refused(method, message, refusal):
    said = refusal(main, ["digits", "--method", method])
    assert HOW in said and message in said


@pytest.mark.parametrize(
    "line, message",
    [
        ("mine:pulled --method.perriod 3", "did you mean --method.period?; see python -m "),
        ("mine:pulled --method.wire int9", "got 'int9'; did you mean int8?; see python -m"),
        ("mine:pulled --method.strength 7", "`strength` must be in [0, 1] (or a schedule)"),
        ("mine:pulled --method.delta 1", "see python -m train digits --method mine:pulled"),
        ("mine:pulled --ray.timeout 3", "`ray.timeout` must be left out with method.name="),
        ("mine:apart --ray.processes 2", "`ray.processes` must be left out with method.n"),
        ("mine", "overlapped-dpsgd, or MODULE:FUNCTION for your own, got method='mine'"),
    ],
)
def test_wrong_options_are_refused(line, message, refusal):
    assert message in refusal(main, ["digits", "--method", *line.split()])


def test_a_file_that_names_an_absent_module_is_refused(refusal, tmp_path):
    (tmp_path / "some.json").write_text('{"method": {"name": "absent:pulled"}}')
    assert HOW in refusal(main, ["digits", "--config", "some.json"])


def test_comparisons_and_simulations_name_their_files_without_a_colon():
    line = ["digits", "--methods", "lsgd,mine:pulled", "--out", "out"]
    configs, _ = compare.parse(line)
    assert list(configs) == [("lsgd", 0), ("mine.pulled", 0)]
    assert configs["mine.pulled", 0].method.name == "mine:pulled"
    line = "digits --method mine:pulled --method mine:pulled --method.period 2".split()
    _, configs = simulate.parse(line)
    periods = {name: config.method.period for name, config in configs.items()}
    assert periods == {"mine.pulled": 4, "mine.pulled-2": 2}


def test_options_of_the_method_may_stand_before_the_experiment():
    config = cli.parse("--method.period 8 digits --method mine:pulled".split())
    assert (config.name, config.method.period) == ("digits", 8)
    assert cli.parse("--method.local-period 8 digits".split()).method.local_period == 8


@pytest.mark.slow
def test_python_m_train_finds_a_module_in_the_current_folder(tmp_path):
    command = "-m train digits --method mine:pulled --help"
    ended = python(*command.split(), timeout=60, cwd=tmp_path)
    assert ended.returncode == 0 and "--method.strength FLOAT" in ended.stdout, ended.stderr


def test_the_command_of_the_page_on_rules_finds_its_method(tmp_path):
    page = (ROOT / "docs" / "writing_a_rule.md").read_text().replace("\\\n", "")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)
    (tmp_path / "median.py").write_text("\n".join(blocks))
    (line,) = re.findall(r"^python -m train (.*--method median:median.*)$", page, re.M)
    method = cli.parse(line.split()).method
    assert (method.period, method.wire) == (8, "int8")
    (pull,) = method.exchanges(1.0).pulls
    assert pull.rule.axes == ("node", "local") and pull.every == 8
