"""LoRA by peft on a Llama of transformers: the base is frozen, the adapters are trained."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import piper_dynamo as piper


def model():
    """Random weights; nothing is downloaded."""
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return get_peft_model(base, adapters)


def inputs():
    """One replica's batch: tokens, which are their own targets."""
    tokens = torch.randint(64, (8, 12))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def strategy():
    """As for the base; `parameters` gives the adapters alone to the optimizer."""
    inside = "base_model.model."  # what peft wraps the model in
    return piper.strategies.pipeline(
        "one_f_one_b",
        ranks=2,
        num_microbatches=2,
        replicas=2,
        zero=3,
        loss="loss",
        regions={
            f"{inside}model.embed_tokens": {"PP": 0},
            f"{inside}model.rotary_emb": {"PP": 0},
            f"{inside}model.layers.[01]": {"PP": 0},
            f"{inside}model.layers.[23]": {"PP": 1},
            f"{inside}model.norm": {"PP": 1},
            f"{inside}lm_head": {"PP": 1},
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
