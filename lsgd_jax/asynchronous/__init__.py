"""Asynchronous workers: each takes its own steps as fast as it can."""

import importlib
from typing import TYPE_CHECKING, Any

from lsgd_jax._src.asynchronous.engine.coordinator import Coordinator as Coordinator
from lsgd_jax._src.asynchronous.engine.coordinator import Status as Status
from lsgd_jax._src.asynchronous.engine.coordinator import WorkerReport as WorkerReport
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError as StaleWorkerError
from lsgd_jax._src.asynchronous.engine.errors import UnreachableError as UnreachableError
from lsgd_jax._src.asynchronous.engine.island import island as island
from lsgd_jax._src.asynchronous.engine.transport import GridPosition as GridPosition
from lsgd_jax._src.asynchronous.engine.transport import Transport as Transport
from lsgd_jax._src.asynchronous.engine.worker import Method as Method
from lsgd_jax._src.asynchronous.engine.worker import Training as Training
from lsgd_jax._src.asynchronous.engine.worker import Worker as Worker
from lsgd_jax._src.asynchronous.engine.worker import work as work
from lsgd_jax._src.asynchronous.methods.adpsgd import ADPSGD as ADPSGD
from lsgd_jax._src.asynchronous.methods.decoupled import DecoupledDiLoCo as DecoupledDiLoCo
from lsgd_jax._src.asynchronous.methods.diloco import DiLoCo as DiLoCo
from lsgd_jax._src.asynchronous.methods.lsgd import LSGD as LSGD
from lsgd_jax._src.asynchronous.methods.osgp import OSGP as OSGP
from lsgd_jax._src.asynchronous.methods.pairwise import Pairwise as Pairwise
from lsgd_jax._src.asynchronous.methods.peer import Peer as Peer
from lsgd_jax._src.asynchronous.methods.pulls import Pulls as Pulls
from lsgd_jax._src.asynchronous.methods.wagma import WAGMA as WAGMA
from lsgd_jax._src.asynchronous.simulated.network import NETWORKS as NETWORKS
from lsgd_jax._src.asynchronous.simulated.network import Network as Network
from lsgd_jax._src.asynchronous.simulated.speeds import Speeds as Speeds
from lsgd_jax._src.asynchronous.simulated.worlds import WORLDS as WORLDS
from lsgd_jax._src.asynchronous.simulated.worlds import World as World
from lsgd_jax._src.moved import renamed as _renamed
from lsgd_jax.asynchronous import simulator as simulator


if TYPE_CHECKING:
    from lsgd_jax.asynchronous import ray_engine as ray_engine
    from lsgd_jax.asynchronous.ray_engine import join as join


_old_name = _renamed(__name__, Report=WorkerReport)


def __getattr__(name: str) -> Any:
    """Ray, which needs the extra `async`, is imported when it is asked for."""
    if name in ("ray_engine", "join"):
        ray_engine = importlib.import_module(f"{__name__}.ray_engine")
        return ray_engine if name == "ray_engine" else ray_engine.join
    return _old_name(name)
