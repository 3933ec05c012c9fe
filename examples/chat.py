"""Chat with a model that may be larger than GPU memory.

python examples/chat.py --model path/to/model
python examples/chat.py --tiny
"""

import argparse
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from roundpipe import wrap_model_to_roundpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder with a model and a tokenizer that has a chat template")
parser.add_argument("--max-new-tokens", type=int, default=200)
parser.add_argument("--tiny", action="store_true", help="use a tiny random model; its reply makes no sense")
args = parser.parse_args()
if not args.tiny and not args.model:
    parser.error("give --model or --tiny")
lines = iter(lambda: input("> "), "")  # an empty line ends the chat
if args.tiny:
    import tiny

    folder = tempfile.TemporaryDirectory()
    tiny.causal_lm(Path(folder.name), "text.txt")
    args.model, args.max_new_tokens, lines = folder.name, 8, ["1 2 3 4"]

tokenizer = AutoTokenizer.from_pretrained(args.model)
network = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval().requires_grad_(False)
messages = []
with wrap_model_to_roundpipe(network) as model:
    for line in lines:
        messages.append({"role": "user", "content": line})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        # All weights are uploaded for every token, so this is for samples, not for serving.
        tokens = model.generate(**inputs, max_new_tokens=args.max_new_tokens)[0]
        reply = tokens[inputs["input_ids"].shape[1] :]
        messages.append({"role": "assistant", "content": tokenizer.decode(reply, skip_special_tokens=True)})
        print(messages[-1]["content"])
