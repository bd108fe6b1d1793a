"""The statements of the theory: one module each, with a function `check`."""
