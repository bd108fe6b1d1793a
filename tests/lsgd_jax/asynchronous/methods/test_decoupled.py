"""Decoupled DiLoCo: fragments, quorums, weights, and workers that are late or lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import lsgd_jax as lj
import oracles
from lsgd_jax._src.asynchronous.methods import decoupled
from lsgd_jax._src.asynchronous.methods.decoupled import DecoupledDiLoCoWorker
from lsgd_jax._src.asynchronous.simulated.simulator import SimulatedTransport
from lsgd_jax.asynchronous import DecoupledDiLoCo, Pulls


UNITS = oracles.ROWS["units"]
OUTER = dict(learning_rate=0.5, momentum=0.6)


@pytest.mark.parametrize("W, merge", [toys.slow(1, "mean"), (4, "radial")])
def test_equally_fast_and_with_a_quorum_of_all_it_is_streaming_diloco(W, merge):
    """Sent after steps 2, 4, 6, …, taken over a step later."""
    rule = lj.rules.anchored(optax.sgd(**OUTER, nesterov=True), merge=merge)
    halves = (lj.Pull(rule, 0.75, 4, (2 * i + 3) % 4, 1, lj.fragment(i, 2)) for i in (0, 1))
    method = DecoupledDiLoCo(4, **OUTER, quorum=W, merge=merge, mixing=0.25)
    expected, found = (
        toys.simulate(toys.training(), each, 1, W, steps=19)
        for each in (Pulls(lj.exchange(*halves)), method)
    )
    np.testing.assert_allclose(
        toys.stacked(found), toys.stacked(expected), rtol=1e-5, atol=1e-6
    )
    assert [worker.report.rounds for worker in found] == [9] * W
    assert all(worker.report.waited == 0 for worker in found)


def test_merge_and_weight_are_those_of_the_oracle():
    case = UNITS["radial_directional_average"]
    vectors, weights = (jnp.asarray(case[k], jnp.float32) for k in ("vectors", "weights"))
    found = decoupled.merged(vectors, weights / weights.sum(), "radial")
    np.testing.assert_allclose(found, case["out"], rtol=1e-5, atol=1e-6)
    for tokens, steps, weight in UNITS["learner_weight"]:
        assert decoupled.learner_weight(tokens, steps) == weight


def test_tensors_whose_directions_cancel_take_the_mean():
    deltas = [jnp.asarray([[1.0, 0.0], [-3.0, 0.0]]), jnp.asarray([2.0, 4.0])]
    found = decoupled.merged(deltas, jnp.asarray([0.5, 0.5]), "radial")
    assert [x.tolist() for x in found] == [[-1.0, 0.0], 3.0]


def test_tensors_named_by_averaged_take_the_weighted_mean():
    """Embeddings, by hand: two workers move at right angles."""
    apart = jnp.asarray([[3.0, 0.0], [0.0, 4.0]])
    start = {"body": jnp.zeros(2), "embedding": jnp.zeros(2)}
    task = toys.moving(start, lambda x, i: jax.tree.map(lambda _: apart[i], x))
    method = DecoupledDiLoCo(
        1, 1.0, 0.0, fragments=1, quorum=2, averaged=lambda path: path == "embedding"
    )
    note, anchors = toys.noting(lambda worker: toys.vector(worker.method.outers[0].anchor))
    toys.simulate(task, method, 1, 2, 3, observe=note)
    radial = 3.5 / 2**0.5
    np.testing.assert_allclose(anchors[0][1], [radial, radial, 1.5, 2.0], rtol=1e-6)


def test_a_slow_worker_answers_with_its_steps_and_is_weighed_by_tokens_and_steps():
    method = DecoupledDiLoCo(
        4, 1.0, 0.0, fragments=1, quorum=2, merge="mean", tokens=(1, 3)
    )
    task = toys.moving(jnp.zeros(2), lambda x, i: jnp.array([[1.0] * 2, [8.0] * 2])[i])
    found = toys.simulate(task, method, 1, 2, 5, [1, 2.1])
    anchor = toys.vector(found[0].method.outers[0].anchor)
    # Four steps of 1 token and one of 3, whose second step is not over.
    w = np.array([4 * 4 / 4, 3 * 3 / 1])
    expected = (w @ [4 * 1.0, 1 * 8.0]) / w.sum()
    np.testing.assert_allclose(anchor, [expected] * 2, rtol=1e-6)


@pytest.mark.slow
def test_answers_that_are_late_for_a_turn_are_ignored(monkeypatch):
    """The answers of worker 5 take 30 s. Its lags are known and do not raise the median."""
    ask, moved, answered = SimulatedTransport.ask_peer, DecoupledDiLoCoWorker._moved, []

    async def slowly(self, peer, call, key, *rest):
        answer = await ask(self, peer, call, key, *rest)
        if peer == 5 and key[0] == "fragment":
            await decoupled.asyncio.sleep(30)
        return answer

    def note(self, p, answers):
        answered.append(set(answers))
        return moved(self, p, answers)

    monkeypatch.setattr(SimulatedTransport, "ask_peer", slowly)
    monkeypatch.setattr(DecoupledDiLoCoWorker, "_moved", note)
    method = DecoupledDiLoCo(4, **OUTER, quorum=3)
    found = toys.simulate(toys.training(), method, 1, 6, 60, [1] * 5 + [1.01])
    assert len(answered) >= 25 and all(each == {0, 1, 2, 3, 4} for each in answered)
    assert max(found[0].method._lags) >= 25
    assert all(worker.report.rounds >= len(answered) - 1 for worker in found)


def test_a_worker_answers_once_it_has_taken_a_step_since_it_received_the_fragment(
    monkeypatch,
):
    """Messages take longer than the steps between two turns."""
    moved, weights = DecoupledDiLoCoWorker._moved, []

    def note(self, p, answers):
        weights.append([answer.measure for answer in answers.values()])
        return moved(self, p, answers)

    monkeypatch.setattr(DecoupledDiLoCoWorker, "_moved", note)
    method = DecoupledDiLoCo(2, **OUTER, fragments=1)
    toys.simulate(toys.training(), method, 1, 4, 60, latency=1.5)
    assert len(weights) > 5 and all(len(each) >= 3 and min(each) > 0 for each in weights)


def test_the_grace_follows_the_lags_between_a_tenth_of_a_step_and_a_turn():
    method = DecoupledDiLoCo(20, quorum=1, fragments=1)
    grace = toys.simulate(toys.training(), method, 1, 2, 6)[0].method
    assert grace._grace(0.0) == 1.0  # no lag is known, and a step takes 1 s
    grace._lags.extend([1.0, 3.0, 5.0, 9.0] * 16)
    assert grace._grace(0.0) == 4.0 + 3 * 2.0
    assert grace._grace(15.0) == 20.0 - 15.0
    grace._lags.extend([0.0] * 64)
    assert grace._grace(0.0) == grace._grace(30.0) == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_all_workers_take_every_turn_from_one_worker(wire):
    outers = {}

    def note(worker):
        for p, outer in enumerate(worker.method.state()["outers"]):
            turn = int(worker.method.state()["turn"])
            if (turn - 1) % 2 == p:
                outers.setdefault(turn, []).append(toys.vector(outer))

    method = DecoupledDiLoCo(4, **OUTER, wire=wire)
    seconds = [1, 1.1, 1.3, 4]
    found = toys.simulate(
        toys.training(), method, 2, 2, 32, seconds, latency=0.02, observe=note
    )
    assert sorted(outers)[1:] == list(range(1, max(outers) + 1)) and max(outers) >= 10
    for each in outers.values():
        assert all((outer == each[0]).all() for outer in each)
    assert np.ptp([worker.report.rounds for worker in found]) <= 2
    assert max(worker.report.longest for worker in found) == pytest.approx(0.04)


@pytest.mark.parametrize("failed", [toys.slow(0), 1])
def test_turns_go_on_while_a_worker_is_lost(failed):
    """The timeout is so long that no turn may wait for it."""
    taken = {}

    def note(worker):
        taken.setdefault(worker.report.rounds, worker.transport.now())

    options = dict(drops={failed: 20.5}, joins={failed: 60}, timeout=25, observe=note)
    seconds = [1, 1.01, 1.02, 1.03]
    found = toys.simulate(
        toys.training(), DecoupledDiLoCo(4, **OUTER), 1, 4, 100, seconds, **options
    )
    begun = [taken[turn] for turn in sorted(taken)]
    gaps = np.diff([t for t in begun if t > 25])
    assert len(gaps) > 30 and max(gaps) < 6
    turns = [worker.report.rounds for worker in found]
    assert np.ptp(turns) <= 2 and found[failed].count > 50


def test_a_turn_is_lost_with_the_worker_that_takes_it(monkeypatch):
    """It fails while it waits for answers, and the others go on with the next turn."""
    monkeypatch.setattr(decoupled, "LEAST", 3.0)
    method = DecoupledDiLoCo(4, **OUTER, quorum=4)
    found = toys.simulate(
        toys.training(), method, 1, 4, 60, latency=0.2, drops={0: 2.5}, timeout=3
    )
    assert all(worker.report.rounds > 15 for worker in found[1:])
    assert np.isfinite(toys.stacked(found)).all()


def test_tokens_and_fragments_are_checked_when_a_run_begins():
    with pytest.raises(ValueError, match="`tokens` must be a number for each of 2 workers"):
        toys.simulate(toys.training(), DecoupledDiLoCo(tokens=(1.0,)), 1, 2, 1)
    with pytest.raises(ValueError, match="`fragments` must be at most the number of lea"):
        toys.simulate(toys.training(), DecoupledDiLoCo(3, fragments=3), 1, 2, 1)
