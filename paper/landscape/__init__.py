"""The loss around a worker and its leaders: python -m paper landscape RUN."""
