"""The methods that the trainer knows: their options, and the transformation they build.

Every class is one method; `--method NAME` chooses it and its fields become the options
`--method.FIELD`. `build(workers)` makes the transformation for so many workers, `around`
puts it before the base optimizer (if it is about gradients, `first`) or behind it.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import optax

import lsgd_jax as lj


Graph = Literal["ring", "exponential", "complete"]


@dataclasses.dataclass(frozen=True)
class Method:
    """A method without options; the others derive from it."""

    name: ClassVar[str]
    first: ClassVar[bool] = False

    def build(self, workers: int) -> optax.GradientTransformation:
        """The transformation for so many workers: by default the one of that name."""
        del workers
        return getattr(lj, self.name.replace("-", "_"))(**dataclasses.asdict(self))

    def around(
        self,
        base: optax.GradientTransformation,
        workers: int,
        learning_rate: optax.ScalarOrSchedule = 1.0,
    ) -> optax.GradientTransformationExtraArgs:
        """The chain of a base optimizer (of that learning rate) and this method."""
        del learning_rate
        method = self.build(workers)
        return optax.chain(method, base) if self.first else optax.chain(base, method)


@dataclasses.dataclass(frozen=True)
class Alone(Method):
    """Every worker for itself: nothing is exchanged."""

    name = "alone"

    def build(self, workers: int) -> optax.GradientTransformation:
        return optax.identity()


@dataclasses.dataclass(frozen=True)
class Lsgd(Method):
    """Leader SGD: workers are pulled to the best of their node and to the best of all."""

    name = "lsgd"
    # Pull towards the leader of the node, in [0, 1]; 0 switches the level off.
    local_pull: float = 0.1
    # Pull towards the leader of all workers, in [0, 1]; 0 switches the level off.
    global_pull: float = 0.1
    # Steps between pulls towards the node's leader.
    local_period: int = 64
    # Steps between pulls towards the leader of all.
    global_period: int = 128
    # Number of last losses (batches) that a worker is judged by.
    loss_window: int = 10


@dataclasses.dataclass(frozen=True)
class Easgd(Method):
    """Elastic averaging SGD: workers and a center pull at each other."""

    name = "easgd"
    # How much of the way to the workers' mean the center goes, in [0, 1].
    beta: float = 0.43
    # Steps between exchanges.
    period: int = 16


@dataclasses.dataclass(frozen=True)
class Downpour(Method):
    """DOWNPOUR: the center takes everybody's way, and everybody the center."""

    name = "downpour"
    # Steps between exchanges.
    period: int = 16


@dataclasses.dataclass(frozen=True)
class LocalSgd(Method):
    """Local SGD: everybody takes the mean."""

    name = "local-sgd"
    # Steps between exchanges.
    period: int = 16


@dataclasses.dataclass(frozen=True)
class PostLocalSgd(LocalSgd):
    """Post-local SGD: all-reduce SGD until a step, then local SGD."""

    name = "post-local-sgd"
    # The last step with the mean gradient.
    switch_step: int = 1000

    def around(
        self,
        base: optax.GradientTransformation,
        workers: int,
        learning_rate: optax.ScalarOrSchedule = 1.0,
    ) -> optax.GradientTransformationExtraArgs:
        del workers, learning_rate
        first = lj.allreduce(until=self.switch_step)
        return optax.chain(first, base, lj.local_sgd(self.period))


@dataclasses.dataclass(frozen=True)
class SlowMo(Method):
    """SlowMo: the mean, through a slow momentum."""

    name = "slowmo"
    # Steps between exchanges.
    period: int = 16
    # Slow learning rate.
    alpha: float = 1.0
    # Slow momentum, in [0, 1].
    beta: float = 0.5

    def around(
        self,
        base: optax.GradientTransformation,
        workers: int,
        learning_rate: optax.ScalarOrSchedule = 1.0,
    ) -> optax.GradientTransformationExtraArgs:
        del workers
        if callable(learning_rate):  # optax counts the steps from 0, the library from 1
            schedule = learning_rate
            learning_rate = lambda t: schedule(t - 1)
        slow = lj.slowmo(self.period, self.alpha, self.beta, learning_rate)
        return optax.chain(base, slow)


@dataclasses.dataclass(frozen=True)
class Diloco(Method):
    """DiLoCo: an outer SGD with Nesterov's momentum moves an anchor by the workers' way."""

    name = "diloco"
    # Steps between exchanges.
    period: int = 64
    # Learning rate of the outer optimizer.
    outer_learning_rate: float = 0.7
    # Momentum of the outer optimizer, in [0, 1).
    outer_momentum: float = 0.9

    def build(self, workers: int) -> optax.GradientTransformation:
        outer = optax.sgd(self.outer_learning_rate, self.outer_momentum, nesterov=True)
        return lj.diloco(self.period, outer)


@dataclasses.dataclass(frozen=True)
class Parle(Method):
    """Parle: an inner loop around an anchor of one's own, which the mean pulls."""

    name = "parle"
    # Learning rate of the inner loop's pull towards the anchor.
    learning_rate: float = 0.1
    # Steps of the inner loop.
    period: int = 25
    # Pull of the anchor on the inner loop.
    anchor_pull: float = 0.01
    # Pull of the workers' mean on the anchors.
    center_pull: float = 1.0


@dataclasses.dataclass(frozen=True)
class Gossip(Method):
    """Gossip on a graph; the base of the methods below."""

    # The graph: who sends to whom.
    topology: Graph = "exponential"

    def build(self, workers: int) -> optax.GradientTransformation:
        options = dataclasses.asdict(self)
        graph: Any = getattr(lj.topology, options.pop("topology"))
        return getattr(lj, self.name)(graph(workers), **options)


@dataclasses.dataclass(frozen=True)
class Dpsgd(Gossip):
    """D-PSGD: parameters are mixed with the neighbors' at every step."""

    name = "dpsgd"
    topology: Graph = "ring"


@dataclasses.dataclass(frozen=True)
class Sgp(Gossip):
    """Stochastic gradient push: push-sum on a directed graph at every step."""

    name = "sgp"


@dataclasses.dataclass(frozen=True)
class Osgp(Gossip):
    """Overlap SGP: what travels is older than the step."""

    name = "osgp"
    # How many steps a message is under way.
    staleness: int = 1


@dataclasses.dataclass(frozen=True)
class Adpsgd(Method):
    """AD-PSGD in lock-step: pairs of workers average at every step."""

    name = "adpsgd"


@dataclasses.dataclass(frozen=True)
class Pairwise(Method):
    """Pairwise averaging (dpwa): every worker moves towards one peer."""

    name = "pairwise"
    # How the part taken from the peer is found.
    interpolation: Literal["constant", "clock", "loss"] = "constant"
    # That part if it is constant, in [0, 1].
    value: float = 0.5
    # Loss under which less is taken (interpolation by loss).
    divergence_threshold: float = 0.0
    # Probability of an exchange, per worker and step.
    fetch_probability: float = 1.0


@dataclasses.dataclass(frozen=True)
class Gosgd(Method):
    """GoSGD: sum-weight gossip, every worker sending to one peer now and then."""

    name = "gosgd"
    # Probability of sending, per worker and step.
    send_probability: float = 0.5


@dataclasses.dataclass(frozen=True)
class Wagma(Method):
    """WAGMA in lock-step: means of changing groups, and of everybody now and then."""

    name = "wagma"
    # Workers in a group, a power of two.
    group_size: int = 2
    # Steps between means of everybody.
    sync_period: int = 10


@dataclasses.dataclass(frozen=True)
class Allreduce(Method):
    """All-reduce SGD: the mean gradient at every step."""

    name = "allreduce"
    first = True


@dataclasses.dataclass(frozen=True)
class CoordinateMedian(Method):
    """The coordinate-wise median of the gradients."""

    name = "coordinate-median"
    first = True


@dataclasses.dataclass(frozen=True)
class Licm(Method):
    """LICM: the mean of the gradients near the median, per coordinate."""

    name = "licm"
    first = True
    # Width of the band around the median, as a part of it.
    gamma: float = 0.5


@dataclasses.dataclass(frozen=True)
class Cge(Method):
    """CGE: the mean of the gradients but for those of largest norm."""

    name = "cge"
    first = True
    # Number of gradients to leave out.
    faulty: int = 1


CLASSES = (
    *(Lsgd, Easgd, Downpour, LocalSgd, PostLocalSgd, SlowMo, Diloco, Parle),
    *(Dpsgd, Sgp, Osgp, Adpsgd, Pairwise, Gosgd, Wagma),
    *(Allreduce, CoordinateMedian, Licm, Cge, Alone),
)
METHODS: dict[str, type[Method]] = {cls.name: cls for cls in CLASSES}


def find(name: str) -> type[Method]:
    """The class of a method.

    Raises:
      ValueError: there is no method of that name.
    """
    if name not in METHODS:
        raise ValueError(
            f"`method` must be one of {', '.join(METHODS)}, got method={name!r}"
        )
    return METHODS[name]
