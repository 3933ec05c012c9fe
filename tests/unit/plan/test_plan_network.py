"""The forecast of steps on several machines: one thread exchanges gradients and weights, layer after layer."""

from __future__ import annotations

from roundpipe.plan.forecast import Network, exchanged_update_s


def test_one_exchange_takes_its_bytes_its_latency_and_its_messages() -> None:
    network = Network(4, 100.0, latency_s=2.0, message_s=0.5)
    assert network.exchange_s(800) == 800 * 3 / 4 / 100 + 2.0 + 3 * 0.5
    assert network.exchange_s(0) == 0.0
    assert Network(1, 100.0).exchange_s(800) == 0.0


def test_a_single_layer_is_fetched_updated_and_gathered() -> None:
    assert exchanged_update_s([(0, 10.0)], [3.0], [2.0], [4.0]) == 10 + 2 + 3 + 4


def test_no_layer_takes_no_time() -> None:
    assert exchanged_update_s([], [], [], []) == 0.0


def test_the_next_gradients_travel_while_a_layer_is_updated() -> None:
    # Layer 1 is final at 0: fetched 0-2, updated 2-5. Layer 0 is final at 0: fetched 2-4, updated 5-8.
    # The weights of layer 1 travel 5-7, those of layer 0 8-10.
    assert exchanged_update_s([(1, 0.0), (0, 0.0)], [3.0, 3.0], [2.0, 2.0], [2.0, 2.0]) == 10.0


def test_a_slow_network_is_busy_without_a_pause() -> None:
    layers = [(layer_id, 0.0) for layer_id in reversed(range(5))]
    # Every update is over while other layers travel, the last one beside the weights of the layer before it.
    assert exchanged_update_s(layers, [0.1] * 5, [2.0] * 5, [2.0] * 5) == 2 * 5 * 2.0


def test_layers_that_become_final_late_hide_the_exchange_of_earlier_ones() -> None:
    layers = [(layer_id, 10.0 * number) for number, layer_id in enumerate(reversed(range(5)))]
    assert (
        exchanged_update_s(layers, [1.0] * 5, [2.0] * 5, [2.0] * 5) == 40 + 2 + 2 + 2
    )  # fetch, weights of layer 1, of layer 0
