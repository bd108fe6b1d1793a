"""The statements of the theory, one module each, with a `check` of its own."""
