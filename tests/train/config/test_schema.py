"""The configuration: files, checks, differences, run folders."""

import dataclasses
import itertools
import json
import os
import re
import time
import typing

import pytest

from configs import digits
from train.cluster.session import Session
from train.config import experiments, methods, settings
from train.config import schema as configuration
from train.config.methods import METHODS
from train.process import names
from train.run import folder as run_folder


def test_every_experiment_and_method_is_written_and_read_back(tmp_path):
    known = [experiments.load(name)[1] for name in names.experiments()]
    method = lambda name: dataclasses.replace(digits.CONFIG, method=methods.make(name))
    for number, config in enumerate([*known, *map(method, METHODS)]):
        path = tmp_path / str(number)
        settings.write(config, path)
        assert settings.read(path) == config
        with pytest.raises(FileExistsError):
            settings.write(config, path)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "line 1 is no JSON; is the file cut off"),
        ('{\n"steps"', "line 2 is no JSON; is the file cut off"),
        ('{"model": "te', "line 1 is no JSON; is the file cut off"),
        ('{"steps": 3,\n # few', "line 2, column 2: JSON has no comments"),
        ('// few\n{"steps": 3}', "line 1, column 1: JSON has no comments"),
        ("steps: 3", "it is no JSON, which begins with {"),
        ('{"resume": True}', "line 1, column 12 is no JSON: Expecting value"),
        ('{"steps": 3, "data": {}, "steps": 4}', "steps is given twice"),
        ('{"format": 2, "data": {"dir": "x"}, "data.dir": "y"}', "data.dir is given twice"),
        ("[" * 100_000, "its values are nested too deep"),
        ("[]", "it is no JSON object"),
        ('{"name": "digits"}', "its run is in format 1, .* resumes format 2"),
        ('{"format": 2, "name": "x"}', "read: model is missing"),
    ],
)
def test_a_file_without_a_configuration_is_refused(text, reason, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=reason) as seen:
        settings.read(tmp_path / "config.json")
    assert "\n" not in str(seen.value)


@pytest.fixture
def read_edited(tmp_path):
    """Reads a configuration in whose file a value was edited."""
    path = tmp_path / "config.json"
    settings.write(digits.CONFIG, path)
    text = path.read_text()

    def read_edited(field, value):
        values = group = json.loads(text)
        *groups, name = field.split(".")
        for each in groups:
            group = group[each]
        group[name] = value
        path.write_text(json.dumps(values))
        return settings.read(path)

    return read_edited


@pytest.mark.parametrize(
    "field, value, reason",
    [
        ("optimizer.momentun", 0, "optimizer.momentun; did you mean optimizer.momentum?"),
        ("method", None, "method.name is missing"),
        ("method.name", [], "`method` must be one of lsgd"),
        (
            "method.local_period",
            4.5,
            r"local_period` must be of type int \| str, got .*=4.5",
        ),
        ("optimizer.nesterov", 1, "`optimizer.nesterov` must be of type bool, got"),
        ("optimizer.momentum", "x", r"`optimizer.momentum` must be of type float \| None"),
        ("optimizer.betas", [0.9], r"must be of type tuple\[float, float\] \| None"),
        ("workers.inside", [3], r"`workers.inside` must be of type tuple\[str, ...\], got"),
        ("model", "vgg", "`model` must be of type Literal.*'vgg16'.*, got model=\"vgg\""),
        ("steps", True, "`steps` must be of type int, got steps=true"),
        ("seed", -1, r"`seed` must be in \[0, 2\*\*32\), got seed=-1"),
    ],
)
def test_an_edited_setting_is_named(field, value, reason, read_edited):
    with pytest.raises(ValueError, match=f"config.json cannot be read: .*{reason}"):
        read_edited(field, value)


@pytest.mark.slow
def test_any_edited_value_is_read_or_refused_in_one_line(read_edited):
    values = None, 1.5, 10**400, float("inf"), "x", [], ["a"], {}
    written = configuration.fields(digits.CONFIG).keys() - configuration.DISTRIBUTED
    edits = list(itertools.product([*written, "method", "optimizer"], values))
    refused = 0
    for field, value in edits:
        try:
            read_edited(field, value)
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
    assert len(edits) / 2 < refused < len(edits)


INF, NAN = float("inf"), float("nan")
REFUSED = {  # values that the rule of a setting must refuse
    configuration.COUNT: (0, -1, 1.5, True),
    configuration.NOT_EMPTY: ("",),
    configuration.POSITIVE: (0.0, INF, NAN),
    configuration.NOT_NEGATIVE: (-1, INF, NAN),
    configuration.BELOW_ONE: (-0.1, 1.0),
    configuration.SHARE: (-1.0, 1.5, INF),
    "name": ("", ".", "..", "a/b", "a\nb", "a\x1b", "\udce9", "x" * 201, "é" * 101),
    "wandb": ("", "/", "/a", "a/", "a/b/c"),
    "trackio": ("",),
    "seed": (-1, 2**32),
    "workers.inside": (("fsdp",), ("fsdp=0",), ("a=2", "a=2")),
    "optimizer.betas": ((0.9, 1.0),),
    "optimizer.drop_at": ((0,), (7, 3)),
    "optimizer.final_fraction": (-0.1, 1.5),
    "distributed.coordinator": ("n1", ":80", "n1:70000"),
    "ray.address": ("here",),
    "ray.object_store": (0.05,),
}


def with_choices(chosen):
    """All settings with the given choices. Some data and networks need each other."""
    values = configuration.fields(configuration.Config("x", "digits-cnn")) | chosen
    for data, model in configuration.NETWORKS.items():
        if data in chosen.values() or model in chosen.values():
            values |= {"data.name": data, "model": model}
    return values


NOTES = [(name, note) for name, x in configuration.SETTINGS.items() for note in x.notes]


@pytest.mark.parametrize(
    "name, rule", [pair for pair in NOTES if isinstance(pair[1], configuration.Condition)]
)
def test_every_rule_is_checked(name, rule):
    own = (note for other, note in NOTES if other == name)
    owners = (note for note in own if isinstance(note, configuration.Only))
    values = with_choices({owner.choice: owner.values[0] for owner in owners})
    configuration.check_each(values)
    for value in REFUSED.get(rule) or REFUSED[name]:
        message = f"`{name}` must be {rule.text}, got {name}={value}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            configuration.check_each(values | {name: value})


@pytest.mark.parametrize(
    "name, only", [pair for pair in NOTES if isinstance(pair[1], configuration.Only)]
)
def test_a_setting_that_belongs_to_another_choice_is_refused(name, only):
    """Any value but the default is refused."""
    hints = {name: setting.hint for name, setting in configuration.SETTINGS.items()}
    hints["method.name"] = typing.Literal[tuple(METHODS)]
    for other in set(typing.get_args(hints[only.choice])) - set(only.values):
        message = f"`{name}` must be left out with {only.choice}={other}, got {name}=x"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            configuration.check_each(with_choices({only.choice: other}) | {name: "x"})


def test_the_number_of_steps_is_fixed_for_a_cosine():
    cosine = configuration.OptimizerConfig(schedule="cosine")
    old = dataclasses.replace(digits.CONFIG, optimizer=cosine)
    longer = dataclasses.replace(old, steps=old.steps + 1)
    changes = ["steps: the run has 120, the command says 121"]
    assert settings.differences(old, longer) == changes


def test_only_length_reports_and_workers_may_change():
    old = digits.CONFIG
    free = dataclasses.replace(old, steps=9, log_every=1, run_dir="x", resume=True)
    assert settings.differences(old, free) == []
    workers = configuration.WorkersConfig(nodes=3, locals=5)
    others = dataclasses.replace(old, workers=workers)
    assert settings.differences(old, others) == []
    data = dataclasses.replace(old.data, shard=True)
    other = dataclasses.replace(old, data=data, batch_size=7)
    assert len(settings.differences(old, other)) == 2


def test_a_run_may_use_a_file_system_of_its_own(tmp_path):
    (tmp_path / "lost+found").mkdir()
    config = dataclasses.replace(digits.CONFIG, run_dir=str(tmp_path))
    assert run_folder.create(config, Session()) == tmp_path
    with pytest.raises(ValueError, match="`run_dir` must be a new folder"):
        run_folder.create(config, Session())


@pytest.mark.parametrize(
    "where, reason",
    [
        ({"run_dir": "file/run"}, "run folder .*file/run cannot be made: Not a directo"),
        ({"runs": "file"}, "run folder .*file/digits-.* cannot be made: Not a directo"),
        ({"run_dir": "x" * 300}, "cannot be made: File name too long"),
        ({"run_dir": "x\0"}, "null (byte|character)"),
        ({"run_dir": "\udce9"}, r"must be UTF-8, got b'/.*\\xe9'"),
        ({"run_dir": "file"}, "`run_dir` must be a new folder"),
    ],
)
def test_a_folder_that_cannot_be_created_leaves_no_files(tmp_path, where, reason):
    (tmp_path / "file").touch()
    where = {name: str(tmp_path / path) for name, path in where.items()}
    config = dataclasses.replace(digits.CONFIG, **where)
    with pytest.raises(ValueError, match=reason) as raised:
        run_folder.create(config, Session())
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_no_folder(tmp_path, monkeypatch):
    def full(config, path):
        path.write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(settings, "write", full)
    config = dataclasses.replace(digits.CONFIG, run_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="run cannot be made: No space left on device"):
        run_folder.create(config, Session())
    assert not list(tmp_path.iterdir())


def test_runs_that_start_together_get_different_folders(tmp_path, monkeypatch):
    """Another run takes the name after it was chosen and before it is created."""
    config = dataclasses.replace(digits.CONFIG, runs=str(tmp_path))
    taken, choose = [], run_folder.choose

    def raced(config):
        folder = choose(config)
        if not taken:
            taken.append(folder)
            folder.mkdir()
            settings.write(config, folder / "config.json")
            monkeypatch.setattr(run_folder, "taken", lambda path: False)  # a race
        return folder

    monkeypatch.setattr(run_folder, "choose", raced)
    folder = run_folder.create(config, Session())
    assert folder.name == f"{taken[0].name}-2"


@pytest.mark.parametrize("ahead", [3600, 1e-3])
@pytest.mark.parametrize("hosts", ["UTC UTC", "Asia/Tokyo America/Los_Angeles"])
def test_the_run_that_began_last_is_the_newest(ahead, hosts, tmp_path, monkeypatch):
    """Also on hosts in other time zones, and after a clock was set back."""
    config = dataclasses.replace(digits.CONFIG, runs=str(tmp_path))
    clock = [1_800_000_000 + ahead, 1_800_000_000.0, 1_800_000_001.0]
    begun = []
    for zone, now in zip([*hosts.split(), "UTC"], clock):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        begun.append(run_folder.create(config, Session()))
        assert run_folder.newest(config.runs, config.name) == begun[-1]
    monkeypatch.undo()
    time.tzset()
    assert len(set(begun)) == 3
    os.utime(begun[0] / "config.json")  # as a copy of the folder
    assert run_folder.newest(config.runs, config.name) == begun[-1]
