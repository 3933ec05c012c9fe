"""Chat with a model that may be larger than GPU memory:  python examples/chat.py path/to/model"""

import sys
import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from roundpipe import wrap_model_to_roundpipe


def tiny_model(folder: str) -> str:
    """Save a tiny random model and tokenizer to `folder`, for a run without a path. Its replies make no sense."""
    words = {word: i for i, word in enumerate(["<unk>", "hello", "how", "are", "you", "fine", "thanks"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=32, num_hidden_layers=2)).save_pretrained(folder)
    return folder


def main(path: str, lines: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = wrap_model_to_roundpipe(AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval())
    for line in lines or iter(lambda: input("> "), ""):
        tokens = tokenizer(line, return_tensors="pt")["input_ids"]
        reply = model.generate(tokens, max_new_tokens=200 if not lines else 8)[0, tokens.shape[1] :]
        print(tokenizer.decode(reply, skip_special_tokens=True))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*((sys.argv[1], []) if len(sys.argv) > 1 else (tiny_model(folder), ["hello how are you"])))
