"""Programs that are compiled while earlier steps run."""

import subprocess
import sys
import threading

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

import lsgd_jax as lj
from lsgd_jax._src.exchange.ahead import Ahead


COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled():
    """The names of the threads that compile, one for each program."""
    threads = []

    def note(event, seconds, **_):
        if event == COMPILED:
            threads.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield threads
    jax.monitoring.unregister_event_duration_listener(note)


def towards(x, goal):
    return x - 0.5 * (x - goal), jnp.square(x - goal)


METHODS = {
    "separable": lj.lsgd(0.5, 0.5, local_period=3, global_period=6),
    "whole steps": lj.diloco(4, delay=1),
}


@pytest.mark.parametrize("name", METHODS)
def test_programs_are_compiled_once_and_before_they_are_due(name, compiled):
    workers = lj.Workers(1, 2, devices=jax.devices()[:2])
    train = lj.around(towards, METHODS[name], params=(), result=0, loss=1)
    run = workers.loop(train, donate=0)
    goal = workers.put(jnp.array([2.0, 4.0]))
    state = workers.map(train.init)(workers.put(jnp.array([0.0, 8.0])))
    state, _ = run(state, goal)
    main = threading.current_thread().name
    for _ in range(12):
        if run._ahead._thread is not None:
            run._ahead._thread.join()
        before = compiled.count(main)
        state, _ = run(state, goal)
        assert compiled.count(main) == before
    # Two exchanges, or two phases in which something is due.
    assert len(compiled) - compiled.count(main) == 2
    assert all(program._cache_size() == 1 for program in run._programs.values())


class Program:
    """A function that is compiled ahead by a compiler that fails."""

    def __init__(self, fails_in):
        self.fails_in = fails_in
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return args

    def lower(self, *args):
        if self.fails_in == "lower":
            raise ValueError("no trace")
        return self

    def compile(self):
        if self.fails_in == "compile":
            raise RuntimeError("out of memory")


def test_the_error_of_a_compilation_comes_before_the_step_that_needs_it():
    ahead = Ahead()
    ahead.begin("a", Program("compile"), ())
    ahead.wait_for("b")
    with pytest.raises(RuntimeError, match="out of memory"):
        ahead.wait_for("a")
    ahead.wait_for("a")  # The call compiles it itself.


@pytest.mark.parametrize("program", [lambda: None, Program("lower")])
def test_a_function_that_cannot_be_lowered_is_left_to_its_call(program):
    ahead = Ahead()
    ahead.begin("a", program, ())
    assert ahead._thread is None
    ahead.wait_for("a")


EXIT = """
import jax, jax.numpy as jnp
from lsgd_jax._src.exchange.ahead import Ahead

def deep(x):
    for i in range(60):
        x = jnp.sort(jnp.sin(x @ x) + jnp.cumsum(x, axis=i % 2), axis=0)
    return x

ahead = Ahead()
ahead.begin("deep", jax.jit(deep), (jax.ShapeDtypeStruct((64, 64), jnp.float32),))
assert ahead.is_busy
"""


@pytest.mark.slow  # the process imports jax
@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise KeyboardInterrupt"])
def test_a_process_may_end_while_a_program_is_compiled(end):
    """It neither aborts nor hangs."""
    code = EXIT + end
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3}.get(end, -2)
    lines = done.stderr.splitlines()
    assert not lines or lines[-1] == "KeyboardInterrupt"
    assert "ignored" not in done.stderr and "terminate" not in done.stderr
