"""Not public: import from `lsgd_jax.asynchronous`."""
