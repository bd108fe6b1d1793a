"""Rules, to what a worker is pulled, and what a rule or method of your own needs."""

from lsgd_jax._src.exchange.options import PullOptions as PullOptions
from lsgd_jax._src.exchange.options import takes_options as takes_options
from lsgd_jax._src.exchange.rule import Rule as Rule
from lsgd_jax._src.exchange.rule import combine_then_adapt as combine_then_adapt
from lsgd_jax._src.methods.anchored import anchored as anchored
from lsgd_jax._src.methods.averaging import average as average
from lsgd_jax._src.methods.easgd import moving_center as moving_center
from lsgd_jax._src.methods.gossip import neighbors as neighbors
from lsgd_jax._src.methods.lsgd import leader as leader
from lsgd_jax._src.methods.push_sum import push_sum as push_sum
from lsgd_jax._src.methods.robust_means import robust_mean as robust_mean
from lsgd_jax._src.methods.wagma import butterfly as butterfly
from lsgd_jax._src.wire.group import Group as Group
