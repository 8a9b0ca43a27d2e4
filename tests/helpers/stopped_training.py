"""Training that stops in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from cbmir.training.config import TrainConfig
from cbmir.training.harness import RetrievalTask, train


def train_until(epoch: int, config: TrainConfig, folder: Path) -> None:
    """Train until the first step of `epoch`, and stop there."""
    step = RetrievalTask.training_step

    def stop(task: RetrievalTask, batch: Any, index: int) -> Tensor:
        if task.current_epoch == epoch:
            raise ConnectionAbortedError
        return step(task, batch, index)

    with patch.object(RetrievalTask, "training_step", stop), pytest.raises(ConnectionAbortedError):
        train(config, folder)
