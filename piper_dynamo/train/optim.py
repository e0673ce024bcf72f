"""The optimizer of the main job: AdamW with linear warm-up and cosine decay to a tenth."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from piper_dynamo.train.config import Config

FINAL_SHARE = 0.1  # of the peak rate, at the last step


def make_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> torch.optim.Optimizer:
    """AdamW; one call per step for all parameters. Norms' gains are not decayed."""
    held = list(parameters)
    groups = [
        {"params": [p for p in held if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in held if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), foreach=True)


def learning_rate(step: int, config: Config) -> float:
    """The rate of a step, counted from 0: `lr` when the warm-up is over, a tenth at the end."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(config.steps - 1 - config.warmup, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: Config) -> float:
    """Set the rate for a step; returns it."""
    rate = learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
