"""Going on with the nodes that are left when one is lost (--distributed.survive).

Experimental, as is what jax offers for it. A step that needs a lost process fails. The
others then agree on who is left, build the run anew for the nodes that are whole, and go on
from the last checkpoint, as `train.run.resharding` says; no process is started again. If a node of
several processes loses one, its other ones end. If process 0 is lost all end: what the
processes know of one another lies there.

Ctrl-C, and SIGTERM to process 0, stop all. By SIGTERM any other process leaves: all save,
and the nodes that it does not belong to go on.
"""

import dataclasses
import os
import sys
from collections.abc import Collection

from train.cluster import key_value_store as coordination
from train.cluster import rendezvous as distributed
from train.cluster.heartbeat import LOST
from train.cluster.nodes import Nodes
from train.config import Config
from train.run.loop import Result, Run


def train(run: Run) -> Result:
    """Trains to the end; if losses are to be survived, with the nodes that are left."""
    if not (run.config.distributed.survive and coordination.is_joined()):
        return run.train()
    config = dataclasses.replace(run.config, run_dir=str(run.folder), resume=True)
    nodes, going = Nodes.of(run.experiment.workers), run
    while True:
        try:
            going = going or _again(config, nodes)
            result = going.train()
            gone = result.leaving
            if not gone:
                return result
        except Exception as error:
            gone = coordination.may_mean_a_loss(error) and coordination.lost_members()
            if not gone:
                raise
            result = None
        nodes = nodes.without(gone)
        if result is None:
            _let_go(going, gone, nodes)
        elif coordination.process_id() not in nodes.processes:
            return result
        if coordination.process_id() == 0:
            how = "was lost" if result is None else "has left"
            print(
                f"warning: {distributed.names(gone)} {how}; the others go on",
                file=sys.stderr,
            )
        coordination.go_on_without(set(coordination.members()) - nodes.processes)
        going = None


def _again(config: Config, nodes: Nodes) -> Run:
    """The run from its last checkpoint, among the nodes that are left."""
    workers = dataclasses.replace(config.workers, nodes=nodes.number)
    try:
        return Run(dataclasses.replace(config, workers=workers), nodes.devices)
    except ValueError as error:
        if not coordination.may_mean_a_loss(error):
            distributed.leave(2, str(error))
        raise


def _let_go(run: Run | None, lost: Collection[int], nodes: Nodes) -> None:
    """Ends what needs the lost ones: here the run, and there this process, or all."""
    was_lost = f"{distributed.names(lost)} was lost"
    if 0 not in nodes.processes or (run is not None and run.is_to_stop):
        distributed.leave(LOST, f"{was_lost} {distributed.where()}")
    if coordination.process_id() not in nodes.processes:
        where = "" if run is None else f" at step {run.step}"
        others = "the nodes that are whole go on without this process"
        print(f"error: {was_lost}{where}; {others}", file=sys.stderr, flush=True)
        os._exit(LOST)
    coordination.note_lost(lost)
    if run is not None:
        run.abandon()
