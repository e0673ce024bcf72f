"""A Llama of transformers, untouched: two pipeline ranks by two replicas, ZeRO-3."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import piper_dynamo as piper


def model():
    """Random weights; nothing is downloaded."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def inputs():
    """One replica's batch: tokens, which are their own targets."""
    tokens = torch.randint(64, (8, 12))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def strategy():
    """The embedding and the first layers on one pipeline rank, the rest on the other."""
    return piper.strategies.pipeline(
        "one_f_one_b",
        ranks=2,
        num_microbatches=2,
        replicas=2,
        zero=3,
        loss="loss",
        regions={
            "model.embed_tokens": {"PP": 0},
            "model.rotary_emb": {"PP": 0},
            "model.layers.[01]": {"PP": 0},
            "model.layers.[23]": {"PP": 1},
            "model.norm": {"PP": 1},
            "lm_head": {"PP": 1},
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
