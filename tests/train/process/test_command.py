"""Commands whose output streams are full, closed or cut off."""

import os
import subprocess
import sys

import pytest
from outside import ROOT, python

from train.process import command


# Prints more than the reader of a pipe accepts, then does its work.
SCRIPT = """
import pathlib, sys, time
from train.process import command

def main(arguments):
    command.tell_of_lost_output(pathlib.Path("told").write_text)
    for i in range(100):
        print(i, "\\N{GREEK SMALL LETTER LAMDA}", flush=True)
        time.sleep(0.001)
    print("the end", file=sys.stderr)
    pathlib.Path("done").touch()
    return 3

sys.exit(command.run(main, leaves_files=LEAVES_FILES))
"""


def run(folder, redirected, leaves_files=True):
    """Runs the script with redirected output; returns the completed process."""
    script = SCRIPT.replace("LEAVES_FILES", str(leaves_files))
    line = f'"$0" -c "$1" {redirected}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(
        ["bash", "-c", line, sys.executable, script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "redirected, why",
    [
        ("> /dev/full", "standard output cannot be written any more: [Errno 28] No space"),
        ("| head -1", "standard output cannot be written any more: [Errno 32] Broken pipe"),
        ("> /dev/full 2>&1", "standard error cannot be written any more: [Errno 28]"),
    ],
)
def test_a_command_continues_without_output_and_records_why(tmp_path, redirected, why):
    ended = run(tmp_path, redirected)
    assert ended.returncode == 3 and (tmp_path / "done").exists()
    assert (tmp_path / "told").read_text().startswith(why)
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr


def test_files_never_replace_closed_streams(tmp_path):
    """A file with descriptor 1 would receive the output of C++ code."""
    ended = run(tmp_path, ">&- 2>&-")
    assert ended.returncode == 3 and (tmp_path / "done").exists()
    assert not (tmp_path / "told").exists()  # nothing fails: output goes to /dev/null


def test_a_command_without_files_ends_with_its_reader(tmp_path):
    ended = run(tmp_path, "| head -1", leaves_files=False)
    assert ended.returncode == 141 and not (tmp_path / "done").exists()
    assert ended.stderr == ""
    full = run(tmp_path, "> /dev/full", leaves_files=False)
    assert full.returncode == 1
    assert full.stderr == "error: [Errno 28] No space left on device\n"


def test_a_character_outside_the_encoding_is_escaped(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ended = run(tmp_path, "")
    assert ended.returncode == 3 and "0 \\u03bb\n" in ended.stdout


@pytest.mark.parametrize("how", ["script", "module", "option"])
def test_paths_are_utf8_whatever_the_locale(tmp_path, how):
    script = """
import sys
from train.process import command
if __name__ == "__main__":
    sys.exit(command.run(lambda arguments: print(ascii(arguments))))
"""
    (tmp_path / "m.py").write_text(script)
    start = {
        "script": ["-c", script],
        "module": ["-m", "m"],
        "option": ["-X", "utf8=0", "-m", "m"],
    }[how]
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    plain["PYTHONPATH"] = f"{ROOT}{os.pathsep}{tmp_path}"
    ended = python(*start, "--run-dir", "é", timeout=30, **plain)
    assert (ended.stdout, ended.stderr) == (r"['--run-dir', '\xe9']" + "\n", "")


def test_a_stream_that_recovers_is_used_again():
    class Full:
        full, texts = True, []

        def write(self, text):
            if self.full:
                raise OSError(28, "No space left on device")
            self.texts.append(text)

    told = []
    stream = command.Lasting(Full(), "standard output")
    stream.tell = told.append
    print("lost", file=stream)
    Full.full = False
    print("kept", file=stream)
    assert Full.texts == ["kept", "\n"] and len(told) == 1


def test_an_environment_that_jax_rejects_is_refused_in_one_line():
    ended = python("-m", "train", "digits", JAX_DEFAULT_MATMUL_PRECISION="bogus")
    line = 'error: Invalid value "bogus" for JAX flag jax_default_matmul_precision\n'
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


def test_without_its_packages_a_command_says_how_to_install_them():
    for module in ("train", "train.plan"):
        ended = python("-S", "-m", module, "digits")  # -S hides installed packages
        line = (
            "error: the trainer needs jax, which is not installed: pip install -e "
            '".[train]" in a checkout of lsgd_jax\n'
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


@pytest.mark.parametrize(
    "line, status, text",
    [
        ("train", 2, "usage: python -m train NAME [OPTIONS]"),
        ("train --help", 0, "digits             Leader SGD on scikit-learn's handwritten"),
        ("train digts --steps 3", 2, "got 'digts'; did you mean digits?; see python -m tr"),
        ("train.compare digts --methods lsgd", 2, "got 'digts'; did you mean digits?"),
        ("train.plan tekst", 2, "got 'tekst'; did you mean text?"),
        ("train plots RUN", 2, "got 'plots'; did you mean python -m train.plots?"),
        ("train.comprae digits", 2, "did you mean python -m train.compare?"),
        ("train.plots --help", 0, "usage: python -m train.plots RUN [RUN ...]"),
        ("paper --help", 0, "sinc                Four workers on the sinc"),
        ("paper cifr10", 2, "got 'cifr10'; did you mean cifar10?"),
    ],
)
def test_help_and_a_typo_in_a_name_do_not_wait_for_jax(line, status, text, tmp_path):
    """Importing jax takes seconds. Here its import fails."""
    (tmp_path / "jax.py").write_text("raise AssertionError('jax is imported')")
    ended = python("-m", *line.split(), PYTHONPATH=str(tmp_path))
    assert ended.returncode == status
    is_typo = "did you mean" in text
    assert text in (ended.stderr if is_typo else ended.stdout)
    assert ended.stderr.count("\n") == is_typo


@pytest.mark.slow
def test_a_run_without_docstrings_and_with_debug_nans(tmp_path):
    command = ["-OO", "-m", "train", "digits", "--steps", "20"]
    ended = python(*command, "--run-dir", str(tmp_path / "run"), JAX_DEBUG_NANS="1")
    assert (ended.returncode, ended.stderr) == (0, "")
