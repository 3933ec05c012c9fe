"""The command `roundpipe merge`: writes a model folder with a LoRA adapter merged into the weights.

peft computes every merged weight, module by module, so the result has the bits of `merge_and_unload`. The weights that
no adapter changes are copied. Host memory holds the adapter and the weights of one merged module, never the model.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.checkpoint.format import chunks, plain_values, raw_bytes, shard_header, sync_folder, write_synced
from roundpipe.checkpoint.original_form import TOKENIZER_FILES, files_of, give_original_form
from roundpipe.cli.adapters import (
    ADAPTER,
    ADAPTER_FILE,
    give_memory,
    outermost_modules,
    put_adapter,
    read_adapter_config,
)
from roundpipe.errors import ConfigError
from roundpipe.loading import (
    INDEX_FILE,
    Conversion,
    WeightFolder,
    conversions,
    empty_model,
    open_folder,
    require_fit,
    tensors_of,
)

# What the merged model has besides its weights. The adapter's tokenizer replaces the base's.
_OF_MODEL = ("config.json", "generation_config.json", "*.py", "LICENSE*", "USE_POLICY*", *TOKENIZER_FILES)


def run(words: Sequence[str]) -> int:
    """Merge an adapter and write the model. Raises ConfigError for folders that do not fit together."""
    options = parser().parse_args(list(words))
    adapter, out = Path(options.adapter), Path(options.out)
    config = read_adapter_config(adapter)
    base = base_folder(options.base, config, adapter)
    _check_out(out, base, adapter)
    model_config = _model_config(base, trust_remote_code=options.trust_remote_code)
    folder = open_folder(base, model_config)
    if folder.num_bytes > shutil.disk_usage(_existing(out)).free:
        raise ConfigError(
            f"--out {out} needs {folder.num_bytes / 1e9:.3f} GB of disk space, more than is free; free some, or give "
            "another --out."
        )
    model = empty_model(model_config, base, trust_remote_code=options.trust_remote_code)
    merger = Merger(folder, model, adapter)
    with _new_folder(out) as partial:
        merger.write(partial)
        _copy_files(base, adapter, partial, is_tied=not merger.untied, trust_remote_code=options.trust_remote_code)
    sys.stdout.write(
        f"merged {merger.num_merged} of {len(folder.shapes)} tensors ({folder.num_bytes / 1e9:.3f} GB); the model is "
        f"in {out}\n"
    )
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="roundpipe merge",
        description="Merge a LoRA adapter into the weights of its model and write the result as a model folder.",
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="folder of the adapter, such as --out of a run with --lora")
    parser.add_argument("--base", metavar="DIR", help="folder of the model; default: the one that the adapter names")
    parser.add_argument("--out", metavar="DIR", required=True, help="new folder for the merged model")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that the model's folder has"
    )
    return parser


# Folders.


def base_folder(given: str | None, config: Mapping[str, Any], adapter: Path) -> Path:
    """The folder of the model: the one that was given, or the one that the adapter names. Hub names are looked up."""
    name = given or config.get("base_model_name_or_path")
    if not name:
        raise ConfigError(f"{adapter} does not name its model; give --base DIR.")
    if Path(name).is_dir():
        if (Path(name) / ADAPTER_FILE).exists():
            raise ConfigError(f"--base: {name} is an adapter of peft, not a model; give the model's folder.")
        return Path(name)
    if Path(name).is_absolute() or name.startswith(".") or name.count("/") != 1:
        whose = "--base:" if given else f"{adapter} names the model {name}, but"
        raise ConfigError(f"{whose} there is no folder {name}; give the model's folder: --base DIR.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", INDEX_FILE, *_OF_MODEL]))
    except Exception as error:  # of the hub, the network and the cache
        raise ConfigError(
            f"there is no folder {name}, and the hub does not give it: {' '.join(str(error).split())}"
        ) from error


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def _check_out(out: Path, base: Path, adapter: Path) -> None:
    if out.resolve() in (base.resolve(), adapter.resolve()):
        raise ConfigError(f"--out {out} is the folder of the model or of the adapter; give a new one.")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"--out {out} exists; give a new folder.")
    existing = _existing(out)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: cannot write into {existing}.")


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` that becomes `out` if the block succeeds, and is removed if it fails."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        yield partial
        sync_folder(partial)
        partial.chmod(0o777 & ~_umask())
        os.replace(partial, out.absolute())
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tokenizer_of(trust_remote_code: bool, folder: Path) -> Any:
    """The tokenizer of a folder, or the processor that has it."""
    import transformers

    kind = transformers.AutoProcessor if files_of(folder, ("*processor_config.json",)) else transformers.AutoTokenizer
    return kind.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _copy_files(base: Path, adapter: Path, out: Path, *, is_tied: bool, trust_remote_code: bool) -> None:
    """Copy configuration and tokenizer.

    The config no longer names a quantisation: merged weights are plain. If input and output embeddings are no longer
    one, it says so.
    """
    for folder, patterns in ((base, _OF_MODEL), (adapter, TOKENIZER_FILES)):
        for file in files_of(folder, patterns):
            shutil.copyfile(file, out / file.name)
    if files_of(adapter, TOKENIZER_FILES):
        give_original_form(out, base, TOKENIZER_FILES, functools.partial(_tokenizer_of, trust_remote_code))
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    was_quantised = config.pop("quantization_config", None) is not None
    if not is_tied:
        config["tie_word_embeddings"] = False
        for part in config.values():
            if isinstance(part, dict) and "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
    if was_quantised or not is_tied:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# Merging.


class Merger:
    """A model without weights that has an adapter with weights, and what both become when they are merged.

    untied: parameters that the folder has no tensor for, because they were one with another, and that differ now.
    """

    def __init__(self, folder: WeightFolder, model: Any, adapter: Path) -> None:
        """model: that of the folder, on the meta device."""
        self.folder, self.model = folder, model
        self._conversions = conversions(self.model, folder.shapes)
        require_fit(self.model, self._conversions, folder.shapes, folder.path)
        give_memory(self.model, self._dtypes())
        # By all their names. A parameter with several names is one object: tied embeddings.
        self._parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters(remove_duplicate=False))
        wrapped, self._given = put_adapter(self.model, adapter, "--base", is_empty=True)
        wrapped.base_model._check_merge_allowed()
        self._sites = outermost_modules(self.model)
        self._parts = self._connected()
        self.untied = self._untied()
        self._part_of = {
            name: number for number, (found, _) in enumerate(self._parts) for each in found for name in each.tensors
        }
        for name, tensor in self.untied.items():
            home = self._home_of(name)
            self._part_of[tensor] = next(
                number
                for number, (found, _) in enumerate(self._parts)
                if any(home in each.parameters for each in found)
            )
        self._merged: dict[str, torch.Tensor] = {}

    @property
    def num_merged(self) -> int:
        """How many tensors of the folder the adapter changes."""
        return sum(len(each.tensors) for found, _ in self._parts for each in found)

    def _dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each parameter in the folder."""
        return {
            name: self.folder.shapes[each.tensors[0]].dtype for each in self._conversions for name in each.parameters
        }

    def _inside(self, path: str) -> list[str]:
        return [name for name in self._parameters if name.startswith(f"{path}.")]

    def _connected(self) -> list[tuple[list[Conversion], list[str]]]:
        """Conversions and adapter modules that must be computed together, as they share parameters."""
        parts: list[tuple[list[Conversion], list[str], set[int]]] = []
        members: list[tuple[list[Conversion], list[str], set[int]]] = [
            ([], [path], {id(self._parameters[name]) for name in self._inside(path)}) for path in self._sites
        ]
        members += [([], [], {id(self._parameters[name])}) for name in self._given]
        changed = set[int]().union(*(numbers for _, _, numbers in members))
        for each in self._conversions:
            numbers = {id(self._parameters[name]) for name in each.parameters if name in self._parameters}
            if numbers & changed:
                members.append(([each], [], numbers))
        for found, paths, numbers in members:
            touched = [part for part in parts if part[2] & numbers]
            parts = [part for part in parts if not part[2] & numbers]
            whole = [*touched, (found, paths, numbers)]
            parts.append(
                (
                    [each for part in whole for each in part[0]],
                    [path for part in whole for path in part[1]],
                    set[int]().union(*(part[2] for part in whole)),
                )
            )
        return [(found, paths) for found, paths, _ in parts]

    def _untied(self) -> dict[str, str]:
        """Names in the folder, by name in the model, of parameters that need a tensor of their own from now on."""
        untied = {}
        for name, parameter in self._parameters.items():
            if self._owner(name) is not self._owner(self._home_of(name)):
                untied[name] = next(iter(tensors_of({name: parameter.data}, self.model)))
        return untied

    def _home_of(self, name: str) -> str:
        """The name under which the folder has a parameter with several names."""
        same = [each for each, place in self._parameters.items() if place is self._parameters[name]]
        present = {each for found in self._conversions for each in found.parameters}
        return name if name in present else next(each for each in same if each in present)

    def _owner(self, name: str) -> nn.Parameter:
        """The parameter that has this name after merging: a trained copy, or that of the model."""
        from peft.utils.other import ModulesToSaveWrapper

        for path, module in self._sites.items():
            if name.startswith(f"{path}.") and isinstance(module, ModulesToSaveWrapper):
                trained: nn.Parameter = module.modules_to_save[ADAPTER].get_parameter(name.removeprefix(f"{path}."))
                return trained
        return self._parameters[name]

    def write(self, out: Path) -> None:
        """Write the files of the merged model: those of the folder, with the same tensors in each."""
        files = {name: list(names) for name, names in self.folder.shards.items()}
        last = list(files)[-1]
        shapes = dict(self.folder.shapes)
        for name, tensor in self.untied.items():
            files[last].append(tensor)
            shapes[tensor] = self._parameters[name].to("meta")
        for file, names in files.items():
            names.sort(key=lambda name: self._part_of.get(name, -1))  # tensors of one part follow each other
            self._write_file(out / file, [(name, shapes[name]) for name in names])
        if len(files) > 1 or (self.folder.path / INDEX_FILE).exists():
            total = sum(shape.nbytes for shape in shapes.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: file for file, names in files.items() for name in sorted(names)},
            }
            write_synced(out / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())

    def _write_file(self, path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        header, _ = shard_header([(name, shape.dtype, tuple(shape.shape)) for name, shape in tensors])
        with open(path, "xb") as file:
            file.write(header)
            for name, shape in tensors:
                value = plain_values(self._value(name))
                assert (value.shape, value.dtype) == (shape.shape, shape.dtype), name
                for chunk in chunks(raw_bytes(value)):
                    file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def _value(self, name: str) -> torch.Tensor:
        """A tensor of the merged model, by its name in the folder."""
        if name in self._part_of and name not in self._merged:
            self._merged |= self._compute(*self._parts[self._part_of[name]])
        return self._merged.pop(name) if name in self._merged else self.folder.read(name)

    @torch.no_grad()
    def _compute(self, found: Sequence[Conversion], paths: Sequence[str]) -> dict[str, torch.Tensor]:
        """The merged tensors of one part, by their names in the folder."""
        places = {name: self._parameters[name] for each in found for name in each.parameters}
        empty = {name: place.data for name, place in places.items()}
        for each in found:
            read = [self.folder.read(name).clone() for name in each.tensors]
            for name, value in each.to_parameters(read, self.model).items():
                places[name].data = self._given.get(name, value)
        modules = {path: _merged_module(self._sites[path]) for path in paths}
        # After all modules are merged: several may change one parameter.
        values = {name: place.data for name, place in places.items()}
        for path, module in modules.items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                values[f"{path}.{name}"] = parameter.data
        merged: dict[str, torch.Tensor] = {}
        for each in found:
            written = each.to_tensors(values, self.model)
            if written.keys() != set(each.tensors):
                raise ConfigError(
                    f"{self.folder.path} has {each.tensors[0]}, which transformers writes as {min(written)}: load and "
                    "save the model once with from_pretrained() and save_pretrained(), then merge into the result."
                )
            merged |= written
        numbers = {id(place) for place in places.values()}
        for name, tensor in self.untied.items():
            if id(self._parameters[name]) in numbers:
                merged[tensor] = values.get(name, self._parameters[name].data)
        for name, place in places.items():
            place.data = empty[name]
        return merged


def _merged_module(module: Any) -> nn.Module:
    """The module that peft's merge_and_unload() leaves in place of an adapter's module."""
    if hasattr(module, "unload_and_optionally_merge_module"):
        merged: nn.Module = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return merged
    module.merge(safe_merge=False, adapter_names=None)
    base: nn.Module = module.get_base_layer()
    return base


def _model_config(folder: Path, *, trust_remote_code: bool) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many kinds of errors for damaged files
        raise ConfigError(f"cannot load the config of {folder}: {' '.join(str(error).split())}") from error
