"""Leader-based and communication-efficient training as optax transformations."""

from lsgd_jax import asynchronous as asynchronous
from lsgd_jax import checks as checks
from lsgd_jax import topology as topology
from lsgd_jax._src.aggregate import AggregateState as AggregateState
from lsgd_jax._src.aggregate import aggregate as aggregate
from lsgd_jax._src.consensus import center as center
from lsgd_jax._src.consensus import consensus as consensus
from lsgd_jax._src.consensus import consensus_distance as consensus_distance
from lsgd_jax._src.consensus import healthy as healthy
from lsgd_jax._src.devices import choose_kernels as _choose_kernels
from lsgd_jax._src.devices import emulate_devices as emulate_devices
from lsgd_jax._src.devices import reserve_threads as _reserve_threads
from lsgd_jax._src.diagnostics import Diagnostics as Diagnostics
from lsgd_jax._src.diagnostics import diagnostics as diagnostics
from lsgd_jax._src.diagnostics import waiting as waiting
from lsgd_jax._src.exchange import Exchange as Exchange
from lsgd_jax._src.exchange import ExchangeState as ExchangeState
from lsgd_jax._src.exchange import exchange as exchange
from lsgd_jax._src.group import Group as Group
from lsgd_jax._src.kernel import Pull as Pull
from lsgd_jax._src.kernel import PullState as PullState
from lsgd_jax._src.layouts import inside_axes as inside_axes
from lsgd_jax._src.methods.averaging import AnchorState as AnchorState
from lsgd_jax._src.methods.averaging import anchored as anchored
from lsgd_jax._src.methods.averaging import average as average
from lsgd_jax._src.methods.averaging import diloco as diloco
from lsgd_jax._src.methods.averaging import local_sgd as local_sgd
from lsgd_jax._src.methods.averaging import slowmo as slowmo
from lsgd_jax._src.methods.easgd import CenterState as CenterState
from lsgd_jax._src.methods.easgd import downpour as downpour
from lsgd_jax._src.methods.easgd import easgd as easgd
from lsgd_jax._src.methods.easgd import moving_center as moving_center
from lsgd_jax._src.methods.gossip import adpsgd as adpsgd
from lsgd_jax._src.methods.gossip import dpsgd as dpsgd
from lsgd_jax._src.methods.gossip import neighbors as neighbors
from lsgd_jax._src.methods.group import butterfly as butterfly
from lsgd_jax._src.methods.group import wagma as wagma
from lsgd_jax._src.methods.lsgd import LeaderState as LeaderState
from lsgd_jax._src.methods.lsgd import leader as leader
from lsgd_jax._src.methods.lsgd import lsgd as lsgd
from lsgd_jax._src.methods.pairwise import PairwiseState as PairwiseState
from lsgd_jax._src.methods.pairwise import SumWeightState as SumWeightState
from lsgd_jax._src.methods.pairwise import gosgd as gosgd
from lsgd_jax._src.methods.pairwise import pairwise as pairwise
from lsgd_jax._src.methods.parle import ParleState as ParleState
from lsgd_jax._src.methods.parle import parle as parle
from lsgd_jax._src.methods.parle import scoping as scoping
from lsgd_jax._src.methods.push_sum import PushSumState as PushSumState
from lsgd_jax._src.methods.push_sum import osgp as osgp
from lsgd_jax._src.methods.push_sum import push_sum as push_sum
from lsgd_jax._src.methods.push_sum import sgp as sgp
from lsgd_jax._src.methods.robust import allreduce as allreduce
from lsgd_jax._src.methods.robust import cge as cge
from lsgd_jax._src.methods.robust import coordinate_median as coordinate_median
from lsgd_jax._src.methods.robust import licm as licm
from lsgd_jax._src.parts import Fragment as Fragment
from lsgd_jax._src.parts import fragment as fragment
from lsgd_jax._src.resize import resize as resize
from lsgd_jax._src.rule import Rule as Rule
from lsgd_jax._src.rule import combine_then_adapt as combine_then_adapt
from lsgd_jax._src.shared import Shared as Shared
from lsgd_jax._src.specs import following as following
from lsgd_jax._src.specs import largest_dimension as largest_dimension
from lsgd_jax._src.trees import apply_updates as apply_updates
from lsgd_jax._src.unrolled import unrolled as unrolled
from lsgd_jax._src.wire import Wire as Wire
from lsgd_jax._src.wire import WireFormat as WireFormat
from lsgd_jax._src.with_state import with_state as with_state
from lsgd_jax._src.workers import Workers as Workers


__version__ = "0.2.0"

_reserve_threads()
_choose_kernels()
