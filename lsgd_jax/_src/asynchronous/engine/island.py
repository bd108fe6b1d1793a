"""Islands: asynchronous workers of several devices.

Inside an island the step of a worker is one program on all its devices. To other workers an
island is one worker, whose parameters travel whole.
"""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.asynchronous.engine.sharding import check_mesh, placed_like, sharding_of
from lsgd_jax._src.asynchronous.engine.worker import Training
from lsgd_jax._src.layouts import Specs, spread


def island(training: Training, mesh: Mesh, specs: Specs = None) -> Training:
    """Returns the training of a worker that is sharded over the devices of a mesh.

    The functions of `training` stay those of one worker on one large device. Axes of the
    mesh are automatic: XLA decides what to gather when, and
    `jax.lax.with_sharding_constraint` may guide it in `step`, which is called under
    ``jax.set_mesh(mesh)``. Optimizer states lie as their parameters do. Steps and exchanges
    keep these layouts.

    To other workers an island is one worker. Its parameters are gathered in the host's
    memory when they travel, so islands of different sizes train together. Of parameters
    that arrive, a device receives its own shards. Only the encoding in narrow formats
    gathers on devices.

    Args:
      training: the training of one worker.
      mesh: devices of this process, on automatic axes; workers of one process may share it.
      specs: the layout of the parameters: a `PartitionSpec` for all, a prefix tree of them,
        or a function (path, leaf) -> PartitionSpec such as `lj.layouts.largest_dimension`.
        Defaults to replicated parameters, with which only the batch can be split.

    Raises:
      ValueError: explicit axes, devices of other processes; in `init`, specs that do not
        fit the parameters.

    >>> import jax.numpy as jnp, numpy as np
    >>> mesh = Mesh(np.array(jax.devices()[:4]), "fsdp")
    >>> alone = Training(lambda i: (jnp.ones(8), (), i), lambda x, s, i, t: (-x, s, i, 0.0))
    >>> params, _, _ = island(alone, mesh, Spec("fsdp")).init(0)
    >>> params.addressable_shards[0].data.shape
    (2,)
    """
    check_mesh(mesh)

    def init(index):
        params, opt_state, own = training.init(index)
        named = [NamedSharding(mesh, s) for s in spread(specs, params, dict(mesh.shape))]
        leaves, treedef = jax.tree.flatten(params)
        params = treedef.unflatten(jax.device_put(leaves, named))
        sharding = sharding_of(params)
        if sharding is None:  # a mesh of one device
            return params, opt_state, own
        whole = NamedSharding(mesh, Spec())

        def replicated(x):
            return jax.device_put(x, whole) if isinstance(x, jax.Array) else x

        return params, sharding.put(opt_state), jax.tree.map(replicated, own)

    def step(params, opt_state, own, t):
        with jax.set_mesh(mesh):
            u, moved, own, loss = training.step(params, opt_state, own, t)
        return u, placed_like(opt_state, moved), own, loss

    return Training(init, step)
