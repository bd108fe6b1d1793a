"""The loss around a worker and its leaders: python -m train.landscape RUN."""
