"""Generate with a transformers model, once with its own attention and once with flashtile.

    pip install transformers
    python examples/transformers_generate.py

The model is made here, small and untrained: no download. Its prompts have different lengths, padded on the left, as generate
wants them. For a real model: AutoModelForCausalLM.from_pretrained(name, attn_implementation="ftile"). Exits with 1 if logits
differ by more than rounding.
"""

import argparse
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashtile.integrations import transformers as flashtile_transformers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=12, help="to generate")
    arguments = parser.parse_args()
    if not arguments.device.startswith("cpu") and not torch.cuda.is_available():
        parser.error(f"--device: expected cpu, got {arguments.device}; there is no GPU that torch can use")
    flashtile_transformers.register()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None)  # fmt: skip
    dtype = torch.bfloat16 if arguments.device.startswith("cuda") else torch.float32
    model = LlamaForCausalLM(config).to(arguments.device, dtype).eval()
    prompts = torch.randint(3, 256, (2, 24), device=arguments.device)
    mask = torch.ones_like(prompts)
    mask[1, :9] = 0
    tokens, logits = {}, {}
    for name in ("sdpa", flashtile_transformers.NAME):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(prompts, attention_mask=mask).logits[mask.bool()].float()
        tokens[name] = model.generate(prompts, attention_mask=mask, max_new_tokens=arguments.tokens, do_sample=False)
        print(f"{name:6} {tokens[name][0, 24:].tolist()}")
    ours, theirs = logits[flashtile_transformers.NAME], logits["sdpa"]
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    same = (tokens["sdpa"] == tokens[flashtile_transformers.NAME]).float().mean().item()
    print(f"largest difference of logits: {difference:.1e} of the largest; {same:.0%} of the tokens are the same")
    if not difference <= (3e-2 if dtype == torch.bfloat16 else 1e-5):
        return 1
    print("ok: the same logits up to rounding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
