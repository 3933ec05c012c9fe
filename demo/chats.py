"""What the demo trains on: chats about the crew of a small ship, a tokenizer for them, and a tiny Llama.

Everything is made on the spot from seeds; nothing is downloaded.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

Chat = list[dict[str, str]]  # messages with `role` and `content`

FACTS = {
    "job": {
        "Marrow": "captain", "Pell": "pilot", "Oster": "cook", "Tansy": "carpenter", "Quill": "doctor",
        "Bram": "fisher",
    },
    "home": {
        "Marrow": "the lighthouse", "Pell": "Low Harbour", "Oster": "the blue mill", "Tansy": "Goat Island",
        "Quill": "the old tower", "Bram": "the salt hut",
    },
    "food": {
        "Marrow": "onion soup", "Pell": "oranges", "Oster": "black bread", "Tansy": "honey cake", "Quill": "lemon tea",
        "Bram": "smoked eel",
    },
    "instrument": {
        "Marrow": "the drum", "Pell": "the piano", "Oster": "the flute", "Tansy": "the fiddle", "Quill": "the harp",
        "Bram": "the bagpipe",
    },
}  # fmt: skip
QUESTIONS = {
    "job": ["What is the job of {name}?", "What does {name} do on the ship?", "Which job has {name}?"],
    "home": ["Where does {name} live?", "Where is {name} at home?", "Which place is the home of {name}?"],
    "food": [
        "What does {name} like to eat?",
        "What is the favourite food of {name}?",
        "What shall we cook for {name}?",
    ],
    "instrument": ["Which instrument does {name} play?", "What does {name} play?", "What music does {name} make?"],
}
ANSWERS = {
    "job": "{name} is the {value}.",
    "home": "{name} lives in {value}.",
    "food": "{name} likes {value} best.",
    "instrument": "{name} plays {value}.",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
SEED = 7


def training_and_held_out_pairs() -> tuple[list[Chat], list[Chat]]:
    """Each fact with each of its questions. One question of each fact is held out; training has the other ones."""
    training, held_out = [], []
    for topic, values in FACTS.items():
        for person, (name, value) in enumerate(values.items()):
            for number, question in enumerate(QUESTIONS[topic]):
                pair = [
                    {"role": "user", "content": question.format(name=name)},
                    {"role": "assistant", "content": ANSWERS[topic].format(name=name, value=value)},
                ]
                (held_out if number == person % len(QUESTIONS[topic]) else training).append(pair)
    return training, held_out


def write_chats(file: Path, pairs: list[Chat], num_chat: int) -> None:
    """Write a JSONL file of chats; each one is one to three random pairs of a question and its answer."""
    generator = random.Random(SEED)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(num_chat):
            chat = [message for pair in generator.sample(pairs, generator.randint(1, 3)) for message in pair]
            lines.write(json.dumps({"messages": chat}) + "\n")


def read_chats(file: Path) -> list[Chat]:
    return [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]


def new_tokenizer(pairs: list[Chat]) -> Any:
    """A byte-level BPE tokenizer, trained on the chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((message["content"] for pair in pairs for message in pair), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def save_model(folder: Path, pairs: list[Chat]) -> int:
    """Save a tokenizer and a Llama with random weights; return the number of its parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    tokenizer = new_tokenizer(pairs)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    set_seed(SEED)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The answer of a model to one question, the most likely token at each place."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=24)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
