"""Leader-based and communication-efficient training as optax transformations."""

from lsgd_jax import collectives as collectives
from lsgd_jax._types import Shared as Shared
from lsgd_jax.consensus import center as center
from lsgd_jax.consensus import consensus as consensus
from lsgd_jax.consensus import consensus_distance as consensus_distance
from lsgd_jax.devices import emulate_devices as emulate_devices
from lsgd_jax.diagnostics import Diagnostics as Diagnostics
from lsgd_jax.diagnostics import diagnostics as diagnostics
from lsgd_jax.diagnostics import waiting as waiting
from lsgd_jax.methods.leader import LeaderState as LeaderState
from lsgd_jax.methods.leader import leader as leader
from lsgd_jax.methods.leader import lsgd as lsgd
from lsgd_jax.pull import PullState as PullState
from lsgd_jax.pull import QuarantineState as QuarantineState
from lsgd_jax.pull import Target as Target
from lsgd_jax.pull import apply_updates as apply_updates
from lsgd_jax.pull import pull as pull
from lsgd_jax.pull import quarantine as quarantine
from lsgd_jax.workers import Workers as Workers


__version__ = "0.1.0"
