"""The loss and the settings that published laws expect, with their sources and errors.

Two papers have fitted or measured them on transformers and English text (C4), with about
20 tokens per parameter. "Scaling Laws for DiLoCo" (arXiv:2503.09799) has data parallel, and
DiLoCo with H = 30. "Streaming DiLoCo" (arXiv:2501.18512) has fragments that overlap with a
step in 4 bits, and H = 100. Other methods have no law, and none is made up for them.
"""

from typing import NamedTuple


SCALING = "arXiv:2503.09799"
STREAMING = "arXiv:2501.18512"
PARAMETERS = (35e6, 10e9)  # the sizes of the models that the laws were fitted or tested on
REPLICAS = (1, 8)
CHINCHILLA = 20.0  # tokens per parameter
TOKENS = (0.9, 1.1)  # the share of these tokens within which a loss is expected
OVERTRAINED = 16.0  # times these tokens, up to which the difference of methods was seen
NEAR = 0.1  # a period this near to that of a source counts as the same


class PowerLaw(NamedTuple):
    """A N^a M^b, for N parameters and M replicas."""

    factor: float
    exponent: float
    of_replicas: float = 0.0

    def __call__(self, parameters: float, replicas: int = 1) -> float:
        return self.factor * parameters**self.exponent * replicas**self.of_replicas


# arXiv:2503.09799, Tables 8 to 11. The key None is data parallel.
LOSS: dict[int | None, PowerLaw] = {
    None: PowerLaw(18.129, -0.0953),
    1: PowerLaw(18.363, -0.0961),
    2: PowerLaw(18.768, -0.0969),
    4: PowerLaw(19.762, -0.0992),
    8: PowerLaw(21.051, -0.1018),
}
JOINT_LOSS = PowerLaw(19.226, -0.0985, 0.0116)
RATE = PowerLaw(16319.2, -0.819)
JOINT_RATE = PowerLaw(22256, -0.8827, 0.2929)
BATCH = PowerLaw(462.68, 0.281)
JOINT_BATCH = PowerLaw(14.521, 0.4695, 0.3399)

# Relative errors of the losses up to some number of parameters, of the fits for one M and
# of the joint one: the largest residuals of Table 5 and deviations of Tables 4 and 6.
ERRORS = (2.4e9, 0.014, 0.019), (4e9, 0.017, 0.024), (10e9, 0.047, 0.057)
# Nats by which differences to data parallel deviate from those of both papers' tables, up
# to some number of parameters.
DIFFERENCES = (99e6, 0.036), (10e9, 0.026)
SETTINGS = 0.19  # residual of the logarithms of rates and batches, Table 12
# The best rate of SGD with Nesterov momentum 0.9 from 335 M parameters on, for H = 30; from
# the heat map of the best outer rates (Figure 7 of version 1, Figure 5 of version 2).
OUTER_RATES = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
# Nats that H = 100 costs beside H = 30, by M: arXiv:2501.18512, Table 6, 35 M to 1 B.
LONGER = {2: 0.02, 4: 0.03}
STREAMED = (
    f"fragments, a delay of a step and few bits have DiLoCo's loss: {STREAMING}, Table 5, "
    "within 0.01 nats for 2 replicas, 4 bits and 35 M to 1 B parameters"
)


class Loss(NamedTuple):
    """The loss that is expected after training.

    Attributes:
      nats: the loss; None where no law holds.
      error: nats by which it may deviate.
      more: nats more than data parallel; None where no law holds.
      more_error: nats by which the difference may deviate.
      source: where the numbers come from, or why there are none.
    """

    nats: float | None
    error: float
    more: float | None
    more_error: float
    source: str


def none(reason: str) -> Loss:
    """No loss, and the reason."""
    return Loss(None, 0.0, None, 0.0, f"unknown, because {reason}")


def loss(
    parameters: float,
    tokens: float,
    replicas: int,
    method: str,
    period: int | None = 1,
) -> Loss:
    """Returns the loss of a method.

    Args:
      parameters: number of parameters, N.
      tokens: number of tokens, of which 20 N are the laws' own.
      replicas: number of replicas, M.
      method: as in the trainer; allreduce and diloco have a law.
      period: steps between two exchanges of a parameter, H; None if it changes.

    >>> found = loss(1e9, 2e10, 4, "diloco", 30)
    >>> round(found.nats, 3), round(found.error, 3), round(found.more, 3)
    (2.529, 0.035, 0.014)
    >>> loss(1e9, 2e10, 4, "lsgd", 30).source
    'unknown, because no scaling law was published'
    """
    if method not in ("allreduce", "diloco"):
        return none("no scaling law was published")
    least, most = PARAMETERS
    if not least <= parameters <= most:
        return none(
            f"its law was fitted and tested from {least / 1e6:g} M to {most / 1e9:g} B "
            "parameters"
        )
    if not REPLICAS[0] <= replicas <= REPLICAS[1]:
        return none(f"its law was fitted for 1 to {REPLICAS[1]} replicas")
    times = tokens / (CHINCHILLA * parameters)
    if not TOKENS[0] <= times <= OVERTRAINED:
        return none(f"its law was fitted at {CHINCHILLA:g} tokens per parameter")
    source = f"{SCALING}, Tables 8 and 11"
    more = 0.0
    base = LOSS[None](parameters)
    if method == "diloco":
        extra, where = _of_period(period, replicas)
        if extra is None:
            return none(where)
        source += where
        more = LOSS.get(replicas, JOINT_LOSS)(parameters, replicas) - base + extra
    apart = next(nats for top, nats in DIFFERENCES if parameters <= top)
    if method == "allreduce":
        apart = 0.0
    if times > TOKENS[1]:  # curves stay parallel, Figure 7; the loss itself has no law
        return Loss(None, 0.0, more, apart, f"{source}; Figure 7 for more tokens")
    is_joint = method == "diloco" and replicas not in LOSS
    error = next(errors[is_joint] for top, *errors in ERRORS if parameters <= top)
    return Loss(base + more, error * (base + more), more, apart, source)


def _of_period(period: int | None, replicas: int) -> tuple[float | None, str]:
    """The nats that a period adds to those of H = 30, and their source or the reason."""
    if period is None:
        return None, "its law was fitted for periods that do not change"
    if is_near(period, 30):
        return 0.0, ""
    if is_near(period, 100) and replicas in LONGER:
        return LONGER[replicas], f"; H = 100: {STREAMING}, Table 6"
    known = " or ".join(map(str, LONGER))
    why = f"its period is far from those of the laws: 30, and 100 for {known} replicas"
    return None, why


def is_fitted(parameters: float, tokens: float, replicas: int) -> bool:
    """Whether the fits of rates and batches are used within their range.

    >>> is_fitted(1e9, 2e10, 4), is_fitted(4e11, 8e12, 4)
    (True, False)
    """
    least, most = PARAMETERS
    times = tokens / (CHINCHILLA * parameters)
    return (
        least <= parameters <= most
        and TOKENS[0] <= times <= TOKENS[1]
        and REPLICAS[0] <= replicas <= REPLICAS[1]
    )


def is_near(period: int, known: int) -> bool:
    """Whether a period counts as one that a source has.

    >>> is_near(32, 30), is_near(64, 30)
    (True, False)
    """
    return abs(period - known) <= NEAR * known


def settings(
    parameters: float, replicas: int, method: str, period: int | None
) -> dict[str, float]:
    """Returns the settings that laws have for a method: rate, batch and outer rate.

    Methods without a law of their own get none, except for the batch in tokens: that of
    DiLoCo with as many replicas. Data parallel gets the same batch for models whose size is
    outside the range of the fits, where its own would grow ever smaller beside it.

    >>> found = settings(1e9, 4, "diloco", 30)
    >>> round(found["batch"], -3), f"{found['rate']:.2g}", found["outer_rate"]
    (391000.0, '0.00038', 0.6)
    """
    found = {"batch": JOINT_BATCH(parameters, replicas)}
    if method == "allreduce":
        if PARAMETERS[0] <= parameters <= PARAMETERS[1]:
            found["batch"] = BATCH(parameters)
        return found | {"rate": RATE(parameters)}
    if method == "diloco":
        found["rate"] = JOINT_RATE(parameters, replicas)
        is_known = period is not None and is_near(period, 30)
        if is_known and replicas in OUTER_RATES:
            found["outer_rate"] = OUTER_RATES[replicas]
    return found
