"""The training of a run, from its first step to its last line."""

import contextlib
import functools
import math
import os
import pathlib
import platform
import signal
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import jax

import lsgd_jax as lj
from train.cluster.signals import StopRequested
from train.config import settings
from train.config.schema import Config
from train.process import interrupts, numerics
from train.run import asynchronous, summary
from train.run.divergence import Divergence
from train.run.open import Run
from train.run.reporting import note_saved, report
from train.run.result import ENDED, NONFINITE, Result, Tested, last_lines
from train.run.saving import save, saved_if_data_fail, test, test_and_save
from train.task.experiment import Experiment


SAMPLE = "sample.txt"
LARGE = 2**17  # values of a leaf that is a message of its own; smaller ones share messages
Reason = signal.Signals | str


def train(run: Run) -> Result:
    """Trains until the last step, a signal, or until no worker is finite any more."""
    run.stopwatch.start()
    with contextlib.closing(run.metrics):
        announce(run)
        with run.stop_signals:
            with run.progress, saved_if_data_fail(run):
                is_asynchronous = run.config.method.is_asynchronous
                take = asynchronous.take_steps if is_asynchronous else take_steps
                make_up_test(run)
                stopped_by = take(run)
                result = finish(run, stopped_by)
            result = conclude(run, result)
    crew = run.experiment.crew
    if crew is not None and not leaves_alone(run, result.stopped_by):
        crew.close()
    if run.lock is not None:
        run.lock.release()
    return result


def take_steps(run: Run) -> Reason | None:
    """Takes the remaining steps. Returns the reason to stop early, or None."""
    config = run.config
    experiment = run.experiment
    assert isinstance(experiment, Experiment)
    backlog = experiment.backlog()
    divergence = Divergence(most_nonfinite(run), run.buffer)
    compiled: set[Any] = set()
    first = experiment.gradients(run.step)
    # More than are needed if steps are skipped: those read ahead are dropped at the end.
    numbers = range(first, first + config.steps - run.step)
    with contextlib.closing(experiment.batches(numbers)) as batches:
        while run.step < config.steps:
            before = run.step
            has_loss = experiment.needs_gradient(before + 1)
            try:
                result = _take_step(run, batches if has_loss else None, compiled)
            except lj.LoopEnded as error:
                run.progress.warn_here(str(error))
                return ENDED
            backlog.add(result)
            run.step += 1
            run.buffer.add(run.step, result, run.state, has_loss)
            if run.passed(config.log_every, before) or run.step == config.steps:
                report(run, run.buffer.close_interval(run.step, run.state))
            test_and_save(run, before)
            if divergence.stops_at(run.step):
                return NONFINITE
            if run.stop_signals.asked():
                return run.stop_signals.received
    return None


def _take_step(run: Run, batches: Iterator[Any] | None, compiled: set[Any]) -> Any:
    """Dispatches the next step, with a gradient if there are batches.

    Args:
      run: the run, whose state becomes that after the step.
      batches: those of the next gradients, or None for a step without a gradient.
      compiled: the programs that are compiled already; this one is added.

    Returns:
      The losses [W], or without a gradient an array that is ready with the step.
    """
    experiment = run.experiment
    assert isinstance(experiment, Experiment)
    phase = experiment.phase(run.step + 1)
    if batches is None:
        take = functools.partial(experiment.skip, run.state, phase=phase)
    else:
        batch = next(batches)
        take = functools.partial(experiment.take, run.state, batch, run.step + 1)
    program = phase, batches is None
    with contextlib.nullcontext() if program in compiled else _compiling(run):
        run.state, result = take()
    compiled.add(program)
    return result


def most_nonfinite(run: Run) -> int:
    """The number of steps without a finite loss after which this process stops.

    Where processes may be lost, it does not see the losses of others, which may restore
    its workers at an exchange.
    """
    limit = run.config.stop_after_nonfinite
    if run.experiment.crew is None:
        return limit
    known = run.experiment.known(run.state.opt_state)
    pulls = run.experiment.workers.fetch(run.experiment.at_home(lj.diagnostics(known)))
    return max(limit, 4 * max(pull.period for pull in pulls))


def leaves_alone(run: Run, stopped_by: Reason | None) -> bool:
    """Whether this process ends and others may go on."""
    crew = run.experiment.crew
    return crew is not None and stopped_by is not None and not crew.stopped


def make_up_test(run: Run) -> None:
    """Takes the test that the session before left when it was asked to stop."""
    if run.test_is_due and run.step < run.config.steps:
        test(run, saves_the_best=False)
        run.center = None


@contextlib.contextmanager
def _compiling(run: Run) -> Generator[None]:
    """A step that is compiled: no training time, and Ctrl-C is answered at once."""
    line = f"Ctrl-C: the run saves and ends when step {run.step + 1} has been compiled"
    answered = interrupts.answered(lambda: run.progress.say(line))
    with run.stopwatch.compiling(), answered:
        yield


def finish(run: Run, stopped_by: Reason | None) -> Result:
    """Reports, saves and tests (unless the run was stopped) after the last step."""
    report(run, run.buffer.flush())
    jax.block_until_ready(run.experiment.settled(run.state))
    seconds = run.stopwatch.seconds
    run.test_is_due = run.test_is_due or stopped_by is None
    begun = save(run, leaves_alone(run, stopped_by))
    tested = None
    if stopped_by is None and run.session.tests:
        try:
            tested = last_test(run)
        except StopRequested:
            stopped_by = run.stop_signals.received or ENDED
    saved = run.checkpoints.close() and begun
    note_saved(run)
    run.session.wait_for_all()
    return Result(
        run.folder,
        run.step,
        seconds,
        tested,
        stopped_by,
        saved,
        checkpoint=run.checkpoints.latest(),
        finite_checkpoint=run.checkpoints.latest_finite(),
        best=run.checkpoints.best(),
        guess=run.experiment.forward.guess,
        compile_seconds=run.stopwatch.compile_seconds,
    )


def last_test(run: Run) -> Tested:
    """Tests the last step with all measures, and writes a sample.

    Raises:
      StopRequested: the run was asked to stop meanwhile. A resumption begins anew here.
    """
    tested = test(run, saves_the_best=False)
    if tested is None:
        raise StopRequested
    check = run.stop_signals.check
    with run.stopwatch.paused():
        more = run.experiment.score(run.find_center(check), check)
    write_sample(run)
    return tested._replace(center=tested.center | more)


def announce(run: Run) -> None:
    """Writes and shows the settings with which the run starts or resumes."""
    grid = [run.config.workers.nodes, run.config.workers.locals]
    processes = run.session.num_processes
    sizes = run.experiment.forward.sizes
    began = dict(processes=processes, settings=settings.began_with(run.config))
    software = dict(jax_settings=numerics.jax_settings(), packages=numerics.versions())
    run.write("start", workers=grid, **began, **sizes, **software, **_versions())
    run.progress.say(f"{run.experiment}; run folder {run.folder}")
    line = without_exchanges(run.config)
    if line:
        run.progress.warn(line)
    line = flag_for_delay(run, jax.default_backend(), os.environ)
    if line:
        run.progress.say(line)
    if run.step:
        run.progress.say(f"resumed at step {run.step}")
    if run.resizing is not None:
        run.progress.say(str(run.resizing))
        run.write("resized", **run.resizing.event())


def without_exchanges(config: Config) -> str:
    """Says that a method is configured to exchange nothing, or ''."""
    first = config.method.first_exchange()
    steps = config.steps
    if first is None or first <= steps or config.workers.nodes * config.workers.locals == 1:
        return ""
    return (
        f"{config.method.name} first exchanges at step {first} and the run has {steps}: "
        "its workers train independently"
    )


def _late_messages(method: lj.Exchange, phase: lj.Phase) -> int:
    """The number of pulls with a delay whose messages leave in a phase."""
    return sum(method.pull_of(number).delay > 0 for number in phase.sends)


def flag_for_delay(run: Run, backend: str, environ: Mapping[str, str]) -> str:
    """Names the flag of XLA for GPUs with which delayed messages travel together, or ''.

    Args:
      run: the run.
      backend: the platform of the devices.
      environ: the environment variables.
    """
    # Asynchronous workers have no method of a step.
    method = getattr(run.experiment, "method", None)
    if backend != "gpu" or method is None or run.experiment.waited is not None:
        return ""
    late = [pull for pull in method.pulls if pull.delay]
    phases = method.phases(run.experiment.workers.sizes) if late else ()
    sends = max((_late_messages(method, phase) for phase in phases), default=0)
    large = sum(x[0].size >= LARGE for x in jax.tree.leaves(run.state.params))
    fragments = getattr(run.config.method, "fragments", 1)
    messages = sends * (math.ceil(large / fragments) + 1)  # and one of all small leaves
    if any(pull.wire not in ("float32", "bfloat16") for pull in late):
        messages *= 2  # codes and their scales
    ((name, limit),) = lj.aot.overlap_options(messages).items()
    if messages < 2 or name in environ.get("XLA_FLAGS", ""):
        return ""
    return (
        f"{run.config.method.name} sends up to {messages} messages with a delay in a step, "
        "of which XLA has one in flight at a time; they travel together with "
        f"XLA_FLAGS=--{name}={limit}, see docs/pods.md for its risk"
    )


def conclude(run: Run, result: Result) -> Result:
    """Writes the last event and the figures, and prints the last line.

    Returns:
      The result, with `has_metrics` set.
    """
    stopped_by = getattr(result.stopped_by, "name", result.stopped_by) or ""
    values = result.tested.values() if result.tested else {}
    compiled = round(result.compile_seconds, 3)
    values |= {"far_above_best": True} if result.is_far_above_best else {}
    run.write("end", **values, stopped_by=stopped_by, compile_seconds=compiled)
    run.metrics.close()  # the last lines say whether everything was written
    result = result._replace(has_metrics=run.metrics.is_whole)
    if run.session.prints:
        try:
            draw(run.folder)
        except Exception as error:  # an unusual metrics.jsonl must not fail the run
            run.progress.warn(f"the figures cannot be drawn: {error!r}")
    run.progress.table(summary.rows(result, run.metrics.latest))
    run.progress.say(last_lines(result, run.config))
    return result


def draw(folder: pathlib.Path) -> None:
    """Draws the figures of a run."""
    from train.run import plots  # importing Matplotlib takes a second

    plots.draw(folder)


def write_sample(run: Run) -> None:
    """Shows a text written by the center, and saves it in the run folder."""
    check = run.stop_signals.check
    center = run.find_center(check)
    check()
    text = run.experiment.sample(center)
    if not text:
        return
    run.progress.say(f"a sample of the center:\n{text}")
    if run.session.prints:
        try:
            (run.folder / SAMPLE).write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            run.progress.warn(f"the sample cannot be written: {error}")


def _versions() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "lsgd_jax": lj.__version__,
        "device": jax.devices()[0].device_kind,
    }
