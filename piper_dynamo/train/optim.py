"""The optimizer of the main job: AdamW with linear warm-up and cosine decay to a tenth."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from piper_dynamo.train.config import Config


def make_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> torch.optim.Optimizer:
    """AdamW; one call per step for all parameters."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
        foreach=True,
    )


def learning_rate(step: int, config: Config) -> float:
    """The rate of a step, counted from 0."""
    warm = min(1.0, (step + 1) / max(config.warmup, 1))
    progress = min(1.0, step / max(config.steps, 1))
    return config.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: Config) -> float:
    """Set the rate for a step; returns it."""
    rate = learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
