"""Mixtures of experts: router losses, experts without tokens, and routes that recomputation must not choose anew.

Everything but the noise is exact. Recomputation on a GPU may differ from forward in the last bits; here a router is
made to see other weights when it is recomputed, and experts that are nearly equal, so that it would choose otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Batch, assert_close_grads, labelled, livened, plain_loss, small, train_call, wrapped
from tiny_cases import case_named, decode_batch
from torch import Tensor, nn

from helpers_parity import assert_same, assert_same_grads, grads_of, split
from helpers_slow import slow_except
from roundpipe import ModelExecutePlan, doing_recompute
from roundpipe.split import layers as split_layers

pytest.importorskip("transformers")

NUM_EXPERTS = 12
COUNTS = {
    "mixtral": "num_local_experts",
    "qwen3_moe": "num_experts",
    "gpt_oss": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
}
ROUTERS = {"mixtral": "gate", "qwen3_moe": "gate", "gpt_oss": "router", "deepseek_v3": "gate"}
WITH_LOSS = ("mixtral", "qwen3_moe", "gpt_oss")
# Four layers, the last of which has no experts; all others are recomputed.
RECOMPUTED = ModelExecutePlan([range(3)], [range(3, 4), range(3)])


def experts(model_type: str, **config: Any) -> nn.Module:
    return small(model_type, **{COUNTS[model_type]: NUM_EXPERTS}, **config)


def with_router_loss(model_type: str, **config: Any) -> nn.Module:
    return experts(model_type, output_router_logits=True, router_aux_loss_coef=0.5, **config)


def routers(model: nn.Module, model_type: str) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(f"mlp.{ROUTERS[model_type]}")]


def used_experts(model: nn.Module) -> Tensor:
    """[layers, experts]: whether an expert has a gradient."""
    grads = [p.grad for name, p in model.named_parameters() if name.endswith("mlp.experts.down_proj")]
    return torch.stack([grad.flatten(1).any(1) for grad in grads])


# Gradients.


@pytest.mark.parametrize("model_type", COUNTS)
def test_experts_without_tokens_have_the_gradient_of_the_plain_model(model_type: str) -> None:
    """Some get a token in one of the microbatches, some in none."""
    plain, batch = experts(model_type), labelled(model_type, 3, 3)
    with wrapped(copy.deepcopy(plain), 3) as model:
        for _ in range(2):
            assert_same(train_call(model, batch, 3), plain_loss(plain, batch, 3), "loss")
        assert_same_grads(model.original_model, plain)
    used = used_experts(plain)
    assert 0 < used.sum() < used.numel(), "all or none are used"


def test_experts_that_are_modules_have_no_gradient_where_plain_ones_have_none() -> None:
    plain, batch = module_experts(router_jitter_noise=0.0)
    with wrapped(copy.deepcopy(plain)) as model:
        assert_same(train_call(model, batch), plain_loss(plain, batch), "loss")
        assert_close_grads(model.original_model, plain, 1e-6)  # shared embeddings are summed per layer
        found, expected = grads_of(model.original_model), grads_of(plain)
    exact = {name for name in expected if "shared" not in name}
    assert_same({name: found[name] for name in exact}, {name: expected[name] for name in exact})
    unused = [name for name, grad in expected.items() if "expert" in name and grad is None]
    assert 0 < len(unused) < sum("expert" in name for name in expected)


def module_experts(**config: Any) -> tuple[nn.Module, Batch]:
    """Two rows, so that some experts get nothing."""
    case = case_named("switch_transformers:SwitchTransformersForConditionalGeneration")
    case = dataclasses.replace(case, config={**case.config, **config})
    batch = {name: v[:2] if isinstance(v, Tensor) else v for name, v in decode_batch(case.inputs).items()}
    return livened(case.build_model()), batch


# The router's own loss.


@pytest.mark.parametrize("model_type", WITH_LOSS)
def test_the_routers_loss_is_that_of_the_plain_model(model_type: str) -> None:
    plain, batch = with_router_loss(model_type), labelled(model_type)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][2:, 5:] = 0  # padding does not count for it
    with wrapped(copy.deepcopy(plain), 3) as model:
        loss = train_call(model, batch)
        assert_same(loss, plain_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)
    assert (loss - plain_loss(experts(model_type), batch)).abs() > 0.1, "it does not count"


def test_the_routers_loss_and_logits_are_returned_by_microbatch() -> None:
    plain, batch = with_router_loss("mixtral"), labelled("mixtral")
    with wrapped(copy.deepcopy(plain)) as model, torch.no_grad():
        found = model(**batch)  # three microbatches of two, one and one rows
        parts = [plain(**part, use_cache=False) for part in split(batch, 3)]
    first, second, third = (part.aux_loss * share for part, share in zip(parts, (0.5, 0.25, 0.25), strict=True))
    assert_same(found.aux_loss, first + second + third, "aux_loss")
    assert_same(found.router_logits[1], torch.cat([part.router_logits[1] for part in parts]), "router logits")


def test_a_call_may_turn_the_routers_loss_on() -> None:
    plain, batch = experts("mixtral", router_aux_loss_coef=0.5), labelled("mixtral")
    with wrapped(copy.deepcopy(plain)) as model:
        without = train_call(model, batch)
        batch["output_router_logits"] = True
        loss = train_call(model, batch)
        plain_loss(plain, labelled("mixtral"))
        assert_same(loss, plain_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)
        assert not torch.equal(loss, without)


# Routes.


@dataclasses.dataclass
class Routes:
    """By a digest of a router's input: the experts chosen in the forward pass and in the recomputation."""

    forward: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    recomputed: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    def note(self, hidden: Tensor, chosen: Tensor) -> None:
        with self.lock:
            found = self.recomputed if doing_recompute() else self.forward
            found[hashlib.sha256(hidden.detach().numpy().tobytes()).hexdigest()] = chosen.detach().clone()

    def num_changed(self) -> int:
        """Return how many tokens went to other experts when recomputed."""
        pairs = [(self.forward[key], found) for key, found in self.recomputed.items()]
        return sum(int((one.sort(-1).values != other.sort(-1).values).any(-1).sum()) for one, other in pairs)


def let_experts_nearly_tie(model: nn.Module, model_type: str) -> None:
    with torch.no_grad():
        for router in routers(model, model_type):
            noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(2))
            router.weight.copy_(router.weight[:1] + 1e-4 * noise)
            if "bias" in router._parameters:
                router.bias.zero_()


@pytest.fixture
def run_noisily(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Routes, nn.Module, nn.Module]]:
    """One training call whose routers see other weights when recomputed; the wrapped model and the plain one."""

    def run(model_type: str) -> tuple[Routes, nn.Module, nn.Module]:
        plain, batch = experts(model_type), labelled(model_type, 4, 6)
        let_experts_nearly_tie(plain, model_type)
        expected = plain_loss(plain, batch)
        router_class = type(routers(plain, model_type)[0])
        routes, forward = Routes(), router_class.forward

        def noisy(self: nn.Module, hidden: Tensor) -> Any:
            seen = self
            if doing_recompute():
                seen = copy.copy(self)
                noise = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(4))
                seen.__dict__["_parameters"] = {**self._parameters, "weight": self.weight + 1e-3 * noise}
            found = forward(seen, hidden)
            routes.note(hidden, found[2])
            return found

        monkeypatch.setattr(router_class, "forward", noisy)
        with wrapped(copy.deepcopy(plain).requires_grad_()) as model:
            assert model.num_layers == 4
            routes.forward.clear()
            # Layer by layer each gets the input its forward had, not what noise has made of it.
            loss = train_call(model, batch, execute_plan=RECOMPUTED, recompute_grain="layer")
            assert_same(loss, expected, "loss")
            assert len(routes.recomputed) == 2 * len(routers(plain, model_type)), "not all were recomputed"
        return routes, model.original_model, plain

    return run


@pytest.mark.parametrize("model_type", COUNTS)
def test_recomputation_sends_tokens_where_forward_sent_them(model_type: str, run_noisily: Any) -> None:
    routes, ours, plain = run_noisily(model_type)
    assert routes.num_changed() == 0
    assert_same(used_experts(ours), used_experts(plain), "experts with a gradient")
    # The weights of the routes differ by the noise, a thousandth, and with them all gradients.
    assert_close_grads(ours, plain, 0.05)


class NothingKept:
    """In place of KeptRoutes."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass

    def save(self) -> None:
        pass


@pytest.mark.parametrize("model_type", COUNTS)
def test_without_kept_routes_recomputation_chooses_other_experts(
    model_type: str, run_noisily: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise is large enough to change routes, so the test above is meaningful."""
    monkeypatch.setattr(split_layers, "KeptRoutes", NothingKept)
    routes, ours, plain = run_noisily(model_type)
    assert routes.num_changed() > 10
    with pytest.raises(AssertionError, match="gradient of"):
        assert_close_grads(ours, plain, 0.05)


def test_routes_are_kept_for_each_microbatch_and_grain() -> None:
    """Without noise kept routes change nothing, however layers are recomputed."""
    plain, batch = with_router_loss("qwen3_moe"), labelled("qwen3_moe", 6, 5)
    expected = plain_loss(plain, batch, 3)
    for num_devices, grain in ((1, "stage"), (3, "layer"), (2, "stage")):
        with wrapped(copy.deepcopy(plain).requires_grad_(), num_devices) as model:
            model.zero_grad()
            loss = train_call(model, batch, 3, recompute_grain=grain, execute_plan=RECOMPUTED)
            assert_same(loss, expected, "loss")
            assert_same_grads(model.original_model, plain)


# Noise that a router draws itself.


@pytest.mark.parametrize("model_type", slow_except(("mixtral",), ("mixtral", "switch_transformers")))
def test_jitter_of_a_router_is_drawn_again_in_recomputation(model_type: str) -> None:
    """Jitter is random like dropout: with the same seed it is the same on any number of devices."""

    def build() -> tuple[nn.Module, Batch]:
        if model_type == "mixtral":
            return experts("mixtral", router_jitter_noise=0.1), labelled("mixtral")
        return module_experts(router_jitter_noise=0.1)

    found = []
    for num_devices, seed in ((1, 3), (3, 3), (1, 4)):
        module, batch = build()
        with wrapped(module, num_devices) as model:
            torch.manual_seed(seed)
            found.append((train_call(model, batch), grads_of(model.original_model)))
    assert_same(found[1], found[0])
    assert not torch.equal(found[2][0], found[0][0]), "there is no jitter"
