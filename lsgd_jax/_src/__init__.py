"""What is not public: import from `lsgd_jax` itself."""
