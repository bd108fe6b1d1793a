"""Going on with the nodes that are left when one is lost (--distributed.survive).

Experimental, as is what jax offers for it. A step that needs a lost process fails. The
others then agree on who is left, build the run anew for the nodes that are whole, and go on
from the last checkpoint, as `train.run.resharding` says; no process is started again. If a
node of several processes loses one, its other ones end. If process 0 is lost all end: what
the processes know of one another lies there.

Ctrl-C, and SIGTERM to process 0, stop all. By SIGTERM any other process leaves: all save,
and the nodes that it does not belong to go on.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Collection

from train.cluster.exit_status import LOST, WRONG_USAGE
from train.cluster.lost import may_mean_a_loss
from train.cluster.nodes import Nodes
from train.cluster.session import Session
from train.config import Config
from train.run import loop
from train.run.open import Run, open_run
from train.run.result import Result


def train(run: Run) -> Result:
    """Trains to the end; if losses are to be survived, with the nodes that are left."""
    session, options = run.session, run.config.distributed
    if not (options.survive and session.has_others):
        return loop.train(run)
    config = dataclasses.replace(run.config, run_dir=str(run.folder), resume=True)
    nodes, current = Nodes.of(run.experiment.workers), run
    as_one = 3 * options.heartbeat_timeout
    losses = Losses(nodes.number, as_one)
    while True:
        try:
            current = current or _again(config, nodes, session)
            result = loop.train(current)
            gone = result.leaving
            if not gone:
                return result
        except Exception as error:
            gone = may_mean_a_loss(error) and session.lost_members()
            if not gone and current is None and may_mean_a_loss(error):
                session.leave(LOST, _not_again(error, session))
            if not gone:
                raise
            result = None
        nodes = nodes.without(gone, lost=result is None)
        if result is None:
            _let_go(current, gone, nodes, session)
            if losses.leave_too_few(nodes.number) and not options.survive_minority:
                session.leave(LOST, _too_few(gone, nodes, losses, session))
        elif session.process_id not in nodes.processes:
            return result
        else:
            losses = Losses(nodes.number, as_one)
        if session.is_main:
            how = "was lost" if result is None else "has left"
            line = f"warning: {session.names(gone)} {how}; the others go on"
            print(line, file=sys.stderr)
        session.go_on_without(set(session.members) - nodes.processes)
        current = None


class Losses:
    """Whether those who are left are few because they were cut off from most of the nodes.

    Those without process 0 end anyway; so of two halves the one that it is in goes on.

    Args:
      nodes: how many there are.
      seconds: within which losses count as one: a cut is not noticed of all at once.

    Attributes:
      before: nodes before the last loss, and those that count as one with it.
    """

    def __init__(self, nodes: int, seconds: float):
        self.before, self._left, self._seconds = nodes, nodes, seconds
        self._at = -float("inf")

    def leave_too_few(self, nodes: int) -> bool:
        """Whether so many nodes, left after a loss now, are fewer than half."""
        now = time.monotonic()
        if now - self._at > self._seconds:
            self.before = self._left
        self._at, self._left = now, nodes
        return 2 * nodes < self.before


def _too_few(lost: Collection[int], nodes: Nodes, losses: Losses, session: Session) -> str:
    return (
        f"{session.names(lost)} was lost {session.where()}; the {nodes.number} of "
        f"{losses.before} nodes left here may have been cut off from the others, and go on "
        "by themselves only with --distributed.survive-minority"
    )


def _not_again(error: Exception, session: Session) -> str:
    reason = " ".join(str(error).split())[:200]
    return f"could not go on with the nodes that are left ({reason}) {session.where()}"


def _again(config: Config, nodes: Nodes, session: Session) -> Run:
    """The run from its last checkpoint, among the nodes that are left."""
    workers = dataclasses.replace(config.workers, nodes=nodes.number)
    config = dataclasses.replace(config, workers=workers)
    try:
        return open_run(config, session, nodes.devices)
    except ValueError as error:
        if not may_mean_a_loss(error):
            session.leave(WRONG_USAGE, str(error))
        raise


def _let_go(run: Run | None, lost: Collection[int], nodes: Nodes, session: Session) -> None:
    """Ends what needs the lost ones: here the run, and there this process, or all."""
    was_lost = f"{session.names(lost)} was lost"
    if 0 not in nodes.processes or (run is not None and run.stop_signals.received):
        session.leave(LOST, f"{was_lost} {session.where()}")
    if session.process_id not in nodes.processes:
        where = "" if run is None else f" at step {run.step}"
        others = "the nodes that are whole go on without this process"
        print(f"error: {was_lost}{where}; {others}", file=sys.stderr, flush=True)
        os._exit(LOST)
    session.note_lost(lost)
    session.connections.let_go()
    if run is not None:
        run.checkpoints.abandon()
