"""Leader-based and communication-efficient training as optax transformations."""

from lsgd_jax import aot as aot
from lsgd_jax import asynchronous as asynchronous
from lsgd_jax import checks as checks
from lsgd_jax import contrib as contrib
from lsgd_jax import layouts as layouts
from lsgd_jax import robust as robust
from lsgd_jax import rules as rules
from lsgd_jax import topology as topology
from lsgd_jax._src.exchange.aggregate import AggregateState as AggregateState
from lsgd_jax._src.exchange.aggregate import aggregate as aggregate
from lsgd_jax._src.exchange.around import Around as Around
from lsgd_jax._src.exchange.around import around as around
from lsgd_jax._src.exchange.crew import LoopEnded as LoopEnded
from lsgd_jax._src.exchange.diagnostics import Diagnostics as Diagnostics
from lsgd_jax._src.exchange.diagnostics import diagnostics as diagnostics
from lsgd_jax._src.exchange.diagnostics import waiting as waiting
from lsgd_jax._src.exchange.exchange import Exchange as Exchange
from lsgd_jax._src.exchange.exchange import exchange as exchange
from lsgd_jax._src.exchange.kernel import Pull as Pull
from lsgd_jax._src.exchange.kernel import PullState as PullState
from lsgd_jax._src.exchange.loop import Loop as Loop
from lsgd_jax._src.exchange.loop_beside import LoopBeside as LoopBeside
from lsgd_jax._src.exchange.outer import AroundState as AroundState
from lsgd_jax._src.exchange.outer import Outer as Outer
from lsgd_jax._src.exchange.outer import OuterState as OuterState
from lsgd_jax._src.exchange.outer import outer as outer
from lsgd_jax._src.exchange.parts import Fragment as Fragment
from lsgd_jax._src.exchange.parts import fragment as fragment
from lsgd_jax._src.exchange.phases import Phase as Phase
from lsgd_jax._src.exchange.resize import resize as resize
from lsgd_jax._src.exchange.schedule import Periods as Periods
from lsgd_jax._src.exchange.step import ExchangeState as ExchangeState
from lsgd_jax._src.exchange.with_state import with_state as with_state
from lsgd_jax._src.methods.anchored import AnchorState as AnchorState
from lsgd_jax._src.methods.averaging import diloco as diloco
from lsgd_jax._src.methods.averaging import local_sgd as local_sgd
from lsgd_jax._src.methods.averaging import slowmo as slowmo
from lsgd_jax._src.methods.easgd import CenterState as CenterState
from lsgd_jax._src.methods.easgd import downpour as downpour
from lsgd_jax._src.methods.easgd import easgd as easgd
from lsgd_jax._src.methods.gossip import adpsgd as adpsgd
from lsgd_jax._src.methods.gossip import dpsgd as dpsgd
from lsgd_jax._src.methods.guard import Detector as Detector
from lsgd_jax._src.methods.guard import Guard as Guard
from lsgd_jax._src.methods.lsgd import LeaderState as LeaderState
from lsgd_jax._src.methods.lsgd import lsgd as lsgd
from lsgd_jax._src.methods.pairwise import PairwiseState as PairwiseState
from lsgd_jax._src.methods.pairwise import pairwise as pairwise
from lsgd_jax._src.methods.parle import ParleState as ParleState
from lsgd_jax._src.methods.parle import parle as parle
from lsgd_jax._src.methods.parle import scoping as scoping
from lsgd_jax._src.methods.push_sum import PushSumState as PushSumState
from lsgd_jax._src.methods.push_sum import osgp as osgp
from lsgd_jax._src.methods.push_sum import sgp as sgp
from lsgd_jax._src.methods.robust import allreduce as allreduce
from lsgd_jax._src.methods.wagma import wagma as wagma
from lsgd_jax._src.moved import moved as _moved
from lsgd_jax._src.shared import Shared as Shared
from lsgd_jax._src.trees import apply_updates as apply_updates
from lsgd_jax._src.wire.top_k import TopK as TopK
from lsgd_jax._src.wire.wire import Wire as Wire
from lsgd_jax._src.wire.wire import WireFormat as WireFormat
from lsgd_jax._src.workers.consensus import center as center
from lsgd_jax._src.workers.consensus import consensus as consensus
from lsgd_jax._src.workers.consensus import consensus_distance as consensus_distance
from lsgd_jax._src.workers.consensus import has_center as has_center
from lsgd_jax._src.workers.consensus import is_finite as is_finite
from lsgd_jax._src.workers.devices import emulate_devices as emulate_devices
from lsgd_jax._src.workers.devices import tune_cpu as tune_cpu
from lsgd_jax._src.workers.static_args import static_args as static_args
from lsgd_jax._src.workers.unrolled import unrolled as unrolled
from lsgd_jax._src.workers.workers import Workers as Workers


__version__ = "0.4.0"

# 0.5 drops the old names.
__getattr__ = _moved(
    __name__,
    rules=vars(rules),
    robust=vars(robust),
    layouts=vars(layouts),
    contrib={"gosgd": contrib.gosgd, "SumWeightState": contrib.SumWeightState},
)
