"""Asynchronous workers: each takes its own steps as fast as it can."""

import importlib
from typing import TYPE_CHECKING, Any

from lsgd_jax._src.asynchronous.adpsgd import ADPSGD as ADPSGD
from lsgd_jax._src.asynchronous.coordinator import Coordinator as Coordinator
from lsgd_jax._src.asynchronous.coordinator import Report as Report
from lsgd_jax._src.asynchronous.coordinator import Status as Status
from lsgd_jax._src.asynchronous.decoupled import DecoupledDiLoCo as DecoupledDiLoCo
from lsgd_jax._src.asynchronous.diloco import DiLoCo as DiLoCo
from lsgd_jax._src.asynchronous.heloco import heloco_correct as heloco_correct
from lsgd_jax._src.asynchronous.heloco import heloco_step as heloco_step
from lsgd_jax._src.asynchronous.island import island as island
from lsgd_jax._src.asynchronous.lsgd import LSGD as LSGD
from lsgd_jax._src.asynchronous.network import NETWORKS as NETWORKS
from lsgd_jax._src.asynchronous.network import Network as Network
from lsgd_jax._src.asynchronous.osgp import OSGP as OSGP
from lsgd_jax._src.asynchronous.pairwise import Pairwise as Pairwise
from lsgd_jax._src.asynchronous.peer import Peer as Peer
from lsgd_jax._src.asynchronous.pulls import Pulls as Pulls
from lsgd_jax._src.asynchronous.speeds import Speeds as Speeds
from lsgd_jax._src.asynchronous.transport import GridPosition as GridPosition
from lsgd_jax._src.asynchronous.transport import StaleWorkerError as StaleWorkerError
from lsgd_jax._src.asynchronous.transport import Transport as Transport
from lsgd_jax._src.asynchronous.transport import UnreachableError as UnreachableError
from lsgd_jax._src.asynchronous.wagma import WAGMA as WAGMA
from lsgd_jax._src.asynchronous.worker import Method as Method
from lsgd_jax._src.asynchronous.worker import Training as Training
from lsgd_jax._src.asynchronous.worker import Worker as Worker
from lsgd_jax._src.asynchronous.worker import work as work
from lsgd_jax.asynchronous import simulator as simulator


if TYPE_CHECKING:
    from lsgd_jax.asynchronous import ray_engine as ray_engine
    from lsgd_jax.asynchronous.ray_engine import join as join


def __getattr__(name: str) -> Any:
    """Ray, which needs the extra `async`, is imported when it is asked for."""
    if name in ("ray_engine", "join"):
        ray_engine = importlib.import_module(f"{__name__}.ray_engine")
        return ray_engine if name == "ray_engine" else ray_engine.join
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
