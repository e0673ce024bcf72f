"""A CLIP of transformers, untouched: its two towers on two ranks, at the same time."""

import torch
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

import piper_dynamo as piper

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 16,
}


def model():
    """Random weights; nothing is downloaded."""
    text = CLIPTextConfig(
        **SIZES, vocab_size=64, max_position_embeddings=12, eos_token_id=63, pad_token_id=0
    )
    vision = CLIPVisionConfig(**SIZES, image_size=16, patch_size=4)
    return CLIPModel(
        CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    )


def inputs():
    """One replica's batch of images and texts; the loss compares all pairs of a microbatch."""
    tokens = torch.randint(1, 63, (8, 12))
    tokens[:, -1] = 63  # the end of the text, where its embedding is read
    return {"input_ids": tokens, "pixel_values": torch.randn(8, 3, 16, 16), "return_loss": True}


def strategy():
    """Neither tower waits for the other: only their embeddings meet, on rank 2's stage."""
    return piper.Strategy(
        piper.Split({}, dim="MB", num_microbatches=2),
        piper.Place({"PP": 0}, devices=[0, 1]),
        piper.Place({"PP": 1}, devices=[2, 3]),
        piper.Place({"PP": 2}, devices=[2, 3]),
        piper.Replicate({"PP": "*"}, zero=3),
        loss="loss",
        regions={
            "": {"PP": 2},
            "vision_model": {"PP": 0},
            "visual_projection": {"PP": 0},
            "text_model": {"PP": 1},
            "text_projection": {"PP": 1},
        },
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
