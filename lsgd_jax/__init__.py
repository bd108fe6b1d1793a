"""Leader-based and communication-efficient training as optax transformations."""

from lsgd_jax import asynchronous as asynchronous
from lsgd_jax import checks as checks
from lsgd_jax import collectives as collectives
from lsgd_jax import topology as topology
from lsgd_jax._layouts import inside_axes as inside_axes
from lsgd_jax.aggregate import AggregateState as AggregateState
from lsgd_jax.aggregate import aggregate as aggregate
from lsgd_jax.collectives import Group as Group
from lsgd_jax.consensus import center as center
from lsgd_jax.consensus import consensus as consensus
from lsgd_jax.consensus import consensus_distance as consensus_distance
from lsgd_jax.consensus import healthy as healthy
from lsgd_jax.devices import choose_kernels as _choose_kernels
from lsgd_jax.devices import emulate_devices as emulate_devices
from lsgd_jax.devices import reserve_threads as _reserve_threads
from lsgd_jax.diagnostics import Diagnostics as Diagnostics
from lsgd_jax.diagnostics import diagnostics as diagnostics
from lsgd_jax.diagnostics import waiting as waiting
from lsgd_jax.exchange import Exchange as Exchange
from lsgd_jax.exchange import ExchangeState as ExchangeState
from lsgd_jax.exchange import Pull as Pull
from lsgd_jax.exchange import PullState as PullState
from lsgd_jax.exchange import exchange as exchange
from lsgd_jax.methods.averaging import AnchorState as AnchorState
from lsgd_jax.methods.averaging import anchored as anchored
from lsgd_jax.methods.averaging import average as average
from lsgd_jax.methods.averaging import diloco as diloco
from lsgd_jax.methods.averaging import local_sgd as local_sgd
from lsgd_jax.methods.averaging import slowmo as slowmo
from lsgd_jax.methods.easgd import CenterState as CenterState
from lsgd_jax.methods.easgd import downpour as downpour
from lsgd_jax.methods.easgd import easgd as easgd
from lsgd_jax.methods.easgd import moving_center as moving_center
from lsgd_jax.methods.gossip import adpsgd as adpsgd
from lsgd_jax.methods.gossip import dpsgd as dpsgd
from lsgd_jax.methods.gossip import neighbors as neighbors
from lsgd_jax.methods.group import butterfly as butterfly
from lsgd_jax.methods.group import wagma as wagma
from lsgd_jax.methods.lsgd import LeaderState as LeaderState
from lsgd_jax.methods.lsgd import leader as leader
from lsgd_jax.methods.lsgd import lsgd as lsgd
from lsgd_jax.methods.pairwise import PairwiseState as PairwiseState
from lsgd_jax.methods.pairwise import SumWeightState as SumWeightState
from lsgd_jax.methods.pairwise import gosgd as gosgd
from lsgd_jax.methods.pairwise import pairwise as pairwise
from lsgd_jax.methods.parle import ParleState as ParleState
from lsgd_jax.methods.parle import parle as parle
from lsgd_jax.methods.parle import scoping as scoping
from lsgd_jax.methods.push_sum import PushSumState as PushSumState
from lsgd_jax.methods.push_sum import osgp as osgp
from lsgd_jax.methods.push_sum import push_sum as push_sum
from lsgd_jax.methods.push_sum import sgp as sgp
from lsgd_jax.methods.robust import allreduce as allreduce
from lsgd_jax.methods.robust import cge as cge
from lsgd_jax.methods.robust import coordinate_median as coordinate_median
from lsgd_jax.methods.robust import licm as licm
from lsgd_jax.parts import Fragment as Fragment
from lsgd_jax.parts import fragment as fragment
from lsgd_jax.resize import resize as resize
from lsgd_jax.rule import Rule as Rule
from lsgd_jax.rule import combine_then_adapt as combine_then_adapt
from lsgd_jax.shared import Shared as Shared
from lsgd_jax.specs import following as following
from lsgd_jax.specs import largest_dimension as largest_dimension
from lsgd_jax.trees import apply_updates as apply_updates
from lsgd_jax.unrolled import unrolled as unrolled
from lsgd_jax.wire import Wire as Wire
from lsgd_jax.with_state import with_state as with_state
from lsgd_jax.workers import Workers as Workers


__version__ = "0.2.0"

_reserve_threads()
_choose_kernels()
