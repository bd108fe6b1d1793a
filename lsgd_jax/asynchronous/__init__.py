"""Workers that step at their own pace."""

import importlib
from typing import Any

from lsgd_jax._src.asynchronous.adpsgd import ADPSGD as ADPSGD
from lsgd_jax._src.asynchronous.budget import BudgetState as BudgetState
from lsgd_jax._src.asynchronous.budget import OnBudget as OnBudget
from lsgd_jax._src.asynchronous.budget import on_budget as on_budget
from lsgd_jax._src.asynchronous.coordinator import Coordinator as Coordinator
from lsgd_jax._src.asynchronous.coordinator import Report as Report
from lsgd_jax._src.asynchronous.coordinator import Standing as Standing
from lsgd_jax._src.asynchronous.diloco import DiLoCo as DiLoCo
from lsgd_jax._src.asynchronous.errors import Behind as Behind
from lsgd_jax._src.asynchronous.errors import Unreachable as Unreachable
from lsgd_jax._src.asynchronous.lsgd import LSGD as LSGD
from lsgd_jax._src.asynchronous.memory import Memory as Memory
from lsgd_jax._src.asynchronous.network import NETWORKS as NETWORKS
from lsgd_jax._src.asynchronous.network import Network as Network
from lsgd_jax._src.asynchronous.pairwise import Pairwise as Pairwise
from lsgd_jax._src.asynchronous.ports import Pending as Pending
from lsgd_jax._src.asynchronous.ports import Place as Place
from lsgd_jax._src.asynchronous.ports import Ports as Ports
from lsgd_jax._src.asynchronous.pulls import Pulls as Pulls
from lsgd_jax._src.asynchronous.rounds import Rounds as Rounds
from lsgd_jax._src.asynchronous.rounds import Store as Store
from lsgd_jax._src.asynchronous.rounds import steps_taken as steps_taken
from lsgd_jax._src.asynchronous.speeds import Speeds as Speeds
from lsgd_jax._src.asynchronous.wagma import WAGMA as WAGMA
from lsgd_jax._src.asynchronous.worker import Method as Method
from lsgd_jax._src.asynchronous.worker import Training as Training
from lsgd_jax._src.asynchronous.worker import Worker as Worker
from lsgd_jax._src.asynchronous.worker import work as work


def __getattr__(name: str) -> Any:
    """Engines that need an extra are imported when they are asked for."""
    if name in ("ray_engine", "simulator"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
