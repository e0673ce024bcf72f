"""A T5 of transformers, untouched: the encoder on one rank, the decoder on the next."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

import piper_dynamo as piper


def model():
    """Random weights; nothing is downloaded."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def inputs():
    """One replica's batch: sources of 12 tokens, targets of 7."""
    source, target = torch.randint(64, (8, 12)), torch.randint(64, (8, 7))
    return {"input_ids": source, "labels": target, "use_cache": False}


def strategy():
    """Encoder, decoder and head share the embedding; all decoder layers read the encoder."""
    return piper.strategies.pipeline(
        "one_f_one_b",
        ranks=2,
        num_microbatches=2,
        replicas=2,
        zero=1,
        loss="loss",
        regions={"encoder": {"PP": 0}, "decoder": {"PP": 1}, "lm_head": {"PP": 1}},
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
