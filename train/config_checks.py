"""What settings must be, in one wording."""

from typing import Any


def check(holds: bool, name: str, rule: str, group: Any) -> None:
    """Raises ValueError unless a setting of a group, named in full, follows its rule."""
    if not holds:
        value = getattr(group, name.split(".")[-1])
        raise ValueError(f"`{name}` must be {rule}, got {name}={value}")
