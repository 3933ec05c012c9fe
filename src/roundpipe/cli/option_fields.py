"""Options of `roundpipe train` that are fields of the trainer's arguments by their names: defaults and refusals."""

from __future__ import annotations

from roundpipe.cli.option_kinds import FINITE, POSITIVE, OnResume, Option

_PLACES_WEIGHTS = "RoundPipe places the weights itself; name the devices with --devices"
_CANNOT_CAST = "a wrapped model cannot be cast; give the dtype of the weights with --dtype"
# Fields of the trainer's arguments without a short option that have a default, a rule or a name elsewhere.
FIELDS = (
    Option(name="gradient_accumulation_steps", bounds=POSITIVE),
    Option(name="max_grad_norm", default=1.0, bounds=(FINITE,)),
    Option(name="weight_decay", bounds=(FINITE,), on_resume=OnResume.NO_EFFECT),
    Option(name="adam_beta1", on_resume=OnResume.NO_EFFECT),
    Option(name="adam_beta2", on_resume=OnResume.NO_EFFECT),
    Option(name="adam_epsilon", on_resume=OnResume.NO_EFFECT),
    Option(name="optim", elsewhere={"optimizer": "give --optim"}),
    Option(name="logging_steps", default=1, on_resume=OnResume.ACCEPT),
    Option(
        name="report_to",
        default="none",
        on_resume=OnResume.ACCEPT,
        elsewhere={
            "wandb-project wandb-entity": "give --report-to wandb, and set the environment variables WANDB_PROJECT and "
            "WANDB_ENTITY"
        },
    ),
    Option(
        name="dataset_num_proc",
        on_resume=OnResume.ACCEPT,
        elsewhere={"preprocessing-num-workers": "give --dataset-num-proc"},
    ),
    Option(name="dataloader_num_workers", on_resume=OnResume.ACCEPT),
    Option(
        name="packing",
        elsewhere={
            "sample-packing neat-packing": "give --packing. It joins rows into one stream, in which a row also sees "
            "the rows before it"
        },
    ),
    Option(name="packing_strategy", default="wrapped"),
    Option(
        name="completion_only_loss",
        elsewhere={
            "train-on-inputs train-on-prompt": "give --completion-only-loss false, or for messages "
            "--assistant-only-loss false"
        },
    ),
    Option(name="hub_token", on_resume=OnResume.NOT_KEPT),  # a secret
    Option(name="bf16", default=False),  # the weights have the dtype in which they train: no autocast
    Option(
        name="gradient_checkpointing",
        default=False,
        elsewhere={"use-gradient-checkpointing": "leave it out: the plan decides what is recomputed"},
    ),
    Option(name="disable_tqdm", default=True),
    Option(name="prediction_loss_only", default=True),
    Option(name="resume_from_checkpoint", refused="use --resume, alone or with a folder"),
    Option(name="dataset_kwargs", refused="the command prepares the data itself"),
    Option(
        name="padding_free",
        refused="it joins the batch into one sequence, which cannot be cut into microbatches; use --packing",
    ),
    Option(
        name="auto_find_batch_size",
        refused="the batch keeps its size; --num-microbatch decides how much of it is on a device",
    ),
    Option(name="deepspeed", refused=_PLACES_WEIGHTS),
    Option(name="fsdp", refused=_PLACES_WEIGHTS),
    Option(name="parallelism_config", refused=_PLACES_WEIGHTS),
    Option(
        name="fp16",
        refused="loss scaling needs gradients in device memory; use --dtype bfloat16, or --bf16 true for autocast",
    ),
    Option(name="fp16_full_eval", refused=_CANNOT_CAST),
    Option(name="bf16_full_eval", refused=_CANNOT_CAST),
    Option(
        name="debug",
        refused="it watches the modules of the plain model; --nonfinite stop names the module or parameter at fault",
    ),
    Option(
        name="label_smoothing_factor", refused="TRL then runs two different forward passes before one backward pass"
    ),
    Option(
        name="use_liger_kernel",
        elsewhere={
            "enable-liger-kernel liger-kernel liger-kernels liger-rope liger-rms-norm liger-glu-activation "
            "liger-fused-linear-cross-entropy": "give --use-liger-kernel"
        },
    ),
)
