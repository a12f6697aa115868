"""Where engines keep, in the data directory, what an unloaded model had computed; and its end with the model."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def session_path(data_dir: Path, model: str) -> Path:
    return data_dir / "sessions" / f"{hashlib.sha256(model.encode()).hexdigest()[:16]}.state"


def sweep(data_dir: Path, models: Iterable[str]) -> None:
    """Removes what is kept of models other than these."""
    own = {session_path(data_dir, model) for model in models}
    for path in (data_dir / "sessions").glob("*.state*"):
        if path not in own:
            path.unlink(missing_ok=True)
