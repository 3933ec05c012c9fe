"""Splits a model into layers: makes a split plan for each form of call, and arranges the layers for all plans.

Calibration takes a few forward passes on the host, so it uses small inputs: the first tokens of a call's inputs, or
inputs made up from the model's config. The values of the inputs do not matter, as long as the model runs the same code.
Holds no engine and starts no thread. The layers are plain modules that hold the model's own parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from roundpipe.context import trying_out
from roundpipe.errors import ModelSplitError
from roundpipe.monitor import process_rlock
from roundpipe.progress import phase
from roundpipe.split.calibrate import ChangesItself, calibrate, let_change_itself, runs
from roundpipe.split.determinism import OUT_OF_MEMORY, refusing, succeeds
from roundpipe.split.discovery import block_paths
from roundpipe.split.folded import FoldedProducts
from roundpipe.split.kernels import GpuKernels, NeedsGpu
from roundpipe.split.layers import GlueLayer, LayerArrangement, PlacedPlan
from roundpipe.split.plan import Detail, SplitPlan, signature
from roundpipe.split.stubs import StubTree
from roundpipe.split.transformers import CacheSwitch, ConfigStates, with_torch_alone
from roundpipe.split.verify import verify

logger = logging.getLogger("roundpipe")
_OBJECTS_PER_COLLECTION = 200_000  # new objects after which trials collect garbage; some 50 MB of them
_ROWS, _TOKENS = 2, 8  # the size of the inputs for calibration
# Names of inputs with a row for each sample and a column for each token. All of them can be cut to the same size.
_BY_TOKEN = frozenset(
    (
        *("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "inputs_embeds"),
        *("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "decoder_position_ids"),
    )
)


# Inputs beside ids and labels that batches may have; from the labels.
_LIKELY: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "attention_mask": torch.ones_like,
    "num_items_in_batch": lambda labels: torch.tensor(labels.numel()),
}
_likely: ContextVar[tuple[str, ...]] = ContextVar("likely_inputs", default=())


@contextlib.contextmanager
def likely_inputs(*names: str) -> Iterator[None]:
    """Inside, models that take ids and labels are split for calls that also have inputs of these names."""
    token = _likely.set(names)
    try:
        yield
    finally:
        _likely.reset(token)


class ModelSplitter:
    """The layers of one model, and the split plans for all forms of call that have occurred so far."""

    def __init__(self, model: nn.Module, kernels: GpuKernels | None = None) -> None:
        """Create the layers, without any plan yet.

        kernels: those for GPUs in the model, which are set aside while the model runs on the host.
        """
        if not block_paths(model):
            raise ModelSplitError(
                "it has no repeated list of modules (an nn.ModuleList, nn.ModuleDict or nn.Sequential of blocks; a "
                "module without submodules, such as an nn.Linear, is no block)"
            )
        self._model = model
        self._kernels = kernels or GpuKernels(model)
        self._configs = ConfigStates(model)
        self._arrangement = LayerArrangement(model, self)
        self._arrangement.build()  # the layers, and with them the parameters, must exist before the first plan
        self._places: dict[Hashable, int] = {}  # by signature: the position of the plan in `LayerArrangement.placed`
        # By signature with Detail.FORMS: the detail that signatures need, because calls with this signature follow
        # different plans. Signatures that are not in the dict need no more detail.
        self._details: dict[Hashable, Detail] = {}

    @property
    def layers(self) -> list[nn.Module]:
        return self._arrangement.layers

    def knows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether there is a plan for calls of this form in the current grad mode."""
        return self._key(args, kwargs) in self._places

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> PlacedPlan:
        """Return the plan for a call; `learn` must have been called for its form."""
        place = self._places.get(self._key(args, kwargs, training))
        if place is None:
            raise ModelSplitError("there is no plan for a call of this form")
        return self._arrangement.placed[place]

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_made_up: bool = False) -> bool:
        """Make a plan for calls of this form in the current grad mode; returns whether the layers changed.

        is_made_up: the inputs are not those of a call; raises ChangesItself if the model would change for them.
        """
        with rare_collections():
            return self._learn(args, kwargs, is_made_up=is_made_up)

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_made_up: bool) -> bool:
        with_grad = torch.is_grad_enabled()
        start = time.perf_counter()
        # If the signature has more detail than usual, the plan depends on the sizes or values of the inputs. The inputs
        # must not be cut then.
        may_cut_down = signature(args, kwargs, self._model.training) not in self._details
        plan: SplitPlan | None = None
        while plan is None:
            try:
                with self.on_the_host():
                    plan = self._plan(args, kwargs, with_grad, may_cut_down=may_cut_down, may_change=not is_made_up)
            except NeedsGpu as error:
                if not self._kernels.find(error.package):
                    raise
                self.refresh()  # the forward of the whole model may be another one now
        changed = self._arrangement.add(plan)
        self.refresh()  # new layers must have the model's training mode
        # The key is made now, because a first forward may complete the model's config.
        self._places[self._key(args, kwargs)] = len(self._arrangement.placed) - 1
        logger.info(
            "%s: made a split plan for calls with %s in %.1f s: %d calls of blocks; its code is replayed at points %s",
            type(self._model).__name__,
            ", ".join(kwargs) or "these arguments",
            time.perf_counter() - start,
            plan.num_calls,
            plan.points,
        )
        for point, reason in plan.reasons.items():
            logger.debug("%s: segment %d is a point: %s", type(self._model).__name__, point, reason)
        return changed

    def learn_by_guess(self) -> bool:
        """Make a plan for the most likely form of call, from made-up inputs; returns whether the model accepted any."""

        passing = ModelSplitError, NeedsGpu

        def learns_any() -> bool:
            return any(
                succeeds(f"made-up inputs {sorted(kwargs)} fit", partial(learns, kwargs), passing=passing)
                for kwargs in made_up(self._model)
            )

        def learns(kwargs: dict[str, Any]) -> bool:
            self.learn((), kwargs, is_made_up=True)
            return True

        # The outer trial is needed because `made_up` itself may raise on an unusual config.
        try:
            with self._configs.restored():
                return succeeds("made-up inputs fit", learns_any, passing=passing)
        except ChangesItself as error:
            # Made-up inputs must not change the model, because the user's first call may not cause the same change.
            logger.debug("no plan from made-up inputs: %s", error)
            return False

    def runs_on_the_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model's own forward takes these arguments, on a copy and without gradients."""
        with self.on_the_host(), torch.no_grad():
            return succeeds("the forward takes these arguments", lambda: runs(self._model, args, kwargs))

    def distrust(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Use a more detailed signature for calls of this form, because one of them did not follow its plan.

        Returns False if the signature already has the most detail.
        """
        key = signature(args, kwargs, self._model.training)
        detail = self._details.get(key, Detail.FORMS)
        if detail is Detail.VALUES:
            return False
        # The next call of this form gets another key, for which there is no plan yet.
        self._places.pop(self._key(args, kwargs), None)
        self._details[key] = Detail(detail + 1)
        return True

    def take_out(self) -> None:
        """Remove the GPU kernels that wrapping has put into the model."""
        self._kernels.remove()

    def refresh(self) -> None:
        """Copy attributes that the user changed on the model's modules to the layers' stub trees."""
        for layer in self.layers:
            if isinstance(layer, GlueLayer):
                layer.training = self._model.training
                for tree in layer.trees.values():
                    assert isinstance(tree, StubTree)
                    tree.refresh()

    @contextlib.contextmanager
    def on_the_host(self) -> Iterator[None]:
        """While entered, the model runs trials on the host: without kernels that need a GPU, and with folded products.

        Leaves torch.inference_mode(), too: trials need gradients and the version counters of tensors.
        """
        with_grad = torch.is_grad_enabled()
        with (
            self._kernels.set_aside(),
            with_torch_alone(self._model),
            torch.inference_mode(False),
            torch.set_grad_enabled(with_grad),
            FoldedProducts(),
            trying_out(),
        ):
            yield

    def _plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], with_grad: bool, *, may_cut_down: bool, may_change: bool
    ) -> SplitPlan:
        """Return a plan made with small inputs or, if that fails, with the inputs of the call.

        may_change: whether the model may exchange its own modules for these inputs, as it would in the user's call.
        """
        small = cut_down(kwargs) if may_cut_down and not args else None
        if small is not None:
            try:
                return self._best_plan((), small, with_grad)
            except (NeedsGpu, *OUT_OF_MEMORY):
                raise
            except Exception as error:  # some models need more than a few tokens
                logger.debug("no plan from inputs cut down: %r", error)
        try:
            return self._best_plan(args, kwargs, with_grad)
        except ChangesItself as change:
            if not may_change:
                raise
            logger.info("%s: %s; it runs once on the host to do so", type(self._model).__name__, change)
            let_change_itself(self._model, args, kwargs)
        return self._best_plan(args, kwargs, with_grad)

    def _best_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], with_grad: bool) -> SplitPlan:
        """Return a plan with one layer per block or, if that fails, one layer per module that calls blocks."""
        try:
            return self._verified_plan(args, kwargs, with_grad)
        except ChangesItself:
            raise
        # If both ways fail, raise the error of the first way: the user can act on it.
        except ModelSplitError as refusal:
            try:
                plan = self._verified_plan(args, kwargs, with_grad, in_one=True)
            except OUT_OF_MEMORY:
                raise
            except Exception as error:
                logger.debug("no plan with all blocks in one layer: %r", error)
                raise refusal from None
            logger.warning(
                "%s: %s hold all of their blocks in one layer, which must fit into a device's memory, because the "
                "blocks cannot be separate layers: %s",
                type(self._model).__name__,
                ", ".join(sorted(plan.blocks)),
                refusal,
            )
            return plan

    def _verified_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], with_grad: bool, *, in_one: bool = False
    ) -> SplitPlan:
        name = type(self._model).__name__
        # Trials have made-up values, of which a model may warn. It warns again in calls with the values of the user.
        with warnings.catch_warnings(action="ignore"):
            with phase(f"{name}: finding its layers in trial runs on the CPU"):
                plan = calibrate(self._model, args, kwargs, with_grad=with_grad, in_one=in_one)
            with phase(f"{name}: comparing its layers with the model"), refusing("comparing its layers with the model"):
                tokenwise, fuses = verify(self._model, plan, args, kwargs, with_grad=with_grad)
        return dataclasses.replace(plan, tokenwise=tokenwise, head=plan.head if fuses else None)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool | None = None) -> Hashable:
        """Return the state of the model's configs and the signature of a call, with the detail that such calls need.

        training: the training mode in the signature; by default that of the model.
        """
        mode = self._model.training if training is None else training
        key = signature(args, kwargs, mode)
        detail = self._details.get(key)
        return self._configs.number(), key if detail is None else signature(args, kwargs, mode, detail)


class _RareCollections:
    """How many threads are inside of `rare_collections`, and the thresholds of the collector before the first one."""

    def __init__(self) -> None:
        self.lock = process_rlock()
        self.num_inside, self.thresholds = 0, (0, 0, 0)


_rare_collections = _RareCollections()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """While a thread is inside, garbage is collected rarely.

    Trials make hundreds of objects for each module. Python would collect often, and walk all of them each time: that
    was up to half of the time of splitting a model.
    """
    state = _rare_collections
    with state.lock:
        if not state.num_inside:
            state.thresholds = gc.get_threshold()
            if state.thresholds[0]:  # 0 turns collections off
                gc.set_threshold(max(state.thresholds[0], _OBJECTS_PER_COLLECTION), *state.thresholds[1:])
        state.num_inside += 1
    try:
        yield
    finally:
        with state.lock:
            state.num_inside -= 1
            if not state.num_inside:
                gc.set_threshold(*state.thresholds)


def cut_down(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the first tokens of the first rows of a call's inputs.

    Returns None if the inputs have no rows of tokens, or if they are small already. Masks are set to 1 and ignored
    labels to 0, so that all tokens count and the loss is defined.
    """
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.dim()}
    rows = {tensor.shape[0] for tensor in tensors.values()}
    # An input of unknown layout cannot be cut to fit the others.
    if not tensors or not tensors.keys() <= _BY_TOKEN or len(rows) > 1:
        return None
    if all(tensor.shape[0] <= _ROWS and tensor[0].numel() <= _TOKENS for tensor in tensors.values()):
        return None
    small = {
        name: tensor[:_ROWS] if tensor.dim() == 1 else tensor[:_ROWS, :_TOKENS] for name, tensor in tensors.items()
    }
    for name in small.keys() & {"attention_mask", "decoder_attention_mask"}:
        if small[name].dim() == 2:
            small[name] = torch.ones_like(small[name])
    if "labels" in small and not small["labels"].is_floating_point():
        small["labels"] = small["labels"].clamp(min=0)
    return {**kwargs, **small}


def made_up(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield made-up inputs that a model may accept, first those with labels. The model may also reject all of them."""
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    has_rest = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    inputs: dict[str, Any] = {}
    if "input_ids" in parameters:
        inputs["input_ids"] = _token_ids(config)
    elif "pixel_values" in parameters:
        inputs["pixel_values"] = _images(config)
    if not inputs:
        return
    # As calls for training get it. An adapter passes it on without having it among its parameters.
    inputs |= {"use_cache": False} if "use_cache" in parameters else CacheSwitch(model).off((), inputs)
    if "labels" in parameters or has_rest:
        if "input_ids" in inputs:
            if likely := _likely.get():
                labels = inputs["input_ids"].clone()
                yield {**inputs, "labels": labels, **{name: _LIKELY[name](labels) for name in likely}}
            if "decoder_input_ids" in parameters:
                yield {
                    **inputs,
                    "decoder_input_ids": inputs["input_ids"].clone(),
                    "labels": inputs["input_ids"].clone(),
                }
            yield {**inputs, "labels": inputs["input_ids"].clone()}
        yield {**inputs, "labels": torch.zeros(_ROWS, dtype=torch.long)}
    yield inputs


def _token_ids(config: Any) -> torch.Tensor:
    """Return token ids without those that have a special meaning in the config (padding, begin of sequence)."""
    text = getattr(config, "text_config", None) or config
    size = getattr(text, "vocab_size", None)
    size = size if isinstance(size, int) and size > 1 else 100
    special = (
        {
            value
            for part in (config, text)
            for name, value in vars(part or object()).items()
            if "token" in name and isinstance(value, int)
        }
        if config is not None
        else set()
    )
    plain = [token for token in range(min(size, 64)) if token not in special] or [0]
    return torch.tensor(plain).repeat(-(-_ROWS * _TOKENS // len(plain)))[: _ROWS * _TOKENS].view(_ROWS, _TOKENS)


def _images(config: Any) -> torch.Tensor:
    size = getattr(config, "image_size", None) or 32
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", None) or 3
    return torch.linspace(-1, 1, _ROWS * channels * height * width).view(_ROWS, channels, height, width)
