"""What a training step of a model would take on a machine, without the model's weights and without the machine.

Reading order: figures (what GPUs do), meter (costs of operations), layer_costs (costs of layers), estimate.
"""
