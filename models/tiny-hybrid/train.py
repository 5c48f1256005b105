"""Trains the tiny hybrid model on text from `generate_text.py`.

    python train.py            # writes model.safetensors next to this file

Every seed is fixed and one CPU thread is used, so the same PyTorch build on the
same kind of CPU gives the same weights.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from generate_text import stories
from model import TinyHybrid, generate, load_config, load_model

HERE = Path(__file__).resolve().parent
MODEL_SEED, TRAIN_SEED, HELD_OUT_SEED = 20, 1, 2
SEQ, BATCH = 448, 7
PROMPTS = ["", "Once upon a time", "The little fox", "In the morning", "Mia and Tom went to"]


def fast_attend(q, k, v, window, scale, chunk=128):
    """`model.attend` with the work outside the causal band or the window left out."""
    b, h, t, dk = q.shape
    with torch.autocast("cpu", enabled=False):
        dtype = v.dtype
        q, k = q.to(dtype) * scale, k.to(dtype)
        if window is None:
            outs = []
            for s in range(0, t, chunk):
                e = min(s + chunk, t)
                scores = torch.matmul(q[:, :, s:e], k[:, :, :e].transpose(-1, -2))
                hidden = torch.ones(e - s, e, dtype=torch.bool).triu(s + 1)
                scores = scores.masked_fill(hidden, float("-inf"))
                outs.append(torch.matmul(scores.softmax(-1), v[:, :, :e]))
            return torch.cat(outs, dim=2)
        w, dv = window, v.shape[-1]
        n = -(-t // w)
        pad = n * w - t
        # Block i of the queries sees block i-1 and block i of the keys.
        q = F.pad(q, (0, 0, 0, pad)).view(b, h, n, w, dk)
        k = F.pad(k, (0, 0, w, pad)).view(b, h, n + 1, w, dk)
        v = F.pad(v, (0, 0, w, pad)).view(b, h, n + 1, w, dv)
        k = torch.cat((k[:, :, :-1], k[:, :, 1:]), dim=3)
        v = torch.cat((v[:, :, :-1], v[:, :, 1:]), dim=3)
        qi, ki = torch.arange(w)[:, None] + w, torch.arange(2 * w)[None, :]
        hidden = ((ki > qi) | (ki <= qi - w)).expand(n, w, 2 * w).clone()
        hidden[0, :, :w] = True
        scores = torch.matmul(q, k.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
        out = torch.matmul(scores.softmax(-1), v)
        return out.reshape(b, h, n * w, dv)[:, :, :t]


class Text:
    """Packs stories into rows: byte 0, story, byte 0, story, ...

    Every second row starts at the start of a story, as a prompt will; the other
    rows carry on where the last one of them was cut, so that endings are seen.
    """

    def __init__(self, seed):
        self.stream = stories(seed)
        self.rest = b""

    def row(self, fresh, size):
        data = b"" if fresh else self.rest
        while len(data) < size:
            data += b"\0" + next(self.stream).encode("ascii")
        if not fresh:
            self.rest = data[size - 1:]
        return list(data[:size])

    def batch(self):
        rows = torch.tensor([self.row(i % 2 == 0, SEQ + 1) for i in range(BATCH)])
        return rows[:, :-1], rows[:, 1:]


def loss_of(model, x, y):
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


@torch.no_grad()
def held_out_loss(model, batches=20):
    text = Text(HELD_OUT_SEED)
    return sum(loss_of(model, *text.batch()).item() for _ in range(batches)) / batches


def show(model, temperature):
    g = torch.Generator().manual_seed(7)
    for p in PROMPTS:
        out = generate(model, [0, *p.encode()], 300, temperature, g)
        print(f"  [{temperature}] {p}|{bytes(out).decode('latin-1')}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=2200)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--out", type=Path, default=HERE / "model.safetensors")
    args = ap.parse_args()

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(MODEL_SEED)

    model = TinyHybrid(load_config())
    model.attend = fast_attend
    decay = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05},
                             {"params": plain, "weight_decay": 0.0}],
                            lr=args.lr, betas=(0.9, 0.97))
    warmup = 100
    text, start, mean = Text(TRAIN_SEED), time.time(), None
    for step in range(args.steps):
        done = max(0.0, (step - warmup) / max(1, args.steps - warmup))
        lr = args.lr * min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in opt.param_groups:
            group["lr"] = lr
        x, y = text.batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, x, y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 49 or step == 0:
            spent = time.time() - start
            print(f"step {step + 1} loss {mean:.4f} lr {lr:.2e} "
                  f"{(step + 1) * SEQ * BATCH / spent:.0f} tokens/s {spent / 60:.1f} min", flush=True)
        if step % 500 == 499 and step + 1 < args.steps:
            g = torch.Generator().manual_seed(step)
            out = generate(model, [0, *b"Once upon a time"], 200, 0.7, g)
            print("  Once upon a time|" + bytes(out).decode("latin-1"), flush=True)

    minutes = (time.time() - start) / 60
    state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(state, str(args.out), metadata={"format": "pt"})
    stored = load_model(args.out)  # as stored: rounded to bf16, computed in f32
    print(json.dumps({"steps": args.steps, "train_loss": round(mean, 4),
                      "held_out_loss": round(held_out_loss(stored), 4),
                      "minutes": round(minutes, 1), "bytes": args.out.stat().st_size}), flush=True)
    show(stored, 0.0)
    show(stored, 0.7)


if __name__ == "__main__":
    main()
