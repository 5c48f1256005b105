"""The tiny hybrid model in plain PyTorch.

This is the reference definition of the architecture: `train.py` trains it and
`make_golden.py` computes the golden values from it.  There is no KV cache here
on purpose; every call runs the whole sequence.

Parameter names equal the tensor names in `model.safetensors`.  Linear weights
are stored [out, in].
"""

import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent


def load_config(path=HERE / "config.json"):
    return json.loads(Path(path).read_text())


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x32 * self.weight.float()).to(x.dtype)


def rope_tables(seq_len, dim, theta):
    """cos and sin, each [seq_len, dim / 2], for positions 0 .. seq_len-1."""
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(seq_len, dtype=torch.float32)[:, None] * inv_freq[None, :]
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    """Half-split (NeoX) rotation over the whole last dimension of x [..., T, dim]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention_mask(seq_len, window):
    """Boolean [T, T], true where query p may see key j.  A window w means p-w+1 .. p."""
    pos = torch.arange(seq_len)
    mask = pos[None, :] <= pos[:, None]
    if window is not None:
        mask &= pos[None, :] > pos[:, None] - window
    return mask


def attend(q, k, v, window, scale):
    """q [B,H,T,Dk], k [B,H,T,Dk], v [B,H,T,Dv] -> [B,H,T,Dv]."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~attention_mask(q.shape[2], window), float("-inf"))
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)


class GqaAttention(nn.Module):
    """Grouped-query attention: `full_attention` and `sliding_window`."""

    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"])
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c["hidden_size"], bias=False)
        self.scale = self.dim ** -0.5

    def forward(self, x, ctx, window):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = apply_rope(q, *ctx["rope_gqa"]), apply_rope(k, *ctx["rope_gqa"])
        # Query head h reads KV head h // (heads / kv_heads).
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = ctx["attend"](q, k, v, window, self.scale)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class MlaAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2 form, no query LoRA):
    `mla_attention` and `sliding_window_mla`."""

    def __init__(self, c):
        super().__init__()
        self.heads = c["num_attention_heads"]
        self.nope, self.rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        self.rank, self.vdim = c["kv_lora_rank"], c["v_head_dim"]
        hidden = c["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, c["rms_norm_eps"])
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.vdim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.vdim, hidden, bias=False)
        self.scale = (self.nope + self.rope) ** -0.5

    def forward(self, x, ctx, window):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.nope + self.rope).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(b, t, self.heads, self.nope + self.vdim).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.vdim], dim=-1)
        q_rope = apply_rope(q_rope, *ctx["rope_mla"])
        # One rope key per token, shared by all heads.
        k_rope = apply_rope(k_rope[:, None], *ctx["rope_mla"]).expand(-1, self.heads, -1, -1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        out = ctx["attend"](q, k, v, window, self.scale)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        hidden, inter = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inter, bias=False)
        self.up_proj = nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, layer_type):
        super().__init__()
        sliding = layer_type in ("sliding_window", "sliding_window_mla")
        self.window = c["sliding_window"] if sliding else None
        mla = layer_type in ("mla_attention", "sliding_window_mla")
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = MlaAttention(c) if mla else GqaAttention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = Mlp(c)

    def forward(self, x, ctx):
        x = x + self.self_attn(self.input_layernorm(x), ctx, self.window)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, t) for t in c["layer_types"])
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class TinyHybrid(nn.Module):
    def __init__(self, c):
        super().__init__()
        assert len(c["layer_types"]) == c["num_hidden_layers"]
        self.c = c
        self.attend = attend  # train.py swaps in a faster form of the same function
        self.model = Body(c)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Smaller output projections keep the residual stream level at the start.
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.05 / (2 * c["num_hidden_layers"]) ** 0.5 if out else 0.05
                nn.init.normal_(p, std=std)

    def forward(self, ids):
        """ids [B, T] (int64) -> logits [B, T, vocab]."""
        c, t = self.c, ids.shape[1]
        ctx = {
            "attend": self.attend,
            "rope_gqa": rope_tables(t, c["head_dim"], c["rope_theta"]),
            "rope_mla": rope_tables(t, c["qk_rope_head_dim"], c["rope_theta"]),
        }
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, ctx)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def load_model(path=HERE / "model.safetensors", config=None):
    """The stored bf16 weights, widened to f32."""
    from safetensors.torch import load_file

    model = TinyHybrid(config or load_config())
    state = {name: t.float() for name, t in load_file(str(path)).items()}
    model.load_state_dict(state, strict=True)
    return model.eval()


@torch.no_grad()
def generate(model, prompt, max_new, temperature=0.0, generator=None, eos=0):
    """Continue a list of token ids; stops before `eos`. temperature 0 = greedy."""
    ids = list(prompt)
    for _ in range(max_new):
        logits = model(torch.tensor([ids]))[0, -1]
        if temperature > 0:
            probs = (logits / temperature).softmax(-1)
            nxt = int(torch.multinomial(probs, 1, generator=generator))
        else:
            nxt = int(logits.argmax())
        if nxt == eos:
            break
        ids.append(nxt)
    return ids[len(prompt):]
