"""Weights in host memory for the vLLM server that generates for a trainer of TRL.

TRL walks over the parameters of the model that it was constructed with and sends one after the other. HandedOver stands
in for that model. Does not import TRL, and knows nothing of the server.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model  # type: ignore[import-untyped]
from torch import nn

from roundpipe.api.proxy import ModelProxy
from roundpipe.errors import ConfigError

_MODULE_OF_TRL = "trl.generation.vllm_generation"


@contextlib.contextmanager
def client_on(device: torch.device) -> Iterator[None]:
    """Make a client that TRL constructs inside the block send weights from `device`.

    TRL sends them from `accelerator.device`, which is the host, and vLLM receives from GPUs alone.
    """
    module: Any = sys.modules.get(_MODULE_OF_TRL)
    if module is None:
        yield
        return
    given: Any = module.VLLMClient

    class Client(given):  # type: ignore[misc]
        def init_communicator(self, *args: Any, **kwargs: Any) -> None:
            super().init_communicator(device=device)

    module.VLLMClient = Client
    try:
        yield
    finally:
        module.VLLMClient = given


class HandedOver:
    """A wrapped model as TRL reads it to send its weights: the newest ones, one by one, on `device`.

    TRL merges an adapter into the whole model and takes it out again. Here each module is merged in a copy of its
    weights while they are sent, so no weight changes, and host memory holds one module twice, not the model.
    """

    def __init__(self, model: ModelProxy, device: torch.device) -> None:
        """Raises ConfigError for a model whose weights vLLM cannot take."""
        self._model, self._device = model, device
        self._sites = _outermost_adapted(model.original_model)
        self._check()

    def _check(self) -> None:
        plain: Any = self._model.original_model
        for name, parameter in plain.named_parameters():
            if not parameter.is_floating_point():
                raise ConfigError(
                    f"use_vllm=True does not go with weights in few bits, and {name} is {parameter.dtype}; use the "
                    "model in bfloat16, or use_vllm=False."
                )
        if is_peft_model(plain) and not hasattr(plain.base_model, "merge_adapter"):
            raise ConfigError(
                f"use_vllm=True needs an adapter that can be merged, and {plain.active_peft_config.peft_type.value} "
                "cannot; use LoRA, or use_vllm=False."
            )
        owners: dict[int, str] = {}
        for path, site in self._sites.items():
            for name, parameter in site.named_parameters():
                if owners.setdefault(id(parameter), path) != path:
                    raise ConfigError(
                        f"use_vllm=True: {path} and {owners[id(parameter)]} share {name} and have an adapter each, "
                        "which cannot be merged one by one; leave one of them out of target_modules."
                    )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the model: TRL asks whether it is a PeftModel."""
        return type(self._model.original_model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.original_model, name)

    def merge_adapter(self) -> None:
        """Do no more than peft's check: `named_parameters` merges."""
        self._check_merge_allowed()

    def unmerge_adapter(self) -> None:
        """Do nothing: the model was not changed."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters after the newest step, adapters merged. The device holds one of them at a time."""
        self._model.synchronize()
        plain = self._model.original_model
        site, merged = "", dict[int, torch.Tensor]()
        for name, parameter in plain.named_parameters():
            inside = next((path for path in self._sites if name.startswith(f"{path}.")), "")
            if inside != site:
                site = inside
                merged = _merged(self._sites[site]) if site else {}
            value = merged.get(id(parameter), parameter.data)
            yield name, nn.Parameter(value.to(self._device), requires_grad=False)


def _outermost_adapted(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with adapters by their paths, without those inside of others."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return {}
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_inside = path.startswith(tuple(f"{outer}." for outer in found))
        if isinstance(module, BaseTunerLayer) and not is_inside:
            found[path] = cast(nn.Module, module)
    return found


@torch.no_grad()
def _merged(site: nn.Module) -> dict[int, torch.Tensor]:
    """What peft's merge() makes of a module's weights, by the ids of its parameters. The weights themselves stay."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in site.modules() if isinstance(module, BaseTunerLayer)]
    kept: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in layers[-1].get_base_layer().modules():
        kept += [(module, name, value) for name, value in module._parameters.items() if value is not None]
    copies = [nn.Parameter(value.detach().clone(), requires_grad=False) for _, _, value in kept]
    try:
        for (module, name, _), copy in zip(kept, copies, strict=True):
            module._parameters[name] = copy
        for layer in layers:
            layer.merge()
        found = {
            id(value): module._parameters[name].detach().clone()  # type: ignore[union-attr]
            for module, name, value in kept
        }
        for layer in layers:
            layer.unmerge()
    finally:
        for module, name, value in kept:
            module._parameters[name] = value
    return found
