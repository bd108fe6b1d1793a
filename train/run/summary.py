"""The table that a run prints at its end."""

from collections.abc import Mapping
from typing import Any

from train.metrics import measures
from train.run.result import Result
from train.task.forward import TestResult


def rows(result: Result, latest: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The rows of the table: what was trained, at what cost.

    Args:
      result: the result of the run.
      latest: the latest event of each kind in this session.
    """
    train = latest.get("train", {})
    found: dict[str, str | None] = {}
    if result.tested is not None:
        found["center"] = _tested(result.tested.center)
        found["best worker"] = _tested(result.tested.best)
    if result.best is not None:
        found["best checkpoint"] = f"step {result.best.step}: {_tested(result.best.tested)}"
    if result.checkpoint is not None:
        found["last checkpoint"] = f"step {result.checkpoint}"
    pace = train.get("steps_per_second")
    if pace is not None:
        found["steps"] = f"{result.step}, {pace:.1f} a second"
    found["training time"] = f"{result.seconds:.1f} s"
    found["compile time"] = f"{result.compile_seconds:.1f} s"
    loss = train.get("loss")
    if loss is not None:
        found["training loss"] = f"{loss:.4f}"
    sent = latest.get("test", train).get("bytes_sent")
    if sent is not None:
        found["sent per worker"] = f"{sent / 1e6:.1f} MB"
    waited = train.get("exchange_wait_s")
    if waited is not None:
        found["waited for exchanges"] = f"{waited:.1f} s"
    restored = train.get("restored")
    if restored:
        found["workers restored"] = str(restored)
    return {name: text for name, text in found.items() if text is not None}


def _tested(result: TestResult) -> str:
    return measures.text(result, name=True)
