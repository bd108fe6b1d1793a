"""MaxText: its model and train step, with `lj.around` in place of its own DiLoCo.

Two replicas on the mesh axis `diloco`, each sharded over `fsdp`, are compared with those of
`enable_diloco`. Tested with maxtext 0.2.5 and jax 0.11.2 on Python 3.12.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train.train import train_step
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR
from maxtext.utils.train_utils import jit_train_and_eval_step, setup_train_loop
from own_loop import compare

import lsgd_jax as lj


OPTIONS = """run_name=toy base_output_directory=. hardware=cpu dataset_type=synthetic
    skip_jax_distributed_system=true enable_checkpointing=false log_config=false steps=99
    attention=dot_product dtype=float32 learning_rate=1e-2 vocab_size=64 base_emb_dim=32
    base_mlp_dim=64 base_num_decoder_layers=2 head_dim=16
    base_num_query_heads=2 base_num_kv_heads=2 max_target_length=16 per_device_batch_size=2
    ici_diloco_parallelism=2 ici_fsdp_parallelism=2 enable_diloco=true diloco_sync_period=4
    diloco_outer_lr=0.7"""

LOSS = "scalar", "learning/loss"  # its place in the results


def main(steps: int = 12):
    config = pyconfig.initialize(["", f"{MAXTEXT_CONFIGS_DIR}/base.yml", *OPTIONS.split()])
    _, _, shardings, graph, mesh, _, _, loader, *_, state = setup_train_loop(config, None)
    fixed = dict(state_mesh_shardings=shardings, params_shardings=shardings.params)
    theirs, _ = jit_train_and_eval_step(
        config, graph, mesh, state, train_step=train_step, **fixed
    )
    step = lambda state, data: train_step(graph, config, state=state, data=data, **fixed)
    method = lj.diloco(4, optax.sgd(0.7, momentum=0.9, nesterov=True))
    get = lambda state: nnx.state(state.model, nnx.Param)  # new
    put = lambda state, params: nnx.merge_state(state, nnx.State({"model": params}))  # new
    step = lj.around(step, method, params=(get, put), loss=LOSS)  # new
    over = functools.partial(jax.vmap, axis_name="node", spmd_axis_name="diloco")  # new

    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        inner = jax.tree.map(jnp.copy, state.inner_state)
        inner, step = jax.jit(over(step.init))(inner), jax.jit(over(step))  # new
        for _ in range(steps):
            batch = loader.load_next_batch(rampup_manager=None)
            state, _ = theirs(state, batch, None)
            inner, metrics = step(inner, batch)
    compare("MaxText's DiLoCo", get(state.inner_state), get(inner.state))


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
