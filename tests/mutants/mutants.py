"""The deliberate faults: where each is put, and the tests that must fail with it.

`old` must be in the source exactly once. Keep it short, so that it survives changes around it. Name the fastest tests
that notice the fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

RUNTIME = "tests/unit/runtime/"
STAGE, WEIGHTS = f"{RUNTIME}test_stage.py", f"{RUNTIME}test_weights.py"
GRADIENTS, MAILBOX = f"{RUNTIME}test_gradients.py", f"{RUNTIME}test_mailbox.py"
SLOT, GATES = "tests/unit/store/test_slot_rules.py", "tests/unit/store/test_store_gates.py"
FUSED, FORWARD = "tests/parity/test_fused_training.py", "tests/parity/test_forward.py"
STALENESS = f"{FUSED}::test_weights_after_steps_equal_a_reference_of_exact_staleness"
BUFFERS, RANDOM = "tests/parity/test_buffers.py", "tests/parity/test_random_numbers.py"
ONE_PASS = "tests/parity/test_one_pass_training.py"
SHORT = "tests/parity/test_short_masters.py"
SHARE = "tests/unit/optim/test_device_share.py"
LOSSES = "tests/parity/test_loss_reduction.py"
LATE_COPIES = "tests/faults/test_late_copies.py::test_every_order_of_copies_gives_the_same_bits"
FAILURES = "tests/faults/test_failures_at_every_point.py"
STEP_FAILS = f"{FAILURES}::test_step_fn_fails"
BY_LAYER, BY_LAYER_FAILS = "tests/parity/test_steps_by_layer.py", "tests/faults/test_steps_by_layer_fail.py"
TAIL, KERNEL = "tests/parity/test_tail.py", "tests/unit/optim/test_one_pass_kernel.py"
OVERLAP, CALLS = "tests/faults/test_step_overlap.py", "tests/faults/test_overlapping_calls.py"


class Mutant(NamedTuple):
    name: str
    file: str  # below src/roundpipe, as a hint: a text that has moved is found where it is now
    old: str
    new: str
    tests: tuple[str, ...]

    def place(self, package: Path) -> Path:
        """The file of the package that has the text, exactly once."""
        hinted = package / self.file
        counts = {path: path.read_text(encoding="utf-8").count(self.old) for path in sorted(package.rglob("*.py"))}
        if counts.get(hinted) == 1:
            return hinted
        found = [path for path, count in counts.items() if count]
        if len(found) != 1 or counts[found[0]] != 1:
            raise LookupError(f"the text is {sum(counts.values())} times in the source; adapt `old` to {self.file}")
        return found[0]

    def applied(self, path: Path) -> str:
        """The text of the file with the fault. A fault that is no Python would be noticed by any test."""
        changed = path.read_text(encoding="utf-8").replace(self.old, self.new)
        compile(changed, str(path), "exec")
        return changed


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, file, old, new, tests)


STREAMS = [
    mutant(
        "compute does not wait for the upload of weights",
        "runtime/replica.py",
        "self._device.stream_wait(StreamKind.COMPUTE, image.uploaded)",
        "pass",
        WEIGHTS,
        STAGE,
    ),
    mutant(
        "compute does not wait for the upload of activations",
        "runtime/transfer.py",
        "device.stream_wait(StreamKind.COMPUTE, device.record(stream))",
        "device.record(stream)",
        MAILBOX,
    ),
    mutant(
        "an upload does not wait for the download on another device",
        "runtime/transfer.py",
        "            device.stream_wait(stream, event)\n",
        "            pass\n",
        MAILBOX,
    ),
    mutant(
        "a download of activations does not wait for compute",
        "runtime/transfer.py",
        "StreamKind.ACTIVATIONS_DOWN\n        device.stream_wait(stream, device.record(StreamKind.COMPUTE))",
        "StreamKind.ACTIVATIONS_DOWN",
        STAGE,
    ),
    mutant(
        "a download of gradients does not wait for compute",
        "runtime/transfer.py",
        "device.stream_wait(stream, device.record(StreamKind.COMPUTE))\n        device.copy(host, gradients, stream)",
        "device.copy(host, gradients, stream)",
        STAGE,
        GRADIENTS,
    ),
    mutant(
        "compute overwrites an input that is being downloaded",
        "runtime/stage.py",
        "        if behaviour.changes_input:\n            self._runner.transfer.let_downloads_finish_first()",
        "",
        STAGE,
        LATE_COPIES,
    ),
    mutant(
        "device memory is written again before its readers have passed",
        "runtime/transfer.py",
        "self._device.stream_wait(self._writer, event)",
        "pass",
        WEIGHTS,
        GRADIENTS,
    ),
    mutant(
        "the end of compute on an image is not recorded",
        "runtime/replica.py",
        "[self._device.record(StreamKind.COMPUTE), image.uploaded]",
        "[image.uploaded]",
        WEIGHTS,
    ),
    mutant(
        "memory that is used again is not poisoned",
        "runtime/transfer.py",
        "self._device.poison(buffer, self._writer)",
        "pass",
        WEIGHTS,
    ),
    mutant(
        "host memory of gradients is not poisoned",
        "runtime/transfer.py",
        "device.poison(host, stream)",
        "pass",
        GRADIENTS,
    ),
    mutant(
        "weight memory is not lent to compute",
        "runtime/transfer.py",
        "self._device.lend(buffer, self._reader)",
        "pass",
        WEIGHTS,
    ),
    mutant(
        "uploaded activations are not lent to compute",
        "runtime/transfer.py",
        "device.lend(copy, StreamKind.COMPUTE)",
        "pass",
        MAILBOX,
    ),
    mutant(
        "gradients land before they have come down",
        "runtime/gradients.py",
        "landing.arrived.wait()",
        "pass",
        LATE_COPIES,
    ),
    mutant(
        "the caller reads losses before they have come down",
        "api/calls.py",
        "        values.event.wait()\n",
        "        pass\n",
        LATE_COPIES,
    ),
    mutant(
        "layers of a backward by layer are uploaded in forward order",
        "runtime/replica.py",
        "reversed(task.layers) if by_layer else task.layers",
        "task.layers",
        WEIGHTS,
    ),
]

VERSIONS = [
    mutant(
        "calls after an asynchronous step read the newest version",
        "optim/stepper.py",
        "number - 1 if mode is StepMode.STALE else number",
        "number",
        STALENESS,
    ),
    mutant(
        "an asynchronous step writes over the version that calls read",
        "store/weights.py",
        "newest.other if has_two else WeightBuffer.FRONT",
        "newest",
        STALENESS,
    ),
    mutant(
        "weights are written while uploads of the old version are due",
        "store/weights.py",
        "all(due >= version or due in elsewhere for _, due in self._uploads_due)",
        "True",
        SLOT,
    ),
    mutant(
        "weights are written before the uploads that were issued have run",
        "store/weights.py",
        "failure = _wait_for_all(events)  # outside",
        "failure = None  # outside",
        GATES,
    ),
    mutant(
        "an upload begins before the optimizer has written the version",
        "store/weights.py",
        "return self.buffer_of(version) is not None",
        "return True",
        SLOT,
        WEIGHTS,
    ),
    mutant(
        "the buffers' versions do not change places",
        "store/weights.py",
        "self._held.reverse()",
        "pass",
        SLOT,
    ),
    mutant(
        "gradients are consumed before all have landed",
        "store/weights.py",
        " and all(due != generation for _, due in self._landings_due)",
        "",
        SLOT,
    ),
    mutant(
        "calls land in the order in which they finish",
        "store/weights.py",
        "next((due for due, of in self._landings_due if of == generation), call) == call",
        "True",
        SLOT,
    ),
    mutant(
        "gradients land in a stale generation",
        "store/weights.py",
        "if self.open_generation != generation:",
        "if False:",
        SLOT,
    ),
    mutant(
        "a failed asynchronous step is published",
        "store/store.py",
        "self._store.weights.revoke(self._layer_id, self._version, self._target)",
        "self._complete_weights()",
        OVERLAP,
    ),
    mutant(
        "a frozen buffer is the user's tensor and not a copy",
        "store/records.py",
        "current.detach().clone(), current, version",
        "current.detach(), current, version",
        BUFFERS,
    ),
]

GRADIENT_SUMS = [
    mutant(
        "the gradient of one parameter is dropped",
        "runtime/gradients.py",
        "enumerate(self._gathered) if gradient is not None]",
        "enumerate(self._gathered) if gradient is not None][1:]",
        GRADIENTS,
    ),
    mutant(
        "the gradient of a microbatch replaces those before it",
        "runtime/gradients.py",
        "stand_ins[i].grad = gradients[i] = views[i]",
        "stand_ins[i].grad, gradients[i] = None, views[i]",
        GRADIENTS,
        STAGE,
    ),
    mutant(
        "the gradients of one layer never land",
        "runtime/run.py",
        "for i in task.layers if settings[i].trains)",
        "for i in task.layers if i and settings[i].trains)",
        STAGE,
    ),
    mutant(
        "a gradient is added twice",
        "store/store.py",
        "torch._foreach_add_([total for total, _ in later], [gradient for _, gradient in later])",
        "torch._foreach_add_([total for total, _ in later], [gradient for _, gradient in later], alpha=2)",
        GRADIENTS,
    ),
    mutant(
        "parts of a shared parameter are summed from the first layer on",
        "runtime/gradients.py",
        "sorted(parts.items(), reverse=True)",
        "sorted(parts.items())",
        GRADIENTS,
    ),
    mutant(
        "a part of a shared parameter lies in memory that is used again",
        "runtime/gradients.py",
        "gradient.tensor.clone()",
        "gradient.tensor",
        GRADIENTS,
    ),
    mutant(
        "gradients of a cancelled run are added",
        "store/store.py",
        "if cancelled():",
        "if False:",
        GRADIENTS,
    ),
    mutant(
        "landing memory is free while its sum is still used",
        "store/host_memory.py",
        "if not self.holders:",
        "if True:",
        GRADIENTS,
        ONE_PASS,
    ),
    mutant(
        "the tail sends gradients before its last microbatch",
        "runtime/stage.py",
        "self._is_last_microbatch = microbatch == microbatches[-1]",
        "self._is_last_microbatch = microbatch == microbatches[0]",
        STAGE,
        "tests/parity/test_tail.py::test_every_tail_trains_as_the_plain_module",
    ),
    mutant(
        "layers of the tail go backward microbatch by microbatch in reverse",
        "runtime/stage.py",
        "for microbatch in microbatches:\n                    self._place",
        "for microbatch in reversed(microbatches):\n                    self._place",
        STAGE,
        "tests/parity/test_tail.py::test_every_tail_trains_as_the_plain_module",
    ),
]

MICROBATCHES = [
    mutant(
        "microbatches are swapped",
        "microbatch/split.py",
        "[column[index] for column in columns]",
        "[column[-1 - index] for column in columns]",
        MAILBOX,
    ),
    mutant(
        "every microbatch has the labels of the first",
        "runtime/mailbox.py",
        "self._run.labels[microbatch]",
        "self._run.labels[0]",
        MAILBOX,
    ),
    mutant(
        "recomputation takes the input of another microbatch",
        "runtime/mailbox.py",
        "parcel = self._recall.inputs.pop((layer_id, microbatch))\n",
        "parcel = self._recall.inputs.pop((layer_id, self._run.num_microbatch - 1 - microbatch))\n",
        MAILBOX,
        FORWARD,
    ),
    mutant(
        "outputs are merged in reverse",
        "microbatch/merge.py",
        "torch.cat(list(values), dim=dim)",
        "torch.cat(list(values)[::-1], dim=dim)",
        "tests/unit/microbatch/test_merge_outputs.py",
    ),
    mutant(
        "the sizes of microbatches are counted wrongly",
        "microbatch/split.py",
        "(index < size % count)",
        "(index <= size % count)",
        "tests/unit/microbatch/test_rows.py",
        LOSSES,
    ),
    mutant(
        "a loss is not multiplied by its share",
        "microbatch/split.py",
        "if share == 0 else loss * share",
        "if share == 0 else loss",
        LOSSES,
    ),
    mutant(
        "the model's own loss has the share of the first microbatch",
        "microbatch/split.py",
        "share = _known(self.own)[microbatch]",
        "share = _known(self.own)[0]",
        LOSSES,
    ),
    mutant(
        "a loss without labels is NaN times zero",
        "microbatch/split.py",
        "_Zero.apply(loss) if share == 0 else loss * share",
        "loss * share",
        "tests/models/test_whole_batch_loss.py::"
        "test_a_microbatch_without_labels_adds_nothing_even_where_its_loss_is_nan",
    ),
]

RECOMPUTATION = [
    mutant(
        "recomputation draws other random numbers",
        "runtime/stage.py",
        "is_new = is_recomputed and not recall.preserve_rng_state",
        "is_new = is_recomputed",
        f"{RANDOM}::test_recomputation_draws_what_forward_drew",
    ),
    mutant(
        "all microbatches draw the same random numbers",
        "runtime/rng.py",
        "for part in (layer_id, microbatch, phase):",
        "for part in (layer_id, 0, phase):",
        f"{RANDOM}::test_calls_layers_and_microbatches_draw_differently",
    ),
    mutant(
        "layers draw from the caller's generator",
        "runtime/rng.py",
        'return func(*args, **{**kwargs, "generator": generator})',
        "return func(*args, **kwargs)",
        f"{RANDOM}::test_dropout_is_the_same_on_every_device_count",
        f"{RANDOM}::test_recomputation_draws_what_forward_drew",
    ),
    mutant(
        "the host gets the buffers of the first microbatch",
        "runtime/mailbox.py",
        "self._recall.writes_buffers and microbatch == self._run.num_microbatch - 1:",
        "self._recall.writes_buffers and microbatch == 0:",
        BUFFERS,
    ),
    mutant(
        "buffers that layers write do not reach the host",
        "api/failures.py",
        "                undo.append((record, record.frozen()))\n                record.write(value)\n",
        "                undo.append((record, record.frozen()))\n",
        BUFFERS,
    ),
    mutant(
        "microbatches do not see what earlier ones wrote into buffers",
        "runtime/mailbox.py",
        "            replica.set_buffers(after)\n",
        "            replica.set_buffers(self._as_call_began[layer_id])\n",
        BUFFERS,
    ),
    mutant(
        "attributes that recomputation sets stay",
        "runtime/replica.py",
        "            pair.drop_changes()\n",
        "            pair.write_back()\n",
        "tests/parity/test_looks_like_the_model.py",
        "tests/parity/test_tail.py::test_attributes_count_once",
    ),
    mutant(
        "a tensor in the layer's weights is handed on without a copy",
        "runtime/replica.py",
        "if not any(is_own):",
        "if True:",
        "tests/parity/test_values_between_layers.py",
        "tests/parity/test_unusual_layers.py",
    ),
    mutant(
        "layers do not run under the caller's autocast",
        "runtime/rng.py",
        "if enabled else contextlib.nullcontext()",
        "if not enabled else contextlib.nullcontext()",
        "tests/parity/test_calling_context.py::test_autocast_entered_by_the_caller_holds_in_layers_and_loss",
    ),
]

FAILING = [
    mutant(
        "a failure of the landing thread is swallowed",
        "runtime/gradients.py",
        "                landing.run.fail(error)\n",
        "                pass\n",
        GRADIENTS,
    ),
    mutant(
        "a failure of an asynchronous step is swallowed",
        "optim/stepper.py",
        "                self.errors.append(job.error)\n                if job.mode",
        "                if job.mode",
        STEP_FAILS,
    ),
    mutant(
        "a failure of the optimizer thread is swallowed",
        "optim/stepper.py",
        "            except BaseException as error:\n                job.error = error\n",
        "            except BaseException:\n                pass\n",
        STEP_FAILS,
    ),
    mutant(
        "a task does not see that its run has failed",
        "runtime/run.py",
        "            raise RunCancelled\n",
        "            pass\n",
        STAGE,
        WEIGHTS,
    ),
    mutant(
        "a step runs although its gradients are lost",
        "optim/stepper.py",
        "                    job.abandoned = True\n",
        "                    pass\n",
        f"{CALLS}::test_a_step_whose_gradients_are_lost_does_nothing",
        f"{CALLS}::test_of_two_pending_steps_only_the_one_with_gradients_runs",
    ),
    mutant(
        "calls that depend on a failed one go on",
        "api/failures.py",
        "other.fail(bad.failure)",
        "pass",
        CALLS,
    ),
    mutant(
        "buffers that a failed call has written stay",
        "api/failures.py",
        "                    record.write(before)\n",
        "                    pass\n",
        f"{FAILURES}::test_a_layer_or_loss_fails",
    ),
    mutant(
        "gradients of a failed call stay",
        "api/failures.py",
        "                store.gradients.drop()\n",
        "                pass\n",
        f"{FAILURES}::test_a_layer_or_loss_fails",
    ),
    mutant(
        "the weights of a failed task stay bound to the replica",
        "runtime/stage.py",
        "                layer.replica.unbind()\n",
        "                pass\n",
        STAGE,
    ),
    mutant(
        "a waiting thread is not woken",
        "monitor.py",
        "                sleeper.release()\n",
        "                pass\n",
        "tests/unit/test_monitor.py",
    ),
]

OPTIMIZER = [
    mutant(
        "the lock of an optimizer copy is not released",
        "optim/one_pass.py",
        "                    copy.lock.release()\n",
        "                    pass\n",
        f"{ONE_PASS}::test_a_bfloat16_model_with_our_optimizer",
    ),
    mutant(
        "GradScaler steps although gradients overflow",
        "optim/grad_scaler.py",
        "None if progress.found_inf else optimizer.step(*args, **kwargs)",
        "optimizer.step(*args, **kwargs)",
        "tests/unit/optim/test_grad_scaler.py",
        "tests/unit/optim/test_grad_scaler_in_loop.py",
    ),
    mutant(
        "the factor of clipping is ignored",
        "optim/gradients.py",
        "copy.scale_gradient(float(factor))",
        "pass",
        f"{ONE_PASS}::test_clipping",
    ),
    mutant(
        "the factor of unscaling is ignored",
        "optim/gradients.py",
        "        copy.scale_gradient(factor)\n",
        "        pass\n",
        f"{ONE_PASS}::test_loss_scaling_in_all_kinds_of_steps",
    ),
    mutant(
        "Adam counts its steps from zero",
        "optim/rules.py",
        'return int(state["step"]) + 1 if state else 1',
        'return max(int(state["step"]), 1) if state else 1',
        f"{ONE_PASS}::test_a_bfloat16_model_with_our_optimizer",
    ),
    mutant(
        "Adam does not count its steps",
        "optim/one_pass.py",
        'counts = [each.state["step"] for each in ready if "step" in each.state]',
        "counts: list[Tensor] = []",
        f"{ONE_PASS}::test_a_bfloat16_model_with_our_optimizer",
    ),
    mutant(
        "the low halves of a master are dropped",
        "store/master.py",
        "torch.bitwise_or(upper << 16, lower, out=bits[piece])",
        "bits[piece] = upper << 16",
        "tests/unit/store/test_halved_master.py",
    ),
    mutant(
        "a value half way between two weights is rounded the other way",
        "store/master.py",
        "if is_tie.any():",
        "if False:",
        "tests/unit/store/test_halved_master.py",
    ),
    mutant(
        "masters of 24 bits are rounded to the nearest value",
        "store/values.py",
        "up = (old + (draws >> 24)) & ~0xFF",
        "up = (old + 0x80) & ~0xFF",
        "tests/unit/store/test_short_master.py",
    ),
    mutant(
        "every range of a master of 24 bits is rounded as the first one",
        "optim/native/kernel.py",
        "first=self.first,",
        "first=0,",
        "tests/machines/test_machines_parity.py::test_ranges_of_masters_of_24_bits",
    ),
    mutant(
        "without the kernel, updates that change nothing do not count as roundings",
        "optim/one_pass.py",
        "round_masters([param for _, param in rest])",
        "pass",
        f"{SHORT}::test_without_a_compiler",
    ),
    mutant(
        "what user code leaves in masters of 24 bits is not rounded",
        "store/master.py",
        "return self.rounding.round_like(self._weight, self.values())",
        "return False",
        f"{SHORT}::test_what_user_code_writes_into_masters_is_rounded_when_it_is_published",
    ),
    mutant(
        "a gradient that was not cleared is not added to",
        "store/master.py",
        "        if self.is_pending:\n            self._materialise()\n        self.source = self.record = None",
        "        self.source = self.record = None\n        self.is_pending = False",
        f"{ONE_PASS}::test_other_step_functions",
    ),
    mutant(
        "weights that the optimizer has not written are not published",
        "store/store.py",
        "if record not in self.updated or master.was_touched():",
        "if record in self.updated and master.was_touched():",
        STALENESS,
    ),
    mutant(
        "the update does not wait for what devices have updated",
        "optim/device_share.py",
        "self._device.record(stream).wait()",
        "pass",
        f"{SHARE}::test_pieces_have_the_bits_of_the_kernel",
    ),
    mutant(
        "devices round low bits by the number of the element in its piece",
        "optim/device_share.py",
        "parameter.first + start",
        "parameter.first",
        f"{SHARE}::test_pieces_have_the_bits_of_the_kernel",
    ),
]

SAVING, RESUME = "tests/checkpoint/test_saving.py", "tests/checkpoint/test_resume.py"

CHECKPOINTS = [
    mutant(
        "a step does not wait for layers that a checkpoint still reads",
        "store/store.py",
        "return self._gradients is not None and not self._store.is_held(self._layer_id)",
        "return self._gradients is not None",
        SAVING,
    ),
    mutant(
        "a folder gets its name before its manifest is written",
        "checkpoint/save.py",
        "        write_synced(self._partial / MANIFEST, manifest.to_bytes())\n",
        "        (self.folder.parent / 'spare').mkdir(exist_ok=True)\n"
        "        write_synced(self.folder.parent / 'spare' / MANIFEST, manifest.to_bytes())\n",
        SAVING,
    ),
    mutant(
        "files are not compared with their checksums",
        "checkpoint/verified.py",
        "if digest.hexdigest() != entry.sha256 or file.readinto(buffer[:1]):",
        "if False:",
        "tests/checkpoint/test_damage.py",
    ),
    mutant(
        "files that change after their verification are loaded",
        "checkpoint/verified.py",
        "if digest.digest() != file.states[at + 1].digest():",
        "if False:",
        "tests/checkpoint/test_damage.py",
    ),
    mutant(
        "tensors may share bytes of a file",
        "checkpoint/format.py",
        "            if start < end:\n",
        "            if False:\n",
        "tests/checkpoint/test_damage.py",
    ),
    mutant(
        "checkpoints are ordered by the clock",
        "checkpoint/format.py",
        "return self.sequence, self.saved_at_ns",
        "return self.saved_at_ns, self.sequence",
        SAVING,
    ),
    mutant(
        "folders with other content are replaced",
        "checkpoint/folders.py",
        "            _check_replaceable(target)\n",
        "            pass\n",
        SAVING,
    ),
    mutant(
        "settings of machines are not compared",
        "distributed/line.py",
        'if settings is not None and any(header["by"] != digest for header in headers):',
        "if False:",
        "tests/machines/test_differing_settings.py",
    ),
    mutant(
        "random numbers do not go on after a load",
        "checkpoint/load.py",
        "        if restore_rng:\n            set_random_states",
        "        if not restore_rng:\n            set_random_states",
        RESUME,
    ),
    mutant(
        "the number of roundings of a master is not loaded",
        "checkpoint/ranges.py",
        "master.rounding.count = self._roundings.get(name, 0)",
        "pass",
        f"{SHORT}::test_a_checkpoint_has_a_byte_per_value_and_a_resumed_run_the_same_bits",
    ),
    mutant(
        "ties of halved masters are not loaded",
        "checkpoint/ranges.py",
        "master.halves.ties.copy_(bits)",
        "pass",
        RESUME,
    ),
    mutant(
        "a resumed trainer makes its own number of microbatches",
        "integrations/trainer.py",
        'self.set_num_microbatch(self._number_for_machines(values["num_microbatch"], values.get("machines", 1)))',
        "pass",
        "tests/integrations/test_trainer_resume.py",
    ),
]

STEPS_BY_LAYER = [
    mutant(
        "a layer is published before all of its masters are updated",
        "store/update.py",
        "return bool(self.updated) and not waiting and",
        "return bool(self.updated) and",
        f"{BY_LAYER}::test_two_optimizers_that_share_layers",
    ),
    mutant(
        "calls after a step by layer read the weights before it",
        "optim/stepper.py",
        "number - 1 if mode is StepMode.STALE else number",
        "number if mode is StepMode.EXACT else number - 1",
        f"{BY_LAYER}::test_accumulation",
    ),
    mutant(
        "a write into a master after the update is not found out",
        "store/update.py",
        "return master.was_touched() and self._is_ahead(record)",
        "return False",
        f"{BY_LAYER_FAILS}::test_a_later_step_that_writes_a_master_raises",
    ),
    mutant(
        "a write that changes no value does not count in the first step",
        "store/update.py",
        "if not self._is_published and master.version",
        "if self._is_published and master.version",
        f"{BY_LAYER}::test_step_functions_that_write_masters_wait",
    ),
    mutant(
        "a second update in one step writes into published weights",
        "store/update.py",
        "        if self._is_published:\n            raise UsageError(",
        "        if False:\n            raise UsageError(",
        f"{BY_LAYER_FAILS}::test_a_later_step_that_updates_twice_raises",
    ),
    mutant(
        "a step that updates nothing decides that steps may publish by layer",
        "optim/stepper.py",
        "elif any(update.updated for update in updates):",
        "else:",
        f"{BY_LAYER}::test_a_first_step_that_updates_nothing_decides_nothing",
    ),
    mutant(
        "calls that read the weights of a failed step go on",
        "api/failures.py",
        "            for run in readers:\n                run.fail(cause)",
        "            pass",
        f"{BY_LAYER_FAILS}::test_a_step_that_fails_half_way_while_a_call_waits_for_it",
    ),
    mutant(
        "a run that begins after its step has failed is not failed",
        "api/failures.py",
        "if lost is not None and run.version >= lost[0]:",
        "if False:",
        f"{BY_LAYER_FAILS}::test_a_failed_step_is_raised_by_a_call_that_had_begun_before_it_failed",
    ),
    mutant(
        "gradients that were computed with the weights of a failed step are stepped with",
        "api/failures.py",
        "            self._stepper.abandon(version)\n",
        "",
        f"{BY_LAYER_FAILS}::test_a_step_function_that_raises_after_its_update",
    ),
    mutant(
        "runs that read the result of lost gradients go on",
        "api/failures.py",
        "reads_result = other.version > bad.generation and not other.finished",
        "reads_result = False",
        f"{BY_LAYER_FAILS}::test_a_failed_backward_is_raised_by_a_call_that_had_begun_before_it_failed",
    ),
    mutant(
        "an error of a step by layer is raised twice",
        "api/failures.py",
        "            self._stepper.was_raised(first)\n",
        "",
        f"{BY_LAYER_FAILS}::test_a_step_that_fails_half_way_while_a_call_waits_for_it",
    ),
    mutant(
        "the update begins with the layer that the next call needs last",
        "store/update.py",
        "update = ready[-1]",
        "update = ready[0]",
        f"{BY_LAYER}::test_the_next_call_waits_for_the_update_of_each_layer",
    ),
    mutant(
        "a layer that does not train waits for the whole step",
        "store/update.py",
        "if self._mode is StepMode.BY_LAYER and not self._records:",
        "if False:",
        f"{BY_LAYER}::test_the_next_call_waits_for_the_update_of_each_layer",
    ),
    mutant(
        "a wave mixes microbatches up",
        "runtime/stage.py",
        "begun = self._begun.pop(microbatch, None) or",
        "begun = self._begun.pop(max(self._begun, default=0), None) or",
        f"{TAIL}::test_every_wave_trains_as_the_plain_module",
    ),
    mutant(
        "the sum of squares forgets an earlier factor",
        "optim/gradients.py",
        "squares * math.prod(copy.factors) ** 2",
        "squares",
        f"{ONE_PASS}::test_loss_scaling_in_all_kinds_of_steps",
    ),
]

MUTANTS = [
    *(*STREAMS, *VERSIONS, *GRADIENT_SUMS, *MICROBATCHES, *RECOMPUTATION),
    *(*FAILING, *OPTIMIZER, *STEPS_BY_LAYER, *CHECKPOINTS),
]
