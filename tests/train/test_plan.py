"""train.plan: its arithmetic against numbers computed by hand, and the command."""

import json
import pathlib
import re
import shlex

import pytest
import tiny

from train import plan
from train.planning import engine, measurement


PAGE = pathlib.Path(__file__).parents[2] / "docs/is_it_worth_it.md"
# A step takes 100 ms, the parameters 400 ms, and each message 10 ms more.
STEP = "--step-ms 100 --parameter-mb 4"
NODES = (
    f"{STEP} --mbit 120 --latency-ms 2.5 --steps 500 --workers.nodes 4 --workers.locals 1"
)
ONE_NODE = (
    f"{STEP} --mbit 120 --latency-ms 2.5 --steps 500 --workers.nodes 1 --workers.locals 4"
)
SITES = f"{STEP} --mbit 120 --latency-ms 2.5 --sites 4"
TWO = f"{STEP} --mbit 80 --latency-ms 5 --workers.nodes 2 --workers.locals 1"
RUN = f"{SITES} --tokens 6e5 --batch 1e3"  # of 600 steps
# 6 N D / (64 · 197e12 / 2) = 19,036 s for 1 B parameters and 20 B tokens.
MODEL = "--parameters 1e9 --tokens 2e10 --chips v5e:8x8"


@pytest.fixture
def planned(capsys):
    """Plans. Returns the candidates by method, wire, fragments and delay, and the rest."""

    def planned(options):
        assert plan.main([*options.split(), "--json"]) == 0
        output = json.loads(capsys.readouterr().out)
        found = {}
        for each in output.pop("candidates"):
            name = each["options"].split()[1]
            key = name, each["wire"], each["fragments"], each["delay"]
            found.setdefault(key, []).append(each)
        return found, output

    return planned


def brief(found):
    """The waiting in %, the longest wait in ms, and the periods."""
    wait = 100 * found["waiting"], 1e3 * found["longest_wait_seconds"]
    return [*(round(x, 1) for x in wait), *found["periods"]]


LATER = "1,100:16"
RULE = "quadratic(0.2,4)"
QUADRATIC = f"--method local-sgd --method.period {RULE}"


@pytest.mark.parametrize(
    "options, method, expected",
    [
        # Workers may wait 33.3 ms per step. Election and pull take 10 + 410 ms: 12.6 steps,
        # rounded up to a power of two.
        (f"digits {NODES} --share 0.25", "lsgd float32 1 0", [20.8, 420, 16, 16]),
        (f"{SITES} --share 0.25", "lsgd float32 1 0", [20.8, 420, 16, 16]),
        # A million int8 values and 3,906.25 scales of 4 bytes take 101.5625 ms.
        (f"digits {NODES} --share 0.25", "lsgd int8 1 0", [23.3, 121.6, 4, 4]),
        # 410 ms in 4 fragments: 3 more latencies. A delay hides 100 of a fragment's 110 ms,
        # which is due every second step.
        (f"{SITES} --share 0.1", "diloco float32 4 0", [6.4, 110, 64]),
        (f"digits {NODES} --share 0.1", "diloco float32 4 1", [4.8, 10, 8]),
        # Five steps hide 410 ms. A period is at least four times as long.
        (f"{SITES} --share 0.1", "diloco float32 1 5", [0, 0, 32]),
        (f"{SITES} --method.period 8", "diloco float32 1 2", [20.8, 210, 8]),
        # A mean in few bits has the messages of a sum.
        (f"digits {NODES} --share 0.25", "diloco int8 1 0", [21.8, 111.6, 4]),
        (f"digits {TWO} --share 0.25", "diloco int4 1 0", [23.5, 61.6, 2]),
        (f"digits {TWO} --share 0.25", "diloco int4 1 1", [0, 0, 2]),
        # A worker receives the others' 27 kB, in 2 log 4 messages: 5.4 + 5 ms.
        (f"{SITES} --share 0.25", "sparse-diloco sparse 1 0", [0.3, 10.4, 32]),
        # Gradients hide behind 66.7 ms of backward passes.
        (f"{SITES} --share 0.25", "allreduce float32 1 0", [77.4, 343.3, 1]),
        (f"digits {NODES} --share 0.75", "lsgd float32 1 0", [67.7, 420, 2, 2]),
        # One node has both pulls.
        (f"digits {ONE_NODE} --share 0.25", "lsgd float32 1 0", [20.8, 840, 32, 32]),
        # At most 1024 steps, 410 of 102,400 ms, and at most a tenth of the 500 steps.
        (f"{SITES} --share 0.001", "local-sgd float32 1 0", [0.4, 410, 1024]),
        (f"digits {NODES} --share 0.001", "local-sgd float32 1 0", [11.4, 410, 32]),
        # A given period; a delay hides 100 ms. Fragments take turns within it.
        (f"{SITES} --method.period 8", "local-sgd float32 1 0", [33.9, 410, 8]),
        (f"{SITES} --method.period 8", "diloco float32 4 1", [4.8, 10, 8]),
        # 100 exchanges, and 31 in the other 500 steps: 131 times 410 ms.
        (f"{RUN} --method.period 1,100:16", "local-sgd float32 1 0", [47.2, 410, LATER]),
        (f"{RUN} --method.period 1,100:16", "lsgd float32 1 0", [47.8, 420, LATER, LATER]),
        # 25 and 31 exchanges, of which 310 ms are not hidden.
        (f"{RUN} --method.period 4,100:16", "diloco float32 1 1", [22.4, 310, "4,100:16"]),
        (f"{RUN} --method.period 601,602:1", "diloco float32 1 0", [0, 0, "601,602:1"]),
        # (0.2 / 0.05)² = 16 steps: 31 rounds of the 500 steps of digits, and their rest.
        (f"digits {NODES} {QUADRATIC}", "local-sgd float32 1 0", [20.8, 410, RULE]),
    ],
)
def test_candidates_for_given_values(options, method, expected, planned, monkeypatch):
    monkeypatch.setattr(plan, "measure", None)
    name, wire, fragments, delay = method.split()
    (found,) = planned(options)[0][name, wire, int(fragments), int(delay)]
    assert brief(found) == expected


@pytest.mark.parametrize(
    "inside, everywhere, expected",
    [
        # Each level gets 16.7 ms: 0.36 and 25.2 steps.
        (0.006, 0.42, [16.1, 426, 1, 32]),
        # The outer period is not shorter.
        (0.42, 0.006, [11.7, 426, 32, 32]),
    ],
)
def test_candidates_for_measured_values(inside, everywhere, expected, planned, monkeypatch):
    tiny.install(tiny.Wide, set=monkeypatch.setattr)
    pulls = {("local",): {("leader", "float32"): (0.001, inside)}}
    of_all = {
        ("leader", "float32"): (0.001, everywhere),
        ("mean", "float32"): (0.001, 0.409),
    }
    seconds = lambda *given: pulls.get(given[2], of_all)
    monkeypatch.setattr(measurement, "pull_seconds", seconds)
    # Three exchanges, each of the parameters and of a few numbers, and a step.
    times = iter(2 * [0.4, 0.1, 0.3, 0.2, 0.5, 0.001, 0.1])
    monkeypatch.setattr(measurement, "_median", lambda *_: next(times))
    monkeypatch.setattr(measurement, "STEPS", 1)
    grid = "--workers.nodes 2 --workers.locals 2 --batch-size 4"
    found, rest = planned(f"digits {grid} --steps 500 --share 0.25")
    assert brief(found["lsgd", "float32", 1, 0][0]) == expected
    assert brief(found["diloco", "float32", 4, 0][0]) == [20.5, 103, 16]
    # The four leaves limit the number of fragments.
    assert max(fragments for _, _, fragments, _ in found) == 4
    # 76,810 of float32.
    assert rest["sources"][:2] == [
        "a step without exchanges: 100 ms, measured here",
        "parameters: 0.307 MB in float32",
    ]


def test_a_plan_that_simulates_says_so(monkeypatch, capsys):
    """It takes minutes, and JSON has standard output to itself."""
    pace = engine.SimulatedPace(0.1, 0.0, 0.0, 0.0, 0.1, 0.1)
    for name in ("lock_step", "free_running"):
        monkeypatch.setattr(engine, name, lambda *given: pace)
    for more in ([], ["--slow", "0", "2"]):
        assert plan.main([*SITES.split(), "--json", *more]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["candidates"]
        assert captured.err == (f"{plan.SIMULATING}\n" if more else "")


@pytest.mark.slow
def test_a_plan_measures_and_writes_no_files(tmp_path, monkeypatch, capsys):
    tiny.install(tiny.Wide, set=monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)
    grid = "--workers.nodes 2 --workers.locals 2 --batch-size 4 --share 0.1"
    assert plan.main(["digits", *grid.split()]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("inside the node", "across nodes", "all worke"))
    assert not list(tmp_path.iterdir())


def test_hours_and_losses_by_the_laws(planned):
    found, rest = planned(f"{MODEL} --sites 4 --mbit 1000 --price 2 --watts 300")
    (base,) = found["allreduce", "float32", 1, 0]
    # 156,416 tokens a step: 127,865 steps of 0.1489 s, and 48 s for 1.5 times 4 GB.
    assert base["steps"] == 127_865
    assert base["hours"] == pytest.approx(127_865 * (0.1489 / 3 + 48) / 3600, rel=1e-4)
    assert base["cost"] == pytest.approx(2 * 64 * base["hours"])
    assert base["kwh"] == pytest.approx(0.3 * 64 * base["hours"])
    assert base["loss"]["nats"] == pytest.approx(2.516, abs=1e-3)
    short, longer, longest = found["diloco", "float32", 1, 0]
    assert [x["periods"] for x in (short, longer, longest)] == [[1024], [96], [32]]
    assert longest["hours"] == pytest.approx((19_036 + 51_156 / 32 * 48) / 3600, rel=1e-4)
    assert longest["loss"]["more"] == pytest.approx(0.0137, abs=1e-3)
    assert longer["loss"]["more"] == pytest.approx(0.0437, abs=1e-3)
    assert short["loss"]["more"] is None and short["loss"]["source"].startswith("unknown")
    assert "for about +0.0" in rest["advice"] and "--method diloco" in rest["use"]
    assert (
        rest["remarks"][0]
        == "batch of all workers: 390,964 tokens; inner learning rate: 0.00038"
    )
    # Four workers: 2 · 3/4 of 4 GB.
    (exchange,) = rest["exchanges"]
    assert exchange["level"] == "all workers" and exchange["seconds"] == pytest.approx(48)


def test_bytes_and_seconds_of_a_period_that_changes(planned):
    """Averages over the run, in which no fragment and no delay fits a period of 1."""
    found, _ = planned(f"{RUN} --method.period {LATER}")
    (local,) = found["local-sgd", "float32", 1, 0]
    assert local["hours"] == pytest.approx((60 + 131 * 0.41) / 3600)
    # Four workers: 2 · 3/4 of 4 MB.
    assert local["bytes_per_step"] == pytest.approx(131 / 600 * 6e6)
    assert local["peak_bytes"] == 6e6
    assert local["options"] == f"--method local-sgd --method.period {LATER}"
    assert {x for x in found if x[2:] != (1, 0)} == set()
    assert found["allreduce", "float32", 1, 0][0]["periods"] == [1]
    found, _ = planned(f"{MODEL} --sites 4 --mbit 1000 --method.period 8,9999:32")
    (diloco,) = found["diloco", "float32", 1, 0]
    # 10,000 / 8 and 41,156 / 32 exchanges of 48 s, in 51,156 steps.
    assert diloco["hours"] == pytest.approx((19_036 + (1250 + 1286) * 48) / 3600, rel=1e-4)
    assert diloco["loss"]["source"].endswith("fitted for periods that do not change")
    assert "outer_rate" not in diloco


def test_a_given_batch(planned):
    found, rest = planned(f"{MODEL} --sites 4 --mbit 1000 --batch 4e5")
    assert {x["steps"] for each in found.values() for x in each} == {50_000}
    assert rest["sources"][-1].startswith("the batch is as given")


def test_data_parallel_on_a_fast_link(planned):
    _, rest = planned(f"{MODEL} --sites 2 --mbit 1e7")
    assert rest["advice"].startswith("use data parallel: the link is fast enough")


def test_a_size_without_a_law(planned):
    size = "--parameters 405e9 --tokens 15e12 --chips h100:16384 --sites 2 --mbit 1e5"
    found, rest = planned(size)
    (base,) = found["allreduce", "float32", 1, 0]
    assert base["loss"]["nats"] is None and base["hours"] > 0
    assert "from 35 M to 10 B parameters" in base["loss"]["source"]
    assert any("outside the range of their fits" in x for x in rest["sources"])
    assert "no published scaling law" in rest["advice"]


def test_what_a_command_draws(tmp_path, capsys):
    file = tmp_path / "plan.png"
    options = f"{SITES} --share 0.1 --plot {file}"
    assert plan.main(options.split()) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "the plan is about time only" in capsys.readouterr().out


COMMANDS = re.findall(
    r"^```bash\n(python -m train\.plan.*?)```\n+```text\n(.*?)```",
    PAGE.read_text(),
    re.DOTALL | re.M,
)


def quick(pair):
    """The command and its output; simulated candidates take seconds."""
    return pytest.param(*pair, marks=[pytest.mark.slow] * ("--slow" in pair[0]))


@pytest.mark.parametrize("command, output", [quick(x) for x in COMMANDS])
def test_a_command_of_the_page_prints_what_it_says(command, output, monkeypatch, capsys):
    """A line of three dots on the page stands for lines that it leaves out."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert plan.main(shlex.split(command.replace("\\\n", ""))[3:]) == 0
    shown = ("\n" + output).split("\n...\n")
    between = r"\n(?:.*\n)+".join(map(re.escape, shown))
    assert re.fullmatch(between, "\n" + capsys.readouterr().out)


def test_the_page_has_the_command_and_the_sentence_of_the_readme():
    readme = " ".join(PAGE.parents[1].joinpath("README.md").read_text().split())
    command, output = COMMANDS[0]
    sentence, _ = output.split("\noptions of")
    assert " ".join(command.split()) in readme
    assert " ".join(sentence.split()) in readme


@pytest.mark.parametrize("columns", [80, 100])
def test_the_answer_comes_first_and_the_table_fits(columns, monkeypatch, capsys):
    """Eight rows of six columns; a narrow terminal wraps the names of methods alone."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert plan.main([*f"{MODEL} --sites 4 --mbit 1000 --price 2".split()]) == 0
    answer, table, notes = capsys.readouterr().out.split("\n\n")
    sentence, options = answer.split("\noptions of python -m train:\n")
    assert " ".join(sentence.split()) == (
        "use DiLoCo, every 32 steps, 16 fragments, delay 1, int4: 5.4 h in place of "
        "71 days of data parallel, for about +0.014 nats (± 0.026)"
    )
    assert options.startswith("  --method diloco")
    _, header, first, *_, last = table.splitlines()
    assert header.split() == ["method", "time", "nats", "cost", "waiting", "sent"]
    assert first.startswith("DiLoCo, every 1024 steps, delay") and "5.29 h" in first
    assert last.split()[:4] == ["data", "parallel", "71.1", "days"]
    assert len(re.findall(r"\d [GT]B$", table, re.M)) == 8
    wrapped = f"{sentence}\n{table}\n{notes}"
    assert all(len(line) <= columns for line in wrapped.splitlines())
    assert "DiLoCo, local SGD or LSGD, every" in table


def test_markdown_has_all_columns(capsys):
    assert plan.main([*f"{MODEL} --sites 4 --mbit 1000 --markdown".split()]) == 0
    rows = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    assert rows[0].startswith("| method | hours | waiting, % | longest wait, s | GB sent |")
    assert rows[0].endswith("| inner rate | outer rate | loss, nats | added nats |")
    assert rows[-1].startswith("| data parallel | 1,70") and 10 < len(rows) <= 18


def test_one_worker_has_nothing_to_plan(capsys):
    options = f"digits {STEP} --mbit 1 --workers.nodes 1 --workers.locals 1"
    assert plan.main(options.split()) == 0
    assert capsys.readouterr().out == "one worker: there are no exchanges to plan\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "an experiment must be given, or `parameters`, `sites` and `mbit`"),
        ("digits --share 1.5", "`share` must be in (0, 1), got share=1.5"),
        ("digits --latency-ms 100", "`latency_ms` needs `mbit`"),
        ("digits --step-ms 0", "`step_ms` must be above 0, got step_ms=0"),
        ("digits --sites 4", "`mbit` must be given for links that are not here"),
        ("digits --tokens 4", "`tokens` is for plans without an experiment"),
        (f"{MODEL} --sites 4 --mbit 0", "`mbit` must be above 0, got mbit=0"),
        (f"{MODEL} --sites 4 --mbit nan", "`mbit` must be above 0, got mbit=nan"),
        (f"{MODEL} --sites 4 --mbit -1", "`mbit` must be above 0, got mbit=-1"),
        (f"{MODEL} --sites 4", "`mbit` must be given, or the name of an experiment"),
        (f"{MODEL} --sites 4 --mbit 1 --foo 1", "unrecognized option --foo"),
        (f"{MODEL} --sites 1 --mbit 1", "`sites` must be at least 2: one has no exchanges"),
        (
            f"{MODEL} --sites 65 --mbit 1",
            "`sites` must be from 1 to the 64 chips, got sites=65",
        ),
        (f"{MODEL} --sites 3 --mbit 1", "`sites` must divide the 64 chips, got sites=3"),
        (
            "--parameters 1e9 --tokens 2e10 --chips v5e:1x1 --sites 2 --mbit 1",
            "`chips` must be at least 2, got chips=v5e:1x1",
        ),
        (
            "--parameters 1e15 --tokens 2e16 --chips v5e:16x16 --sites 4 --mbit 1",
            "`parameters` must be at most 1e+13, got parameters=1e+15",
        ),
        (
            "--parameters 1e12 --tokens 2e13 --chips v5e:16x16 --sites 4 --mbit 1",
            "`parameters` must be at most 6.9e+10, which 64 v5e of a site hold with",
        ),
        (
            "--parameters 1e9 --tokens 1e4 --chips v5e:4x4 --sites 2 --mbit 1",
            "`tokens` must be at least the 308,899 of a step, got tokens=10000",
        ),
        ("--parameters abc", "--parameters must be a number, got 'abc'"),
        (f"{SITES} --tokens 1e9", "`tokens` needs `batch` where `step_ms` is given"),
        (f"{SITES} --chips v4:2", "`chip` must be one of v5e, v5p"),
        (f"{SITES} --chips v5e", "`chips` must be such as v5e:16x16 or h100:64"),
        (f"{SITES} --slow 4 2", "`slow` must be workers from 0 to 3"),
        (f"{SITES} --drop 1 1e9", "`drop` and `join` must be within the first 2,500 s"),
        (f"{MODEL} --sites 4 --mbit 1 --watts 0", "`watts` must be above 0, got watts=0"),
        ("digits --chips v5e:4x4 --mbit 1", "`chips` needs `sites`"),
        (f"{SITES} --method.period 0", "`period` must be a positive int, got period=0"),
        (
            f"{RUN} --method.period 8,9",
            "a period must be like 8, '1, 500: 16' or 'quadratic",
        ),
        (f"{RUN} --method.perod 8", "--method.perod; did you mean --method.period?"),
        (f"{SITES} --method.period 1,9:2", "`period` must be a number of steps where the"),
        (f"{RUN} --method.period {RULE}", "the quadratic rule needs the learning rate"),
        (f"{RUN} --method.period 1,9:2 --slow 1 2", "number of steps where workers differ"),
        ("digits --chips v5e:4x4 --sites 3 --mbit 1", "`sites` must divide the 16 chips"),
        (f"{SITES} --json --markdown", "only one of `json` and `markdown` may be given"),
        (f"{SITES} --plot plan.txt", "`plot` must be a PNG file, got plot=plan.txt"),
    ],
)
def test_wrong_usage(arguments, message, refusal):
    assert message in refusal(plan.main, arguments.split())
