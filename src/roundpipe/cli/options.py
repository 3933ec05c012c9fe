"""The options of `roundpipe train`: one table with all that the command knows about each of them.

`Option` in `cli/option_kinds` describes the columns. An option is added, changed or removed here; `cli/arguments`
reads, checks and hands on values by this table, and `cli/train` decides by it what a resumed run and other machines may
change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from roundpipe.cli.methods import METHODS
from roundpipe.cli.option_fields import FIELDS
from roundpipe.cli.option_kinds import BOOL, NOT_NEGATIVE, POSITIVE, SEED, SHARE, OnResume, Option, Receiver
from roundpipe.cli.shapes import SHAPES
from roundpipe.store.forms import MOMENTS
from roundpipe.store.values import MASTER_BITS

_DTYPES = ("float32", "bfloat16", "float16")
_SEVERAL: Any = {"nargs": "+", "action": "extend"}  # values after one option, or after several ones of the same name
_FLAG: Any = {"action": "store_true"}


def option(name: str, *, full: bool = False) -> str:
    """How users write the option of a setting; other fields of the trainer's arguments have their name alone."""
    return (OPTIONS.get(name) or Option(name=name)).written(full=full)


def _under(heading: str, *options: Option) -> Iterator[Option]:
    for each in options:
        yield dataclasses.replace(each, heading=heading)


_THE_RUN = _under(
    "the run",
    Option(
        name="model",
        reading={"metavar": "DIR_OR_NAME"},
        help="folder or hub name of the model and its tokenizer",
        receiver=Receiver.COMMAND,
        is_needed=True,
        is_path=True,
        may_differ=True,
        elsewhere={"model-name-or-path model-name base-model": "give --model DIR_OR_NAME"},
    ),
    Option(
        name="data",
        reading={**_SEVERAL, "metavar": "FILE_OR_DIR"},
        help="files (JSON, parquet, csv, arrow, txt), folders, datasets of the hub; joined, or weighed by PATH=0.7",
        receiver=Receiver.COMMAND,
        is_needed=True,
        is_path=True,
        may_differ=True,
        elsewhere={
            "dataset datasets dataset-name dataset-dir data-path train-file": "give a file, a folder or a dataset of "
            "the hub: --data chats.jsonl, or --data owner/name:train",
            "interleave-probs mix-strategy dataset-weights": "give weights: --data a.jsonl=0.7 b.jsonl=0.3",
            "max-samples": "make a file of the rows that you want: head -n 1000 data.jsonl > part.jsonl",
        },
    ),
    Option(
        name="method",
        reading={"choices": tuple(METHODS)},
        help="training method",
        default="sft",
        receiver=Receiver.COMMAND,
        elsewhere={"stage rl loss": f"give --method, one of {', '.join(METHODS)}"},
    ),
    Option(
        name="reward",
        reading={**_SEVERAL, "metavar": "FILE.py:FUNCTION"},
        help="functions that reward answers, for --method grpo",
        default=(),
        receiver=Receiver.COMMAND,
        may_differ=True,
        elsewhere={"reward-funcs reward-func reward-function": "give --reward rewards.py:accuracy"},
    ),
    Option(
        name="output_dir",
        short="out",
        reading={"metavar": "DIR"},
        help="folder for checkpoints, metrics, report and the final model",
        is_needed=True,
        is_path=True,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
        elsewhere={"save-path save-model": "the final model is always saved, into --out"},
    ),
    Option(
        name="config",
        reading={"metavar": "FILE"},
        help="YAML file with the same names; the command line wins",
        receiver=Receiver.COMMAND,
    ),
    Option(
        name="lora",
        reading={"type": int, "metavar": "R"},
        help="train a LoRA adapter of rank R",
        receiver=Receiver.COMMAND,
        bounds=POSITIVE,
        elsewhere={
            "lora-r lora-rank r": "give --lora R",
            "use-peft finetuning-type": "give --lora R for an adapter of rank R; without it, all weights train",
        },
    ),
    Option(
        name="adapter",
        reading={"metavar": "DIR"},
        help="train this LoRA adapter further; --model is then the adapter's model",
        receiver=Receiver.COMMAND,
        is_path=True,
        excludes="lora",
        may_differ=True,
        elsewhere={"adapter-name-or-path lora-model-dir": "give --adapter DIR to train an adapter further"},
    ),
    Option(
        name="full",
        reading=_FLAG,
        help="train all weights",
        default_text="default",
        receiver=Receiver.COMMAND,
        excludes="lora",
        on_resume=OnResume.ACCEPT,
    ),
    Option(
        name="init",
        reading=_FLAG,
        help="random weights from the model's config, seeded by --seed",
        default=False,
        receiver=Receiver.COMMAND,
    ),
    Option(
        name="resume",
        reading={"nargs": "?", "const": "", "metavar": "DIR"},
        help="go on from a checkpoint; default: newest; auto: if any",
        receiver=Receiver.COMMAND,
        is_path=True,
        may_differ=True,
        on_resume=OnResume.NOT_KEPT,
        elsewhere={"overwrite-output-dir": "a run never replaces another one; give another --out, or --resume"},
    ),
    Option(
        name="dry_run",
        reading=_FLAG,
        help="check all settings, data, memory and disk; train nothing",
        default=False,
        receiver=Receiver.COMMAND,
        on_resume=OnResume.NOT_KEPT,
    ),
)
_DATA = _under(
    "data",
    Option(
        name="max_length",
        short="seq_len",
        reading={"type": int},
        help="tokens of the longest sequence",
        default=1024,
        bounds=POSITIVE,
        elsewhere={
            "max-seq-length max-seq-len cutoff-len sequence-len block-size max-prompt-length": "give --seq-len TOKENS"
        },
    ),
    Option(
        name="truncate",
        reading=_FLAG,
        help="cut longer rows; without it they are refused",
        default=False,
        receiver=Receiver.COMMAND,
    ),
    Option(
        name="streaming",
        reading=_FLAG,
        help="read and tokenize rows as they are needed, for data larger than memory",
        default=False,
        receiver=Receiver.COMMAND,
        needs="max_steps",
        elsewhere={"dataset-streaming": "give --streaming and --steps N"},
    ),
    Option(
        name="shuffle_buffer",
        reading={"type": int, "metavar": "ROWS"},
        help="with --streaming: rows that are shuffled together; 0 for the order of the files",
        default=10_000,
        receiver=Receiver.COMMAND,
        bounds=NOT_NEGATIVE,
        needs="streaming",
        elsewhere={"buffer-size streaming-buffer-size": "give --shuffle-buffer ROWS"},
    ),
    Option(
        name="form",
        short="format",
        reading={"choices": tuple(SHAPES), "metavar": "FORM"},
        help="form of the rows",
        default_text="recognized by their keys",
        receiver=Receiver.COMMAND,
        elsewhere={"formatting dataset-type": f"give --format, one of {', '.join(SHAPES)}"},
    ),
    Option(
        name="text_rows",
        reading={"choices": ("line", "paragraph", "document")},
        help="rows of a .txt file",
        default="line",
        receiver=Receiver.COMMAND,
    ),
    Option(
        name="chat_template_path",
        reading={"metavar": "FILE"},
        help="Jinja file with a chat template",
        default_text="of the tokenizer",
        elsewhere={
            "template chat-template": "the tokenizer has the chat template, or give --chat-template-path FILE.jinja"
        },
    ),
    Option(
        name="eos_token",
        reading={"metavar": "TOKEN"},
        help="token that ends a sequence",
        default_text="of the tokenizer",
    ),
    Option(
        name="eval_data",
        reading={**_SEVERAL, "metavar": "FILE_OR_DIR"},
        help="data for evaluation",
        default=(),
        receiver=Receiver.COMMAND,
        is_path=True,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
        elsewhere={
            "eval-dataset test-datasets validation-file": "give --eval-data FILE_OR_DIR",
        },
    ),
    Option(
        name="eval_split",
        reading={"type": float, "metavar": "SHARE"},
        help="rows of --data to evaluate instead of training them: a share below 1, or their number",
        receiver=Receiver.COMMAND,
        bounds=POSITIVE,
        excludes="eval_data",
        elsewhere={
            "val-size val-set-size validation-split-percentage test-size": "give --eval-split SHARE, such as 0.02",
        },
    ),
)
_STEPS = _under(
    "steps",
    Option(
        name="per_device_train_batch_size",
        short="batch",
        reading={"type": int},
        help="sequences per optimizer step",
        default=8,
        bounds=POSITIVE,
        elsewhere={
            "batch-size train-batch-size": "give --batch, the number of sequences per step",
            "micro-batch-size": "give --batch, the number of sequences per step; --num-microbatch divides it",
        },
    ),
    Option(
        name="num_train_epochs",
        short="epochs",
        reading={"type": float},
        help="passes over the data",
        default=1.0,
        bounds=POSITIVE,
        elsewhere={"num-epochs": "give --epochs"},
    ),
    Option(
        name="max_steps",
        short="steps",
        reading={"type": int, "metavar": "N"},
        help="optimizer steps, instead of --epochs",
        bounds=POSITIVE,
        excludes="num_train_epochs",
    ),
    Option(
        name="learning_rate",
        short="lr",
        reading={"type": float},
        help="learning rate",
        default_text="of the method",
        bounds=POSITIVE,
        on_resume=OnResume.NO_EFFECT,
    ),
    Option(
        name="lr_scheduler_type",
        short="schedule",
        help="learning-rate schedule",
        default="cosine",
        elsewhere={"lr-scheduler": "give --schedule"},
    ),
    Option(
        name="warmup_steps",
        short="warmup",
        reading={"type": float},
        help="warm-up steps, or a share of all steps below 1",
        default=0.03,
        bounds=NOT_NEGATIVE,
        elsewhere={"warmup-ratio": "give --warmup; below 1 it is a share of all steps"},
    ),
    Option(
        name="eval_steps",
        short="eval_every",
        reading={"type": int},
        help="steps between evaluations",
        default_text="once per epoch",
        bounds=POSITIVE,
        on_resume=OnResume.ACCEPT,
        elsewhere={"evals-per-epoch": "give --eval-every STEPS"},
    ),
    Option(
        name="early_stopping",
        reading={"type": int, "metavar": "N"},
        help="end after N evaluations without a lower loss; the final model is the best one",
        receiver=Receiver.COMMAND,
        bounds=POSITIVE,
        excludes="save_steps",
        on_resume=OnResume.ACCEPT,
        elsewhere={"early-stopping-patience early-stopping-steps": "give --early-stopping N"},
    ),
    Option(
        name="save_steps",
        short="save_every",
        reading={"type": int},
        help="steps between checkpoints",
        default=200,
        bounds=POSITIVE,
        on_resume=OnResume.ACCEPT,
        elsewhere={"saves-per-epoch": "give --save-every STEPS"},
    ),
    Option(
        name="save_total_limit",
        short="keep",
        reading={"type": int},
        help="number of checkpoints to keep",
        default=3,
        bounds=POSITIVE,
        on_resume=OnResume.ACCEPT,
    ),
    Option(
        name="seed",
        reading={"type": int},
        help="seed of data order, dropout and --init",
        default=42,
        bounds=SEED,
        elsewhere={"random-state": "give --seed"},
    ),
    Option(
        name="exact",
        reading=_FLAG,
        help="each step uses the previous update",
        default_text="default",
        receiver=Receiver.COMMAND,
        on_resume=OnResume.ACCEPT,
    ),
    Option(
        name="stale",
        reading=_FLAG,
        help="each step uses the update before the previous one; faster",
        default=False,
        receiver=Receiver.COMMAND,
        excludes="exact",
    ),
    Option(
        name="compile",
        reading=_FLAG,
        help="compile layers with torch.compile, once for all of a kind",
        default=False,
        receiver=Receiver.ROUNDPIPE,
    ),
)
_LORA = _under(
    "LoRA",
    Option(
        name="lora_alpha",
        reading={"type": float},
        help="scale of the adapter",
        default_text="2 R",
        receiver=Receiver.COMMAND,
        bounds=POSITIVE,
        needs="lora",
    ),
    Option(
        name="lora_dropout",
        reading={"type": float},
        help="dropout of the adapter's input",
        default=0.0,
        receiver=Receiver.COMMAND,
        bounds=SHARE,
        needs="lora",
    ),
    Option(
        name="lora_target_modules",
        reading={**_SEVERAL, "metavar": "NAME"},
        help="modules",
        default="all-linear",
        default_text="all linear layers of blocks",
        receiver=Receiver.COMMAND,
        needs="lora",
        elsewhere={"lora-target lora-target-linear": "give --lora R; --lora-target-modules NAME chooses modules"},
    ),
)
_DEVICES = _under(
    "devices and memory",
    Option(
        name="frozen_weights",
        reading={"choices": ("nf4", "int8", "fp8")},
        help="keep the weights beside the adapter in 4 or 8 bits",
        default_text="in --dtype",
        receiver=Receiver.ROUNDPIPE,
        elsewhere={
            "quantization-bit quantization-method quantization bnb-4bit-quant-type bnb-4bit-quant-storage "
            "use-bnb-nested-quant": "give --frozen-weights nf4, int8 or fp8"
        },
    ),
    Option(
        name="load_in_4bit",
        reading=BOOL,
        help="the same as --frozen-weights nf4",
        default=False,
        receiver=Receiver.COMMAND,
        excludes="frozen_weights",
    ),
    Option(
        name="load_in_8bit",
        reading=BOOL,
        help="the same as --frozen-weights int8",
        default=False,
        receiver=Receiver.COMMAND,
        excludes="frozen_weights",
    ),
    Option(
        name="devices",
        help='such as "cuda:0,cuda:1" or "cpu*2"',
        default_text="all GPUs, else one virtual device",
        receiver=Receiver.ROUNDPIPE,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
        elsewhere={
            "num-gpus n-gpu gpus nproc-per-node num-processes device-map": "all GPUs of the machine are used; choose "
            'some with --devices "cuda:0,cuda:1"'
        },
    ),
    Option(
        name="num_microbatch",
        reading={"type": int},
        help="microbatches per step",
        default_text="devices + 1, more if needed",
        receiver=Receiver.ROUNDPIPE,
        bounds=POSITIVE,
    ),
    Option(
        name="dtype",
        reading={"choices": _DTYPES},
        help="of the weights",
        default_text="bfloat16 on GPUs, float32 on CPU devices",
        receiver=Receiver.COMMAND,
        elsewhere={"torch-dtype": "give --dtype"},
    ),
    Option(
        name="optim_dtype",
        reading={"choices": _DTYPES},
        help="of the masters and the optimizer's state",
        default_text="float32",
        receiver=Receiver.ROUNDPIPE,
    ),
    Option(
        name="moments",
        reading={"choices": MOMENTS},
        help="how the optimizer stores moments",
        default_text="float32",
        receiver=Receiver.ROUNDPIPE,
    ),
    Option(
        name="master_bits",
        reading={"type": int, "choices": MASTER_BITS},
        help="of the masters of bfloat16 weights; 24 saves a byte per trained parameter",
        default_text="32",
        receiver=Receiver.ROUNDPIPE,
    ),
    Option(
        name="state_folder",
        reading={"metavar": "DIR"},
        help="keep the optimizer's state in files on this fast disk",
        default_text="in host memory",
        receiver=Receiver.ROUNDPIPE,
        is_path=True,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
    ),
    Option(
        name="on_devices",
        reading=_FLAG,
        help="let devices share the update of each layer while their links are idle",
        default=False,
        receiver=Receiver.ROUNDPIPE,
        excludes="state_folder",
        may_differ=True,
        on_resume=OnResume.ACCEPT,
    ),
    Option(
        name="weights_folder",
        reading={"metavar": "DIR"},
        help="with --frozen-weights: keep them in a mapped file on this fast disk",
        default_text="in host memory",
        receiver=Receiver.COMMAND,
        is_path=True,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
    ),
    Option(
        name="pin_model",
        reading={"choices": ("alloc", "register", "off")},
        help="how weights are pinned",
        default_text="alloc",
        receiver=Receiver.ROUNDPIPE,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
    ),
    Option(
        name="attn_implementation",
        help="attention of transformers, such as sdpa",
        receiver=Receiver.COMMAND,
        elsewhere={"flash-attn flash-attention use-flash-attention-2": "give --attn-implementation flash_attention_2"},
    ),
)
_LONG_RUNS = _under(
    "long runs",
    Option(
        name="nonfinite",
        reading={"choices": ("stop", "skip", "off")},
        help="a loss or gradient not finite",
        default_text="stop",
        receiver=Receiver.ROUNDPIPE,
    ),
    Option(
        name="wait_limit",
        reading={"type": float, "metavar": "SECONDS"},
        help="fail if a wait takes longer",
        default_text="no limit",
        receiver=Receiver.COMMAND,
        bounds=POSITIVE,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
    ),
    Option(
        name="price_per_hour",
        reading={"type": float, "metavar": "X"},
        help="of the machine, in any currency: the report then has the cost",
        receiver=Receiver.COMMAND,
        bounds=POSITIVE,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
    ),
    Option(
        name="samples",
        reading={"metavar": "FILE"},
        help="prompts that the model answers at each evaluation: .txt with one per line, or .jsonl",
        receiver=Receiver.COMMAND,
        is_path=True,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
        elsewhere={
            "eval-table-size sample-prompts eval-prompts predict-with-generate": "give --samples prompts.txt, with the "
            "prompts that the model answers at each evaluation",
        },
    ),
    Option(
        name="sample_tokens",
        reading={"type": int},
        help="tokens of the longest answer to a prompt of --samples",
        default=128,
        receiver=Receiver.COMMAND,
        bounds=POSITIVE,
        needs="samples",
        may_differ=True,
        on_resume=OnResume.ACCEPT,
        elsewhere={"eval-max-new-tokens": "give --sample-tokens N with --samples prompts.txt"},
    ),
    Option(
        name="no_view",
        reading=_FLAG,
        help="do not show the run; files are written as ever",
        default=False,
        receiver=Receiver.COMMAND,
        may_differ=True,
        on_resume=OnResume.ACCEPT,
    ),
)
OPTIONS = {each.name: each for each in (*_THE_RUN, *_DATA, *_STEPS, *_LORA, *_DEVICES, *_LONG_RUNS, *FIELDS)}
NAME_OF_SHORT = {each.short: each.name for each in OPTIONS.values() if each.short}
# Options that exclude each other. One of them on the command line removes the other from the config file.
EXCLUSIVE = tuple((each.excludes, each.name) for each in OPTIONS.values() if each.excludes)
