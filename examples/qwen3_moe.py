"""A Qwen3-MoE of transformers, untouched: experts split over ranks by its own hook."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import piper_dynamo as piper


def experts(self, hidden, index, weights):
    """What `Qwen3MoeExperts` computes, in Piper's vocabulary."""
    rows, routing = piper.moe.dispatch(hidden, index, self.num_experts)
    with piper.annotate("EP"):
        gate_up = piper.moe.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), routing)
        rows = self._apply_gate(gate_up)
        rows = piper.moe.grouped_mm(rows, self.down_proj.transpose(1, 2), routing)
    return piper.moe.combine(rows, routing, weights)


ALL_EXPERTS_FUNCTIONS.register("piper", experts)


def model():
    """Random weights; nothing is downloaded."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=32,
            moe_intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            experts_implementation="piper",
        )
    )


def inputs():
    """One replica's batch: tokens, which are their own targets."""
    tokens = torch.randint(64, (8, 12))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def strategy():
    """Two pipeline ranks by two replicas, which share the experts: two of four on each rank."""
    return piper.strategies.pipeline(
        "one_f_one_b",
        ranks=2,
        num_microbatches=2,
        replicas=2,
        zero=3,
        expert_ranks=2,
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
