"""python -m paper: names, wrong usage, folders."""

import pytest

from paper import __main__ as paper
from paper import theory
from paper.statements.claim import Claim, Findings


def test_help_names_every_experiment(capsys):
    assert paper.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in paper.EXPERIMENTS)


@pytest.mark.parametrize("name", paper.EXPERIMENTS)
def test_every_experiment_explains_its_options(name, capsys):
    with pytest.raises(SystemExit) as stop:
        paper.main([name, "--help"])
    assert stop.value.code == 0
    assert f"python -m paper {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the experiment must be one of sinc, "),
        (["nonsense"], "got 'nonsense'"),
        (["sinc", "--nonsense"], "unrecognized option --nonsense"),
        (["sinc", "--starts", "0"], "`starts` must be a positive int, got starts=0"),
        (["sinc", "--starts", "x"], "--starts must be an int, got 'x'"),
        (["sinc", "--seed", "-1"], "`seed` must be in [0, 2**32), got seed=-1"),
        (["matrix-completion", "--ranks", "1", "x"], "--ranks: Could not find valid"),
        (["matrix-completion", "--ranks", "1001"], "`ranks` must lie in 1..1000"),
        (["matrix-completion", "--pull", "2"], "`pull` must be in [0, 1]"),
        (["matrix-completion", "--pull", "0.2"], "pull x workers"),
        (["matrix-completion", "--learning-rate", "nan"], "`learning_rate` must be at"),
        (["theory", "--only", "one-step", "two"], "'two'"),
    ],
)
def test_wrong_usage(arguments, message, refusal):
    assert message in refusal(paper.main, arguments)


@pytest.mark.parametrize("out", ["", "file", "file/below"])
def test_existing_files_are_left_alone(out, tmp_path, refusal):
    (tmp_path / "file").write_text("kept")
    said = refusal(paper.main, ["theory", "--out", str(tmp_path / out)])
    rule = "the results cannot be written to" if "/" in out else "`out` must be a new or"
    assert rule in said


def test_every_run_gets_a_new_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    claim = Claim("zero is at most zero", "0", 0.0)
    monkeypatch.setitem(theory.CHECKS, "round-robin", lambda seed: Findings([claim]))
    for _ in range(2):
        assert paper.main(["theory", "--only", "round-robin"]) == 0
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert all(path.name.startswith("paper-theory-") for path in folders)
