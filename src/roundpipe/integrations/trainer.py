"""RoundPipeTrainer: transformers' Trainer over a RoundPipe, and the mixin that makes one of any Trainer class.

The mixin lets Trainer construct itself with the plain model and wraps the model afterwards. Data, schedules, logging,
evaluation and callbacks stay Trainer's. The mixin replaces the forward and backward pass of a batch, the optimizer
step, and saving and loading. Knows the interface of Trainer and the calls of a wrapper, nothing of their insides.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model  # type: ignore[import-untyped]
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, unwrap_peft_model

from roundpipe.api.proxy import ModelProxy
from roundpipe.api.roundpipe import RoundPipe
from roundpipe.api.wrap import wrap_model_to_roundpipe
from roundpipe.checkpoint import load, load_rng, save, verify
from roundpipe.checkpoint.folders import check_parent
from roundpipe.checkpoint.original_form import give_mode, save_model, save_tokenizer
from roundpipe.config import RoundPipeRunConfig
from roundpipe.context import OptimizerCtx
from roundpipe.devices import parse_devices
from roundpipe.errors import CheckpointError, ConfigError, NonFiniteError, OwnershipError, UsageError
from roundpipe.integrations.host_side import keep_in_host_memory, note_made, take_over
from roundpipe.integrations.iterable_data import IterableDataMixin
from roundpipe.integrations.machines import MachinesMixin
from roundpipe.integrations.optimizers import chosen_moments, class_and_arguments
from roundpipe.integrations.options import RoundPipeOptions
from roundpipe.integrations.run_view import RunViewCallback
from roundpipe.integrations.samples import SamplesCallback
from roundpipe.integrations.stepped_optimizer import KeepsGradients, SteppedOptimizer, give_optimizer, put_masters_into
from roundpipe.integrations.trl_side import TrlMixin, prepare_callbacks
from roundpipe.optim.gradients import clip_grad_norm_
from roundpipe.split.splitter import likely_inputs
from roundpipe.store.training_memory import assumed_state

logger = logging.getLogger("roundpipe")
_ARGUMENTS_NAME = "training_args.json"
# Methods of Trainer that the mixin replaces without calling the method of the class that it is put before.
_REPLACED = (
    *("_save_checkpoint", "_save", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"),
    *("_load_best_model", "_clip_grad_norm", "_get_grad_norm", "_wrap_model", "_prepare_input"),
    "_move_model_to_device",
)


class RoundPipeMixin(TrlMixin, MachinesMixin, IterableDataMixin):
    """Put before Trainer or a subclass of it: the model then trains through RoundPipe.

    The constructor takes the arguments of the other class and `roundpipe`, the options. The model may be plain or
    wrapped already. After construction `trainer.model` is the wrapped model.
    """

    args: Any
    state: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    label_smoother: Any
    roundpipe: RoundPipeOptions
    advice_to_skip = 'To leave such steps out, use RoundPipeOptions(nonfinite="skip").'

    def __init__(self, *args: Any, roundpipe: RoundPipeOptions | None = None, **kwargs: Any) -> None:
        if roundpipe is not None and not isinstance(roundpipe, RoundPipeOptions):
            raise ConfigError(f"roundpipe must be RoundPipeOptions(...), got {type(roundpipe).__name__}.")
        self.check_class_of_trl()
        self._warn_of_replaced_methods()
        self.roundpipe = roundpipe or RoundPipeOptions()
        # Whether a resumed run keeps the number instead of taking that of the checkpoint.
        self.fixes_microbatches = self.roundpipe.num_microbatch is not None
        if not self.fixes_microbatches:
            number = len(parse_devices(self.roundpipe.devices)) + 1
            self.roundpipe = dataclasses.replace(self.roundpipe, num_microbatch=number)
        self._is_wrapped = False
        self._wrapped_models: list[ModelProxy] = []
        self._liger_kernels: bool | dict[str, bool] = False
        self._skips_step = False  # whether a loss of this step was not finite
        self._loss_sums: Mapping[str, Any] | None = None  # of a checkpoint, until the loop has begun
        self.run_view = RunViewCallback(show=self.roundpipe.view)
        self._grad_norms: list[torch.Tensor] = []  # of the last steps; each step sets its norm
        take_over((*args, *kwargs.values()))
        # Trainer reads the class and the signature of the model that it is constructed with, so it gets the plain one.
        given = args[0] if args else kwargs.get("model")
        self._given = given if isinstance(given, ModelProxy) else None
        if self._given is not None:
            plain = self._given.original_model
            args, kwargs = ((plain, *args[1:]), kwargs) if args else (args, {**kwargs, "model": plain})
        self.take_quantisation(given, kwargs)
        with self.client_of_vllm():
            super().__init__(*args, **kwargs)
        self.wrap_model()
        if self.roundpipe.view:
            self.remove_callback(PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        self._add_samples()  # before the view: its report has those of the end
        self.add_callback(self.run_view)

    # Construction.

    def _add_samples(self) -> None:
        options = self.roundpipe
        if options.samples:
            if self.args.world_size > 1:
                raise ConfigError(
                    f"{type(self).__name__} generates samples on one machine alone, and {self.args.world_size} "
                    "processes were launched; leave samples out."
                )
            show = self.run_view.show_text
            self.add_callback(
                SamplesCallback(options.samples, options.sample_tokens, self.model, self.processing_class, show=show)
            )

    def _warn_of_replaced_methods(self) -> None:
        """Warn if a class that the mixin is put before overrides a method that is not called here.

        What trainers of TRL do in such methods is done by TrlMixin.
        """
        mro = type(self).__mro__
        for name in _REPLACED:
            below = (cls for cls in mro[mro.index(RoundPipeMixin) + 1 : mro.index(Trainer)] if name in vars(cls))
            owner = next(below, None)
            if owner is not None and not owner.__module__.startswith("trl."):
                logger.warning(
                    "%s.%s() is not called: RoundPipeMixin replaces this method. Override it in a class that has the "
                    "mixin among its bases.",
                    owner.__name__,
                    name,
                )

    def wrap_model(self) -> None:
        """Wrap the model, if that has not happened yet."""
        if self._is_wrapped:
            return
        self._is_wrapped = True
        plain = self.model
        self._set_signature_columns_if_needed()  # while the model is plain: an adapter shows the inner signature
        name = unwrap_peft_model(plain)._get_name()
        if self.label_smoother is not None and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            # Trainer shifts labels if the model's class has such a name; the class of a wrapper has another one.
            self.label_smoother = functools.partial(self.label_smoother, shift_labels=True)
        if self._given is not None and self._given.original_model is not plain:
            raise UsageError(
                f"{type(self).__name__} got a wrapped model and arguments that make another model of it, such as "
                "peft_config; pass the plain model."
            )
        self.check_reference(plain)
        prepare_callbacks(self.callback_handler.callbacks)
        model = self._given or self.wrapped(plain)
        for name, value in list(vars(self).items()):  # a trainer may have the model by other names, too
            if value is plain:
                setattr(self, name, model)
        self.callback_handler.model = model
        self.leave_margin_out(model)
        self.hand_over_to_vllm(model)
        self.warn_of_the_host()

    def wrapped(self, model: nn.Module, *, trains: bool = True) -> ModelProxy:
        """Wrap a model by the options. `trains`: False for a model that only computes outputs."""
        options = self.roundpipe
        with contextlib.suppress(AttributeError):  # it has no such method, or the method has nothing to undo
            # TRL lets the embeddings' outputs require grad for gradient checkpointing, which RoundPipe replaces.
            model.disable_input_require_grads()  # type: ignore[operator]
        if not trains:
            model.requires_grad_(False).eval()
        # Most collators make such batches. The first one then follows the plan that wrapping makes.
        counts = ["num_items_in_batch"] if trains and self.model_accepts_loss_kwargs else []
        likely = likely_inputs("attention_mask", *counts)
        assumed = assumed_state(chosen_moments(self.args.optim, options.moments), is_on_disk=options.has_state_on_disk)
        try:
            wrapper = likely(assumed(wrap_model_to_roundpipe))(
                model,
                name=type(model).__name__ + ("" if trains else " (does not train)"),
                optim_dtype=options.optim_dtype if trains else None,
                devices=options.devices,
                pin_model=options.pin_model,
                model_run_config=RoundPipeRunConfig(num_microbatch=options.num_microbatch),
                process_group=self.process_group if trains else None,
                staleness=int(options.is_async),
                compile=options.compile or False,
                liger_kernels=trains and self._liger_kernels,
                frozen_weights=options.frozen_weights,
                master_bits=options.master_bits if trains else 32,
            )
        except OwnershipError as error:
            error.add_note(f"{type(self).__name__} also takes a model that you have wrapped yourself: pass the wrapper")
            raise
        note_made(wrapper)
        self._wrapped_models.append(wrapper)
        return wrapper

    def set_num_microbatch(self, number: int) -> None:
        """Split batches into `number` microbatches from now on."""
        before = self.roundpipe.num_microbatch
        self.roundpipe = dataclasses.replace(self.roundpipe, num_microbatch=number)
        for model in self._wrapped_models:
            for part in model.modules():
                # A model that is wrapped part by part has small parts that always take one microbatch.
                if isinstance(part, RoundPipe) and part.model_run_config.num_microbatch == before:
                    part.set_run_config(dataclasses.replace(part.model_run_config, num_microbatch=number))

    def call_model_init(self, trial: Any = None) -> Any:
        """The model of `model_init`, wrapped if it replaces the one that Trainer was constructed with."""
        model = super().call_model_init(trial)
        if not self._is_wrapped:
            return model
        self.model.close()
        self._wrapped_models.remove(self.model)
        return self.wrapped(model)

    def create_accelerator_and_postprocess(self) -> None:
        self._check_arguments()  # here: Trainer has its arguments and has not touched the model yet
        self.turn_offloading_off()
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # RoundPipe uses all devices itself: no DataParallel, no larger batches
        # The copy of a pinned batch to a device waits behind copies of weights; small pageable copies do not.
        self.args.dataloader_pin_memory = False
        super().create_accelerator_and_postprocess()
        keep_in_host_memory(self.accelerator, functools.partial(self.wrapped, trains=False))

    def _check_arguments(self) -> None:
        """Raise for arguments that do not go with RoundPipe."""
        args = self.args
        refused = {
            "fp16": (args.fp16, "bf16=True, which needs no loss scaling"),
            "fp16_full_eval": (args.fp16_full_eval, "a model loaded in float16"),
            "bf16_full_eval": (args.bf16_full_eval, "bf16=True, or a model loaded in bfloat16"),
            "debug": (args.debug, 'RoundPipeOptions(nonfinite="stop"), which names the module or parameter at fault'),
            "deepspeed": (args.deepspeed, "RoundPipe alone, which keeps weights and optimizer state in host memory"),
            "fsdp": (args.fsdp, "RoundPipe alone, which keeps weights and optimizer state in host memory"),
            **self.refused_of_trl(),
        }
        for name, (is_set, advice) in refused.items():
            if is_set:
                raise ConfigError(f"{type(self).__name__} does not support {name}={is_set!r}; use {advice}.")
        self.roundpipe = self.roundpipe.completed(args)
        if args.use_liger_kernel:
            self._liger_kernels = dict(args.liger_kernel_config or {}) or True
            self.args = copy.copy(args)  # the arguments are the user's
            self.args.use_liger_kernel = False  # Trainer would patch the model that is wrapped by then
        if self._given is not None and (self.roundpipe.compile or self._liger_kernels):
            logger.warning(
                "the model runs as it was wrapped: for compiled layers and Liger's kernels, give compile= and "
                "liger_kernels= to wrap_model_to_roundpipe(), or pass the plain model"
            )
        if args.world_size > 1:
            self.check_machines()

    # What Trainer does with the model.

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: weights stay in host memory."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the model itself. Before training, make the optimizer step through the model."""
        if training:
            self._check_output_folder()
            self._grad_norms, self._skips_step = [], False
        if training and not isinstance(self.optimizer, SteppedOptimizer):
            inner = self.optimizer
            self.optimizer = SteppedOptimizer(inner, self._run_step)
            give_optimizer(self.lr_scheduler, inner, self.optimizer, is_async=self.roundpipe.is_async)
        return model

    def _check_output_folder(self) -> None:
        """Raise CheckpointError before training if a checkpoint of this run could not be saved."""
        if self.args.save_strategy != "no" and not self.state.is_hyper_param_search:
            check_parent(
                self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-", self.state.global_step, self.state.max_steps
            )

    def _prepare_input(self, data: Any) -> Any:
        """Copy a dict, as Trainer does, because compute_loss() may change it. Tensors stay in host memory."""
        return copy.copy(data) if isinstance(data, Mapping) else data

    # Forward and backward pass.

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward pass of a batch; returns its share of the step's loss."""
        if self._trains_in_one_call(num_items_in_batch):
            loss = self._forward_backward(inputs, num_items_in_batch)
        else:
            self.learn_both_forms(inputs)
            loss = self.plain_training_step(inputs, num_items_in_batch)
        if self.roundpipe.nonfinite != "off" and not bool(loss.isfinite()):
            self._handle_loss(float(loss), inputs)
        tokens, number = inputs.get("input_ids") if isinstance(inputs, Mapping) else None, None
        if isinstance(tokens, torch.Tensor):
            number = int(self.summed_over_machines(torch.tensor(tokens.numel())))
        self.run_view.note_loss(loss, number)
        return loss.to(self.args.device)

    def _trains_in_one_call(self, num_items_in_batch: torch.Tensor | int | None) -> bool:
        """Whether the loss is the model's own, so that forward_backward() computes it."""
        has_own_loss = self.label_smoother is None and self.compute_loss_func is None
        return isinstance(self.model, RoundPipe) and has_own_loss and self._trains_like(Trainer)

    def _trains_like(self, trainer_class: Any) -> bool:
        """Whether no class between this mixin and `trainer_class`, and no subclass, changes how a batch is trained."""
        step: Any = super().training_step
        is_usual_step = step.__func__ is trainer_class.training_step
        return is_usual_step and type(self).compute_loss is trainer_class.compute_loss

    def _forward_backward(self, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
        """The counterpart of Trainer.training_step for a model that computes its own loss."""
        self.begin_training_step()
        inputs = dict(self._prepare_inputs(inputs))
        options: dict[str, Any] = {}
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs["num_items_in_batch"] = num_items_in_batch
        elif self.current_gradient_accumulation_steps > 1:
            num_calls = self.current_gradient_accumulation_steps
            options["loss_fn"] = lambda outputs, labels: _loss_of(outputs) / num_calls
            options["run_config"] = RoundPipeRunConfig(whole_batch_loss=True)
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            loss: torch.Tensor = self.model.forward_backward(input_kwargs=inputs, **options)
        return loss.detach()

    def begin_training_step(self) -> None:
        """Set the model, and an optimizer that knows such modes, to training mode."""
        if not all(module.training for module in self.model.modules()):  # setting modes takes longer than asking
            self.model.train()
        self.optimizer.train()

    def _run_epoch(self, model: nn.Module, **kwargs: Any) -> None:
        self._restore_loss_sums()  # Trainer clears them after it has loaded a checkpoint
        if self.state.global_step >= self.state.max_steps:
            # A complete run is resumed. Trainer would train one more step before it looks at the number.
            self.control.should_training_stop = True
            return
        self.run_pass(super()._run_epoch, {"model": KeepsGradients(model), **kwargs})

    # Optimizer steps.

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        with OptimizerCtx():  # parameters of the model are then their masters
            optimizer = super().create_optimizer(model)
        if not isinstance(optimizer, SteppedOptimizer):
            put_masters_into(optimizer, self.model)
        return optimizer

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:
        """Trainer's choice; RoundPipe's optimizers instead of those of torch with the same name."""
        choice, options = super().get_optimizer_cls_and_kwargs, self.roundpipe
        ours = {"state_folder": options.state_folder, "on_devices": options.on_devices}
        return class_and_arguments(args, options.moments, lambda given: choice(given, model), **ours)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: steps clip gradients."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> torch.Tensor | None:
        """The gradient norm of the coming step, which sets it.

        If steps are asynchronous: that of the step before the last one, which has certainly run by now.
        """
        norms = self._grad_norms = [*self._grad_norms[-2:], torch.full((), float("nan"))]
        reported: torch.Tensor | None = norms[-1]
        if self.roundpipe.is_async:
            reported = norms[0] if len(norms) == 3 else None
        self.run_view.note_grad_norm(reported)
        return reported

    def _run_step(self, take_step: Callable[[], None]) -> None:
        """Clip gradients, call `take_step` and clear gradients, as one step of the model."""
        step, norm = self.state.global_step + 1, self._grad_norms[-1]
        if self._skips_step:
            self._skips_step = False
            self.model.zero_grad()
            return
        max_norm = self.args.max_grad_norm if self.args.max_grad_norm > 0 else float("inf")
        nonfinite, group = self.roundpipe.nonfinite, self.model._engine.group
        is_measured: list[bool] = []  # not empty once the norm is known and the step goes on

        def step_fn() -> None:
            is_skipped = False
            try:
                norm.copy_(clip_grad_norm_(self.model, max_norm, error_if_nonfinite=nonfinite != "off"))
            except NonFiniteError as error:
                if nonfinite == "stop":
                    error.add_note(f"in step {step}; no weight was changed. {self.advice_to_skip}")
                    raise
                logger.warning("step %d was skipped: %s", step, error)
                is_skipped = True
            is_measured.append(True)
            group.notify()
            if not is_skipped:
                take_step()
            self._clear_gradients()

        # An exact step returns as early as it may: the next batch waits for the update of each layer.
        ended = self.model._engine.step(
            step_fn,
            is_async=self.roundpipe.is_async or not self.reads_weights_between_steps,
            staleness=int(self.roundpipe.is_async),
        )
        if not self.roundpipe.is_async:  # the norm is reported with this step, and an error of it raised here
            group.wait_in_step(lambda: bool(is_measured), ended, "the norm of the gradients")
            if not is_measured:
                self.model.synchronize()  # raises why the step has not come so far

    def _clear_gradients(self) -> None:
        for master in self.model.optim_parameters():
            master.grad = None

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.model.synchronize()  # the newest weights count, also after an asynchronous step
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self.model.synchronize()
        return super().predict(*args, **kwargs)

    # Losses and gradients that are not finite.

    def _handle_loss(self, loss: float, inputs: dict[str, Any]) -> None:
        """Raise NonFiniteError for a loss that is not finite, or skip the step, as the options say."""
        step = self.state.global_step + 1
        found = f"the loss of step {step} is {loss}; {self._first_nonfinite_output(inputs)}"
        if self.roundpipe.nonfinite == "skip":
            logger.warning("step %d is skipped: %s", step, found)
            self._skips_step = True
            return
        self.model.zero_grad()
        raise NonFiniteError(
            f"{found}. No weight was changed by this step. Lower the learning rate, or check the data of this batch. "
            f"{self.advice_to_skip}"
        )

    def _first_nonfinite_output(self, inputs: dict[str, Any]) -> str:
        """Compute the loss of the batch once more and describe the first module whose output is not finite."""
        found: list[str] = []

        def watch(name: str, module: nn.Module, args: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            if not found and not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
                found.append(name)

        model: ModelProxy = self.model
        named = [(name, module) for name, module in model.original_model.named_modules() if name]
        handles = [module.register_forward_hook(functools.partial(watch, name)) for name, module in named]
        try:
            # With gradients, because another form of call might have to be split into layers first.
            with torch.random.fork_rng(devices=()), self.accelerator.autocast():
                self.compute_loss(model, self._prepare_inputs(inputs))
        except Exception as error:  # the loss itself is the news
            return f"the module could not be found, because computing the loss once more failed: {error!r}"
        finally:
            for handle in handles:
                handle.remove()
        if found:
            return f"{found[0]} is the first module whose output is not finite"
        return "the outputs of all modules are finite when it is computed once more, so check labels and loss function"

    # Saving and resuming.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint of the run. Returns while the files are still written: see roundpipe.checkpoint."""
        self.write_model_card()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_folder, state = Path(self._get_output_dir(trial=trial)), self.state
        best = run_folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if state.best_global_step and (state.best_global_step == state.global_step or best.exists()):
            state.best_model_checkpoint = str(best)
        keeps_all = not self.args.save_only_model
        pending = save(
            run_folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}",
            self.model,
            self.optimizer.optimizer if keeps_all else None,
            scheduler=self.lr_scheduler if keeps_all else None,
            extra=self._run_values(),
            tokenizer=self._tokenizer_to_save(),
            files={TRAINER_STATE_NAME: self._state_as_json(), _ARGUMENTS_NAME: self.args.to_json_string()},
            keep=self.args.save_total_limit or None,
            spare=() if state.best_model_checkpoint is None else (state.best_model_checkpoint,),
        )
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(pending.wait()))

    def _run_values(self) -> dict[str, Any]:
        """What the run needs to go on besides the state of Trainer, and is not in any other file."""
        return {
            "of_trl": self.values_of_trl(),
            "of_data": self.values_of_data(),
            "num_microbatch": None if self._given is not None else self.roundpipe.num_microbatch,
            "machines": self.args.world_size,
            "loss_since_log": self._tr_loss.cpu(),
            "loss_until_log": self._total_loss_scalar,
            "logged_step": self._globalstep_last_logged,
            "grad_norms": self._grad_norms,
        }

    def _state_as_json(self) -> str:
        """The state of Trainer and its callbacks, as Trainer writes it."""
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                states = self.state.stateful_callbacks
                name, present = type(callback).__name__, callback.state()
                if isinstance(states[name], list):
                    states[name].append(present)
                else:
                    states[name] = present
        return json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n"

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check that the folder is a checkpoint of this class. The optimizer does not exist yet: see below."""
        try:
            verify(resume_from_checkpoint, [TRAINER_STATE_NAME])
        except CheckpointError as error:
            if os.path.exists(os.path.join(resume_from_checkpoint, "optimizer.pt")):
                error.add_note(
                    "The folder is a checkpoint of transformers' own Trainer. Load its weights with from_pretrained() "
                    "and train without resume_from_checkpoint."
                )
            raise

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load weights, optimizer, scheduler and random numbers; all or, if something does not fit, nothing."""
        if checkpoint is None:
            return
        values = load(checkpoint, self.model, self.optimizer.optimizer, scheduler=self.lr_scheduler)
        self._loss_sums = values
        self._grad_norms = values["grad_norms"]
        self.take_values_of_trl(values.get("of_trl", {}))
        self.take_values_of_data(values.get("of_data", {}))
        if values["num_microbatch"] is not None and not self.fixes_microbatches and self._given is None:
            self.set_num_microbatch(self._number_for_machines(values["num_microbatch"], values.get("machines", 1)))

    def _restore_loss_sums(self) -> None:
        """Let the next logged loss be the mean since the last one that was logged, as in an uninterrupted run."""
        values, self._loss_sums = self._loss_sums, None
        if values is not None:
            self._tr_loss += values["loss_since_log"].to(self._tr_loss.device)
            self._total_loss_scalar = values["loss_until_log"]
            self._globalstep_last_logged = values["logged_step"]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_rng(checkpoint, self.args.process_index)

    def _load_best_model(self) -> None:
        logger.info("loading the best model: %s", self.state.best_model_checkpoint)
        load(self.state.best_model_checkpoint, self.model, restore_rng=False)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.model.synchronize()  # the last step is done and the last checkpoint is complete, or this raises
        return super()._finalize_training(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.model.synchronize()  # on all machines; rank 0 then writes the weights
        super().save_model(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write model, tokenizer and arguments. Unlike Trainer, writes the arguments as JSON: no file is a pickle."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        given = {} if state_dict is None else {"state_dict": state_dict}  # not every model knows the argument
        model = self.model
        write = model.save_pretrained if is_peft_model(model) else functools.partial(save_model, model=model)
        write(folder, **given)
        tokenizer = self._tokenizer_to_save()
        if tokenizer is not None:
            save_tokenizer(folder, tokenizer)
        (folder / _ARGUMENTS_NAME).write_text(self.args.to_json_string(), encoding="utf-8")
        give_mode(folder, like=folder / _ARGUMENTS_NAME)

    def _tokenizer_to_save(self) -> Any:
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)


class RoundPipeTrainer(RoundPipeMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer over a RoundPipe. Takes the same arguments, and the option `roundpipe`."""


def _loss_of(outputs: Any) -> Any:
    """The loss in a model's outputs, where Trainer looks for it."""
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]
