"""Runs stock transformers without kvfold: `python run_transformers.py REQUEST.json ANSWER.npz`.

Its log-probabilities are those after the tokens that an engine has chosen (`forced`), or after its own.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def main() -> None:
    sys.modules["kvfold"] = None  # whatever is installed: a reader has no kvfold
    request = json.loads(Path(sys.argv[1]).read_text())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    wrong = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[kind]]
    if wrong:
        sys.exit(f"{request['model']} does not load whole in transformers: {wrong[:3]}")
    model.eval()
    prompt, new_tokens = torch.tensor([request["prompt"]]), request["new_tokens"]
    greedy = model.generate(
        prompt, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens, return_dict_in_generate=True
    )
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in greedy.past_key_values.layers)
    held = len(greedy.past_key_values.layers) * greedy.past_key_values.get_seq_length()
    chosen = torch.tensor([request["prompt"] + request["forced"]]) if "forced" in request else greedy.sequences
    with torch.no_grad():
        scores = model(chosen).logits[0, :-1].double().log_softmax(-1).numpy()  # [positions, vocabulary]
    asked = prompt.shape[1] - 1  # the last position of the prompt predicts the first new token
    np.savez(
        sys.argv[2],
        version=f"transformers {transformers.__version__}",
        tokens=greedy.sequences[0, prompt.shape[1] :].numpy(),
        prompt=scores[:asked],
        decode=scores[asked:],
        cached=cached / held,
    )


if __name__ == "__main__":
    main()
