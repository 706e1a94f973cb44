"""Greedy decoding under kvpress' DecodingPress, run by a Python that has kvpress: reads a JSON request, prints a JSON answer.

kvpress pins an older transformers, so it cannot share an environment with this project. The model is the folder of safetensors that
``load_model("smollm2-135m")`` leaves in the cache, so both sides compute with the same weights.
"""

import importlib
import importlib.metadata
import json
import sys
import time


def main() -> None:
    """stdin: folder, ids, new_tokens, interval, keep, repeat. stdout: tokens, seconds (one per repetition), slots at the end."""
    request = json.load(sys.stdin)
    import torch
    import transformers

    kvpress = importlib.import_module("kvpress")
    torch.set_num_threads(request["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(request["folder"], dtype=torch.float32).eval()
    ids = torch.tensor([request["ids"]])
    seconds = []
    for _ in range(request["repeat"] + 1):
        press = kvpress.DecodingPress(
            base_press=kvpress.KeyDiffPress(), compression_interval=request["interval"], target_size=request["keep"], hidden_states_buffer_size=0
        )
        cache = transformers.DynamicCache()
        begin = time.perf_counter()
        with torch.inference_mode(), press(model):
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=request["new_tokens"], do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )
        seconds.append(time.perf_counter() - begin)
    answer = {"tokens": out[0, ids.shape[1] :].tolist(), "seconds": seconds[1:], "slots": cache.layers[0].keys.shape[2]}
    print(json.dumps(answer | {"versions": {"kvpress": importlib.metadata.version("kvpress"), "transformers": transformers.__version__}}))


if __name__ == "__main__":
    main()
