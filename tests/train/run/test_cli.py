"""python -m train: messages for wrong usage, --help, resuming, Ctrl-C."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import sys
from unittest.mock import Mock

import pytest
import tiny
from trainers import FOR_EVER, TINY, Trainers, checkpoints, reported

import lsgd_jax as lj
from train import compare, compile, plan, simulate
from train.__main__ import main
from train.config import experiments, methods, settings
from train.config.methods import METHODS
from train.config.schema import SETTINGS, fields
from train.run import cli
from train.run.result import NONFINITE, Result


QUICK = "digits --workers.nodes 1 --workers.locals 2 --batch-size 8 --log-every 2".split()

NETWORKS = (
    "mlp, digits-cnn, digits-bn, cnn7, resnet20, vgg16, resnet50, transformer, "
    "encoder-decoder"
)
WRONG = [  # a command line, and a part of the message
    ("--steps 3", "expected one of arrays, cifar10-cnn7, cifar10-resnet20,"),
    ("digts", "got 'digts'; did you mean digits?; see python -m train --help"),
    ("digits --stepz 3", "option --stepz; did you mean --steps?; see python -m train digi"),
    ("digits --nonsense", "option --nonsense; see python -m train digits --help"),
    ("digits and more", "unrecognized argument and; see python -m train digits --help"),
    ("digits --steps", "--steps needs a value; see python -m train digits --help"),
    ("digits --steps many", "--steps must be an int, got 'many'"),
    ("digits --data.prefetch 1 --optimizer.learning-rate x", "must be a number, got 'x'"),
    ("digits --model vgg", f"must be one of {NETWORKS}, got 'vgg'; did you mean vgg16?"),
    ("digits --method eagsd", "got method='eagsd'; did you mean easgd?"),
    (
        "digits --optimizer.name adamw --optimizer.betas 0.9",
        "must be two numbers, got '0.9'",
    ),
    ("digits --method=easgd --method.local-pull 0", "train digits --method easgd --help"),
    ("digits --method dpsgd --method.topology rign", "got 'rign'; did you mean ring?; see"),
    ("digits --optimizer adamw", "--optimizer; did you mean --optimizer.name?; see python"),
    ("digits --method.name easgd", "option --method.name; did you mean --method?; see"),
    ("--data.shard=True digits", "--data.shard takes no value, got True; use --data.shard"),
    (
        "digits --resume false",
        "takes no value, got false; use --resume or --no-resume; see",
    ),
    ("digits --method grawa --method.layerwise=1", "--method.layerwise takes no value, g"),
    ("digits --no-data.shard", "--no-data.shard; did you mean --data.no-shard?; see"),
    ("digits -- --steps 3", "-- must be left out; see python -m train digits --help"),
    # One setting.
    ("digits --steps 2147483648", "`steps` must be less than 2**31, got steps"),
    ("digits --optimizer.clip=1e39", "`optimizer.clip` must be finite as a float"),
    ("digits --method.local-pull 7", "`local_pull` must be in [0, 1]"),
    ("digits --method=diloco --method.outer-momentum=nan", "must be finite as a"),
    ("digits --method diloco --method.fragments 64", "at most the number of leaves (8), g"),
    ("digits --method.part Dense_9", "must hold at least one leaf, got part='Dense_9' fo"),
    ("digits --method.part Dense_0,", "a part must be paths such as Dense_0, 'Conv_*, Den"),
    ("digits --method.held-out=-1", "`held_out` must be at least 0, got held_out=-1"),
    ("digits --method.held-out 1437", "must be below 1,437, the number of training examp"),
    ("digits --method overlapped-lsgd --method.delay 64", "must be an int in [0, 64), got"),
    ("digits --optimizer.learning-rate 1e-39", "must be above 1.2e-38, below which a flo"),
    ("digits --wandb=", "`wandb` must be PROJECT or TEAM/PROJECT, got wandb="),
    ("digits --trackio=", "`trackio` must be the name of a project, got trackio="),
    (
        f"digits --name {'é' * 101}",
        "must be a name for a folder, of at most 200 bytes, got",
    ),
    # Several settings.
    ("digits --workers.inside fsdp=3", "`batch_size` must be a multiple of 3, the device"),
    (
        "digits --method async-lsgd --workers.inside fsdp=2 --ray.gpus-per-worker 1",
        "`ray.gpus_per_worker` must be 0 or 2, the devices of a worker (workers.inside), g",
    ),
    ("digits --ray.processes 3 --workers.nodes 2", "ray.processes=3 share all workers eq"),
    ("digits --method.global-period 4", "must be at least method.local_period=8, got met"),
    ("digits --batch-statistics keep", "must be left out with model=digits-cnn, got bat"),
    ("digits --workers.locals 40000", "must be at most 1 with workers.locals=40000, got w"),
    ("text --transformer.heads 3", "`transformer.width` must be divisible by twice the he"),
    ("cifar10-cnn7 --data.crop 40", "`data.crop` must be at most 32 with cifar10, got"),
    ("digits --model transformer", "`model` must be transformer with data.name=text, and"),
    ("text --steps 60 --optimizer.warmup-steps 70", "(optimizer.warmup_steps=70), got st"),
    ("digits --optimizer.schedule drops", "`optimizer.drop_at` must have the steps of the"),
    ("digits --ray.start-timeout 5", "must be left out without ray.processes, got"),
    # Runs and data that do not exist.
    ("digits --resume --runs none", "there is no run of 'digits' in 'none'"),
    ("digits --resume --run-dir none", "none is no run folder: it does not exist"),
    ("cifar10-cnn7", "`data.dir` must name the folder of the official CIFAR-10 files"),
]


@pytest.mark.parametrize("arguments, message", WRONG)
def test_wrong_usage(arguments, message, refusal):
    assert message in refusal(main, arguments.split())


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_help_explains_every_field(capsys):
    text = help_of(capsys, "digits")
    assert text.startswith("usage: python -m train digits [-h] [OPTIONS]\n\nLeader")
    assert "\n- Command: python -m train digits\n- Hardware: 2 CPU cores" in text
    words = " ".join(text.split())
    for option in (
        "--batch-size INT Images, windows of text or pairs of sentences, per worker and",
        "--workers.locals INT Number of workers in each node.",
        "--optimizer.learning-rate FLOAT Learning rate; with a schedule, the highest",
        f"--method NAME selects another method: {', '.join(METHODS)}.",
    ):
        assert option in words
    for field in fields(experiments.load("digits")[1]):
        if field not in ("method.name", "experiment"):
            assert f"--{field.replace('_', '-')} " in words.replace(",", " ")


@pytest.mark.parametrize("name", METHODS)
def test_help_explains_the_options_of_every_method(capsys, name):
    with pytest.raises(SystemExit):
        cli.run(METHODS[name], ["--help"], name)
    text = " ".join(capsys.readouterr().out.partition("and exit")[2].split())
    found = re.findall(r"(?<!\S)--([\w-]+)(?:, --\S+)? (.*?) \(default:", text)
    options = {x.name.replace("_", "-") for x in dataclasses.fields(METHODS[name])}
    assert dict(found).keys() == options
    kinds = r"(\{[^}]*\}(\|\w+)?|INT|FLOAT|STR)?"
    assert all(len(re.sub(f"^{kinds} ?", "", said)) > 5 for _, said in found)


def test_the_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith(f"lsgd_jax {lj.__version__}, jax ")


def test_help_names_the_experiments(capsys):
    text = help_of(capsys)
    with pytest.raises(SystemExit) as stop:  # a command line that names none
        main([])
    assert (stop.value.code, capsys.readouterr().out) == (2, text)
    assert "digits             Leader SGD on scikit-learn's handwritten digits" in text


@pytest.mark.parametrize(
    "arguments, values",
    [
        ("digits --optimizer.name adamw", dict(momentum=None, learning_rate=1e-3)),
        ("digits --optimizer.learning-rate 2 --optimizer.name=lion", dict(learning_rate=2)),
        ("digits --optimizer.name=lion --optimizer.betas 0.9 0.8", dict(betas=(0.9, 0.8))),
        ("cifar10-resnet20 --optimizer.schedule cosine", dict(drop_at=())),
        ("text --steps 60", dict(warmup_steps=30)),
        ("text --steps 60 --optimizer.warmup-steps 7", dict(warmup_steps=7)),
        ("text --steps 5000", dict(warmup_steps=100)),
        ("cifar10-vgg16 --data.name digits --model digits-cnn", dict(crop=28, padding=0)),
    ],
)
def test_a_choice_changes_dependent_defaults(arguments, values):
    config = cli.parse(arguments.split())
    chosen = vars(config.data) | vars(config.optimizer)
    assert chosen | values == chosen


def test_resuming_keeps_the_settings_of_the_run(tmp_path):
    """Options default to those of the run. Other values must not change the experiment."""
    begun = "digits --seed 5 --method.local-period 3 --optimizer.warmup-steps 20"
    settings.write(cli.parse(begun.split()), tmp_path / "config.json")
    resume = ["digits", "--resume", f"--run-dir={tmp_path}", "--steps", "9"]
    resumed = cli.parse(resume)
    assert (resumed.seed, resumed.method.local_period, resumed.steps) == (5, 3, 9)
    assert resumed.optimizer.warmup_steps == 20
    with pytest.raises(ValueError, match="seed: the run has 5, the command says 6"):
        cli.parse([*resume, "--seed", "6"])
    cifar = ["cifar10-cnn7", "--resume", "--run-dir", str(tmp_path), "--data.dir", "x"]
    with pytest.raises(ValueError, match="is a run of 'digits', not of 'cifar10-cnn7'"):
        cli.parse(cifar)


def test_resuming_finds_the_newest_run_of_the_name(tmp_path):
    """The name in config.json counts, not the name of the folder."""
    folders = "digits-20260102-000000 digits-20260101-000000-2 digits-bn my".split()
    names = ["digits", "digits", "digits-bn", "my"]
    for stamp, (name, folder) in enumerate(zip(names, map(tmp_path.joinpath, folders)), 1):
        folder.mkdir()
        config = cli.parse(["digits", "--name", name, "--seed", str(stamp)])
        settings.write(config, folder / "config.json")
        os.utime(folder / "config.json", (stamp, stamp))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes(b"\xff[")
    resume = ["digits", "--resume", f"--runs={tmp_path}"]
    assert cli.parse(resume).seed == 1  # the dates count, not the times of the files
    assert cli.parse([*resume, "--name", "digits-bn"]).seed == 3
    assert cli.parse([*resume, "--name=my"]).name == "my"
    with pytest.raises(ValueError, match="named digits, digits-bn, my: see --name"):
        cli.parse([*resume, "--name", "none"])


def test_a_package_in_the_current_folder_hides_no_experiments(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    for name in "__init__", "digits":
        (tmp_path / "configs" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [x for x in sys.modules if x.partition(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)
    known = experiments.load("digits")
    monkeypatch.delitem(sys.modules, "train.config.experiments.digits")
    assert experiments.load("digits") == known


def test_a_method_brings_its_own_options(tmp_path):
    config = cli.parse(["digits", "--method", "easgd", "--method.period", "3"])
    assert config.method == methods.make("easgd", period=3)
    settings.write(config, tmp_path / "config.json")
    # Naming the method of an experiment keeps the experiment's options.
    assert cli.parse(["digits", "--method", "lsgd"]).method == methods.make(
        "lsgd", 0.1, 0.1, 8, 32
    )
    resume = ["digits", "--resume", "--run-dir", str(tmp_path)]
    assert cli.parse(resume).method == methods.make("easgd", period=3)
    with pytest.raises(ValueError, match="method.name: the run has 'easgd', .* says 'sgp'"):
        cli.parse([*resume, "--method", "sgp"])


def test_a_file_sets_what_it_names_and_options_are_on_top(tmp_path):
    begun = ["digits", "--method", "easgd", "--method.period", "3", "--optimizer.clip", "1"]
    run = dataclasses.replace(cli.parse(begun), run_dir="x", resume=True)
    settings.write(run, file := tmp_path / "config.json")
    for start in ([], ["digits"]):  # the file of a run names its experiment
        config = cli.parse([*start, "--config", str(file), "--method.period", "4"])
        assert config.method == methods.make("easgd", period=4)
        assert (config.optimizer.clip, config.run_dir, config.resume) == (1, None, False)
    some = {"optimizer": {"name": "adamw"}, "method": "easgd", "workers.locals": 1}
    for encoding in "utf-8", "utf-8-sig", "utf-16":  # some editors begin with a BOM
        file.write_text(json.dumps(some | {"steps": 7}), encoding)
        config = cli.parse(["digits", f"--config={file}", "--steps", "8"])
        assert (config.optimizer.learning_rate, config.steps) == (1e-3, 8)
        assert (config.workers.locals, config.method) == (1, methods.make("easgd"))


def test_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    """A shell leaves ~ as it is in --option=~/x, and in a file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "some.json").write_text('{"runs": "~/runs", "data.files": ["~/a", "~b/~"]}')
    config = cli.parse(["text", "--config=~/some.json", "--run-dir=~/x"])
    assert config.data.files == (f"{tmp_path}/a", "~b/~")
    assert (config.runs, config.run_dir) == (f"{tmp_path}/runs", f"{tmp_path}/x")
    options = cli.run(compare.CompareOptions, ["text", "--out=~/out"], "compare")
    assert options.out == tmp_path / "out"


@pytest.mark.parametrize(
    "options, common",
    [
        (compare.CompareOptions, set()),
        (compile.CompileOptions, set()),
        (plan.PlanOptions, {"method"}),  # `method.period` of the run that is planned
        (simulate.SimulateOptions, set()),
    ],
)
def test_no_option_of_a_command_is_one_of_the_trainer(options, common):
    """The options of `python -m train` may follow, and the command would take them."""
    fields = [vars(cls).get("__annotations__", {}) for cls in options.__mro__]
    own = [name for names in fields for name in names]
    assert len(own) == len({*own}), "a base class has an option of the same name"
    assert {*own} & {*SETTINGS, "method", "config"} == {"experiment"} | common


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"optimizer": {"momentun": 0.9}}', "there is no setting optimizer.momentun; did"),
        (
            '{"optimizer": "adamw"}',
            "there is no setting optimizer; did you mean optimizer.n",
        ),
        ('{"momentum": 0.9}', "no setting momentum; did you mean optimizer.momentum?"),
        ('{"method": "easgd", "method.name": "sgp"}', "method.name is given twice"),
        ('{"experiment": "text"}', "--config is of 'text', not of 'digits'"),
        (
            '{"method.judged_by": "peers"}',
            "with `method.judged_by`, which must be 'own' now, got method.judged_by=\"peer",
        ),
        ('{"data": {"padding": 2}}', "`data.padding` must be left out with data.name"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text, message, refusal, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert message in refusal(main, ["digits", "--config", "config.json"])


def test_a_file_goes_with_resuming(tmp_path):
    settings.write(cli.parse(["digits", "--seed", "5"]), tmp_path / "config.json")
    (tmp_path / "some.json").write_text('{"steps": 9, "method.late": "pull"}')  # of 0.3
    file = f"--config={tmp_path / 'some.json'}"
    config = cli.parse(["digits", "--resume", f"--run-dir={tmp_path}", file])
    assert (config.seed, config.steps) == (5, 9)


@pytest.mark.slow  # test_loop sends signals in this process
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)]
)
def test_a_signal_saves_and_the_run_says_how_to_resume(number, status, tmp_path):
    folder = tmp_path / "run"
    arguments = [*QUICK, *FOR_EVER, "--run-dir", str(folder)]
    with Trainers(tmp_path / "printed", arguments, [([], {})], before=TINY) as trainer:
        trainer.until(lambda: reported(folder))
        trainer.send(number, 0)
        assert trainer.end() == [status], trainer.printed(0)
    (step,) = checkpoints(folder)
    assert f"stopped at step {step} after" in trainer.printed(0)
    again = f"to resume: python -m train digits --run-dir {folder} --resume"
    assert again in trainer.last_line(0)


@pytest.mark.parametrize(
    ("stopped_by", "saved", "status"),
    [
        (None, True, 0),
        (signal.SIGTERM, True, 75),
        (signal.SIGTERM, False, 1),
        (signal.SIGINT, True, 130),
        (NONFINITE, True, 1),
    ],
)
def test_the_status_says_whether_to_start_again(stopped_by, saved, status, monkeypatch):
    result = Result(pathlib.Path("run"), 4, 1.0, None, stopped_by, saved)
    monkeypatch.setattr("train.run.open.open_run", Mock())
    monkeypatch.setattr("train.run.loop.train", Mock(return_value=result))
    assert main(["digits"]) == status


def test_resuming_reports_edited_settings_and_finished_runs(tmp_path, monkeypatch, capsys):
    tiny.install(share=True, set=monkeypatch.setattr)
    folder = tmp_path / "run"
    run = [*QUICK, "--run-dir", str(folder), "--test-every", "9"]
    assert main([*run, "--steps", "4"]) == 0
    assert main([*run, "--resume", "--steps", "3"]) == 0
    expected = "the run has taken 4 steps already, more than --steps 3: it takes no more"
    assert expected in capsys.readouterr().out
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    assert main([*run, "--resume", "--steps", "6"]) == 2
    expected = "config.json was edited: the run began with seed=0, and it says seed=1"
    assert expected in capsys.readouterr().err
