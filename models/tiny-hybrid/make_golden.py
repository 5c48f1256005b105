"""Writes golden.safetensors from the stored model.

    python make_golden.py

For each prompt i: `prompt_i` (i32 [T], starts with BOS 0), `logits_i`
(f32 [T, 256], teacher-forced on the prompt: row p predicts token p+1) and
`greedy_i` (i32, up to 64 tokens after the prompt; it ends before a byte 0, which
is not stored).  Weights are the bf16 values of the file, all arithmetic is f32.

`margin_i` (f32, one per greedy step, plus one for the byte 0 if that ended it)
is the gap between the best and the second logit, so that a test can tell a near
tie from an error.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from generate_text import stories
from model import load_model

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 64


def long_prompt():
    """The first 219 bytes of a story from a seed not used in training."""
    return next(s for s in stories(3) if len(s) > 500)[:219]


def main():
    torch.set_num_threads(1)
    model = load_model()
    prompts = ["Once upon a time", long_prompt(), "Mia and Tom went to", "The little fox"]
    out = {}
    for i, text in enumerate(prompts):
        ids = [0, *text.encode("ascii")]
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0]
            seq, greedy, margins = list(ids), [], []
            while len(greedy) < NEW_TOKENS:
                top = model(torch.tensor([seq]))[0, -1].topk(2)
                margins.append(float(top.values[0] - top.values[1]))
                nxt = int(top.indices[0])
                if nxt == 0:
                    break
                greedy.append(nxt)
                seq.append(nxt)
        out[f"prompt_{i}"] = torch.tensor(ids, dtype=torch.int32)
        out[f"logits_{i}"] = logits.contiguous()
        out[f"greedy_{i}"] = torch.tensor(greedy, dtype=torch.int32)
        out[f"margin_{i}"] = torch.tensor(margins, dtype=torch.float32)
        print(f"{i}: {len(ids)} tokens, smallest margin {min(margins):.4f}\n"
              f"   {text}|{bytes(greedy).decode('latin-1')}")
    save_file(out, str(HERE / "golden.safetensors"))
    print((HERE / "golden.safetensors").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
