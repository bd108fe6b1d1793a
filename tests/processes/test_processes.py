"""The same code in several processes: the same numbers, files by the first one alone."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest


HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 300


def run(job, folder, count):
    """What every process answers; all are ended after a hard limit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "PJRT_NPROC": "16"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                HERE / "together.py",
                job,
                folder,
                str(port),
                str(count),
                str(i),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for i in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    answers = []
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output
        (line,) = [x for x in output.splitlines() if x.startswith("ANSWER ")]
        answers.append(json.loads(line.removeprefix("ANSWER ")))
    return answers, outputs


@pytest.mark.parametrize("count", [2, 4])
def test_lsgd_over_processes_reproduces_its_oracle(count):
    answers, _ = run("lsgd_oracle", HERE.parent / "oracles", count)
    per_process = 8 // count
    owned = [list(range(i * per_process, (i + 1) * per_process)) for i in range(count)]
    assert [answer["owned"] for answer in answers] == owned
    assert all(answer["leaders"] == answers[0]["leaders"] for answer in answers)


def test_the_trainer_over_two_processes_is_the_trainer(tmp_path):
    (alone,), _ = run("digits", tmp_path / "one", 1)
    answers, outputs = run("digits", tmp_path / "two", 2)
    assert answers[0] == answers[1]
    assert answers[0]["step"] == alone["step"] == 8
    assert answers[0]["error"] == pytest.approx(
        alone["error"], abs=0.6
    )  # two images of 360
    assert answers[0]["total"] == pytest.approx(alone["total"], rel=1e-4)
    assert "test error" in outputs[0] and "test error" not in outputs[1]
    names = {path.name for path in (tmp_path / "two" / "run").iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "checkpoints", "training.png"}
    metrics = (tmp_path / "two" / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(x)["step"] for x in metrics if '"kind": "train"' in x]
    assert steps == [2, 4, 6, 8]
