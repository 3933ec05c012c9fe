"""LoRA on a transformers model: base weights are frozen in host memory; only the adapter is trained and saved."""

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe import RoundPipeRunConfig, optim, wrap_model_to_roundpipe

NUM_STEP = 20


def build() -> LlamaForCausalLM:
    """The model to fine-tune: a small random one here, normally AutoModelForCausalLM.from_pretrained(...)."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4))


def batch(step: int) -> dict[str, torch.Tensor]:
    """Sequences that count upwards, padded to one length; padding has no label."""
    generator = torch.Generator().manual_seed(step)
    ids = (torch.randint(64, (8, 1), generator=generator) + torch.arange(16)) % 64
    lengths = torch.randint(4, 17, (8, 1), generator=generator)
    mask = (torch.arange(16) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main() -> None:
    network = get_peft_model(build(), LoraConfig(r=8, target_modules="all-linear"))
    config = RoundPipeRunConfig(num_microbatch=4)
    with wrap_model_to_roundpipe(network, model_run_config=config) as model, tempfile.TemporaryDirectory() as folder:
        optimizer = optim.AdamW(model.optim_parameters(), lr=1e-2)

        def step_fn() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for step in range(NUM_STEP):
            loss = model.forward_backward(input_kwargs=batch(step))  # the mean over all labels of the batch
            model.step(step_fn, is_async=False)
            if step % 5 == 4:
                print(f"step {step:3}  loss {loss.item():.4f}")
        model.save_pretrained(folder)
        restored = PeftModel.from_pretrained(build(), folder)
        with torch.no_grad():
            model.eval()
            same = torch.allclose(model(**batch(0)).logits, restored.eval()(**batch(0)).logits, atol=1e-4)
        print("the saved adapter gives the same logits:", same)
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
