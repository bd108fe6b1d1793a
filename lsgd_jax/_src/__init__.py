"""Private modules: import from `lsgd_jax` itself."""
