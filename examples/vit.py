"""A ViT of transformers, untouched: images in, four interleaved stages on two ranks."""

import torch
from transformers import ViTConfig, ViTForImageClassification

import piper_dynamo as piper


def model():
    """Random weights; nothing is downloaded."""
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )
    )


def inputs():
    """One replica's batch of images and classes."""
    return {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.randint(5, (8,))}


def strategy():
    """Stages by `piper.auto_stages`: about equal work, from the model and one batch."""
    regions = piper.auto_stages(model(), inputs(), 4)
    return piper.strategies.pipeline(
        "interleaved_1f1b",
        ranks=2,
        num_microbatches=4,
        replicas=2,
        zero=3,
        loss="loss",
        regions=regions,
    )


def train(steps=10):
    """The ordinary loop; runs on every rank."""
    torch.manual_seed(0)  # every rank starts from the same values
    step = piper.compile(model(), strategy(), example_inputs=inputs())
    optimizer = torch.optim.AdamW(piper.parameters(step), lr=1e-2, foreach=True)
    torch.manual_seed(1 + piper.data_rank(step))  # every replica has its own data
    batch, losses = inputs(), []
    for _ in range(steps):
        loss = step(**batch).loss
        loss.backward()
        piper.clip_grad_norm_(step, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = piper.launch(train, ranks=4)[0]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
