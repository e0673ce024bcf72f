"""A GPT-2 of transformers, untouched: its head is tied to the embedding; ZeRO-2."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import piper_dynamo as piper


def model():
    """Random weights; nothing is downloaded. Dropout is on, as GPT-2 has it."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=4, n_head=4)
    )


def inputs():
    """One replica's batch: tokens, which are their own targets."""
    tokens = torch.randint(64, (8, 12))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def strategy():
    """`wte` is used on both pipeline ranks, which hold a copy each and sum its gradients."""
    return piper.strategies.pipeline(
        "zb_h1",
        ranks=2,
        num_microbatches=2,
        replicas=2,
        zero=2,
        loss="loss",
        regions={
            "transformer.wte": {"PP": 0},
            "transformer.wpe": {"PP": 0},
            "transformer.h.[01]": {"PP": 0},
            "transformer.h.[23]": {"PP": 1},
            "transformer.ln_f": {"PP": 1},
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
