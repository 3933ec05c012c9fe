"""Data parallelism over several machines on torch.distributed: the optimizer is divided between their host memories.

Every machine runs one process with the same script and its own part of every batch, and passes a process group when it
wraps the model. All machines hold all weights; each holds 1/N of masters and moments. How it works:

1. `Machines` (machines.py) belongs to one Group of models. It opens two gloo groups, one `Line` (line.py) each, with
   one thread each: `calls` for calls of the API, `steps` for optimizer steps. The user's collectives stay apart.
2. Every call begins with a header on `calls`: its kind, model, generation, version of the weights. A call that differs,
   or that has failed on one machine, raises MachineError on all machines in the same place ([Note: slots] in line.py).
   So do other settings, of the call or of the optimizer, on one machine ([Note: equal settings] in settings.py).
3. A call of a batch exchanges rows, label counts and numbers of microbatches, so shares and random streams are those of
   the whole batch. `forward_backward` returns the sum of the losses of all machines.
4. A step (`Exchange`, exchange.py) exchanges gradients layer by layer from the last layer on, when they have landed:
   each machine gets its range of each parameter from all machines. The kernel adds them in the order of ranks, updates
   the range, and the ranges of the new weights are exchanged. The next layer's gradients travel meanwhile.
5. Clipping and unscaling exchange one number per parameter. Reading `.grad` of a master exchanges that gradient, so all
   machines must do it. Optimizers other than roundpipe.optim update whole masters on every machine.
6. A machine that fails tells the others in its next header. A machine that ends closes its connections. Both end the
   call or step everywhere with the rank and the reason. A failed step leaves equal weights on all machines.
7. All sums have a fixed order, so for a given number of machines timing never changes a bit.

For code on top of this: `model._engine.group.machines` is None for a model that trains alone. Otherwise it has `share`
(rank, size, ranges), `agree(what, payload)` for small values of all machines (all must call it), and `sent_bytes`,
`received_bytes`. The range that a machine has of a master is `master.share.range_of(master.numel())` in the order of
memory; `master.halves.own_values()` are its values. Moments in `optimizer.state` are flat tensors of this range.
"""

from roundpipe.distributed.machines import Machines

__all__ = ["Machines"]
