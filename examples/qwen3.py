"""A Qwen3 of transformers, untouched: four stages on two ranks in a V, split backwards, ZeRO-1."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import piper_dynamo as piper


def model():
    """Random weights; nothing is downloaded."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
        )
    )


def inputs():
    """One replica's batch; the mask leaves out what pads the second half of the rows."""
    tokens = torch.randint(64, (8, 12))
    mask = torch.ones_like(tokens)
    mask[::2, 9:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels, "use_cache": False}


def strategy():
    """A layer per stage; stages 0 and 3 on rank 0, stages 1 and 2 on rank 1."""
    return piper.strategies.pipeline(
        "zbv",
        ranks=2,
        num_microbatches=4,
        replicas=2,
        zero=1,
        loss="loss",
        regions={
            "model.embed_tokens": {"PP": 0},
            "model.rotary_emb": {"PP": 0},
            **{f"model.layers.{stage}": {"PP": stage} for stage in range(4)},
            "model.norm": {"PP": 3},
            "lm_head": {"PP": 3},
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
