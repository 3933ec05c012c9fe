"""Configurations and tokenizers in the form of the folder that a model was loaded from.

transformers writes both in the form of the installed version, not in that of the files it has read: other keys for
rotary embeddings and dtypes, a class of tokenizers that older versions do not know, no sentencepiece model. Servers and
converters read the form in which the model was published. So files that training leaves unchanged stay as they are,
and changed values are put into them.

[Note: same meaning] The files in the original form are loaded again and compared with what transformers wrote. If they
do not say the same, the files of transformers stay.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("roundpipe")

TOKENIZER_FILES = (
    "token*", "vocab*", "merges*", "spiece*", "sentencepiece*", "spm*", "*.tiktoken", "tekken*", "added_tokens.json",
    "special_tokens_map.json", "chat_template*", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG, _SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_TEMPLATE, _TEMPLATE_KEY = "chat_template.jinja", "chat_template"
# Keys that training and loading set: they do not belong to the model.
_PASSING = {
    _CONFIG: ("use_cache", "transformers_version"),
    _GENERATION_CONFIG: ("transformers_version",),
    _TOKENIZER: ("truncation", "padding"),
    _TOKENIZER_CONFIG: ("is_local", "local_files_only"),
}

Contents = dict[str, Any]  # of files by name: parsed JSON, or text


def files_of(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files in a folder whose names match one of the patterns."""
    found = (path for path in sorted(folder.iterdir()) if path.is_file())
    return [path for path in found if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)]


def save_model(folder: Path, model: Any, **options: Any) -> None:
    """Save a model as its `save_pretrained` does, with the configs in the form of the folder that it was loaded from.

    A generation config that transformers has read with a warning is written, too: `save_pretrained` would refuse it,
    after the training.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None:
        model.save_pretrained(folder, **options)
    else:
        with _usual_generation(model, generation):
            model.save_pretrained(folder, **options)
        write_generation_config(folder, generation)
    configs = {_CONFIG: getattr(model, "config", None), _GENERATION_CONFIG: generation}
    base = _folder_of(getattr(configs[_CONFIG], "name_or_path", None), list(configs))
    for name, config in configs.items():
        if base is not None and config is not None:
            give_original_form(folder, base, (name,), type(config).from_pretrained, _content_of_config(name))


def give_mode(folder: Path, like: Path) -> None:
    """Give the weights in a folder the mode of another file: safetensors lets their owner alone read them."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(like, weights)


def save_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Save a tokenizer or a processor in the form of the folder that it was loaded from."""
    tokenizer.save_pretrained(folder)
    named = getattr(getattr(tokenizer, "tokenizer", tokenizer), "name_or_path", None)
    base = _folder_of(named, TOKENIZER_FILES)
    if base is not None:
        give_original_form(folder, base, TOKENIZER_FILES, type(tokenizer).from_pretrained)


def write_generation_config(folder: Path, config: Any) -> None:
    """Write a generation config without the check that refuses values which are not used, such as a temperature."""
    config.to_json_file(folder / _GENERATION_CONFIG, keys_to_pop=["compile_config"])


@contextlib.contextmanager
def _usual_generation(model: Any, generation: Any) -> Iterator[None]:
    model.generation_config = type(generation)()
    try:
        yield
    finally:
        model.generation_config = generation


def _folder_of(name: str | None, patterns: Sequence[str]) -> Path | None:
    """The folder that something was loaded from; None if it is gone. Of a hub name, the files that match."""
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # of the hub, the network and the cache
        logger.info("%s is not there any more (%s): its files are not compared", name, " ".join(str(error).split()))
        return None


def content_of_tokenizer(tokenizer: Any) -> Contents:
    """What the files of a tokenizer or processor say, as transformers writes them."""
    found: Contents = {}
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        for path in files_of(Path(scratch), ("*",)):
            text = path.read_text(encoding="utf-8")
            found[path.name] = _lasting(path.name, text) if path.suffix == ".json" else text
    return found


def _content_of_config(name: str) -> Callable[[Any], Contents]:
    return lambda config: {name: _lasting(name, config.to_json_string())}


def _lasting(name: str, text: str) -> Any:
    """The values in a file of JSON that belong to the model."""
    values = json.loads(text)
    for key in _PASSING.get(name, ()):
        values.pop(key, None)
    return values


def give_original_form(
    folder: Path,
    base: Path,
    patterns: Sequence[str],
    load: Callable[[Path], Any],
    content_of: Callable[[Any], Contents] = content_of_tokenizer,
) -> bool:
    """Replace the files of `folder` that match by those of `base` with the values of `folder`: [Note: same meaning].

    load: loads what the files of a folder describe. Returns False if the files could not be given that form.
    """
    originals = files_of(base, patterns)
    if not originals or folder.resolve() == base.resolve():
        return False
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        for path in {*originals, *files_of(base, (_CONFIG,))}:  # the class of a tokenizer may depend on the model's
            shutil.copyfile(path, made / path.name)
        try:
            wanted = content_of(load(folder))
            is_same = _changed(made, content_of(load(base)), wanted) and content_of(load(made)) == wanted
        except Exception as error:  # of files that this version of transformers cannot read any more
            logger.info("the files of %s cannot be compared with those of %s: %r", folder, base, error)
            return False
        if not is_same:
            logger.info("%s has values that do not fit into the files of %s", folder, base)
            return False
        for name in wanted.keys() - {path.name for path in made.iterdir()}:
            (folder / name).unlink(missing_ok=True)
        for path in files_of(made, patterns):
            shutil.copyfile(path, folder / path.name)
    return True


def _changed(made: Path, before: Contents, wanted: Contents) -> bool:
    """Put what differs between two contents into the files in `made`. False if something else than a value differs."""
    different = {name for name in before.keys() | wanted.keys() if before.get(name) != wanted.get(name)}
    if _TOKENIZER in different or not all(name == _TEMPLATE or name.endswith(".json") for name in different):
        return False
    for name in different - {_TEMPLATE}:
        if name not in before or name not in wanted or not (made / name).exists():
            return False
        _change(made / name, before[name], wanted[name])
        if name == _TOKENIZER_CONFIG and (made / _SPECIAL_TOKENS).exists():
            tokens = {key: value for key, value in wanted[name].items() if key.endswith("_token")}
            _change(made / _SPECIAL_TOKENS, {key: before[name].get(key) for key in tokens}, tokens)
    if _TEMPLATE in different:
        _set_template(made, wanted.get(_TEMPLATE))
    return True


def _set_template(made: Path, template: str | None) -> None:
    """Set the chat template where the original has it: in the tokenizer's config or in its own file."""
    path = made / _TOKENIZER_CONFIG
    values = json.loads(path.read_text(encoding="utf-8"))
    if _TEMPLATE_KEY in values:
        _change(path, {_TEMPLATE_KEY: None}, {} if template is None else {_TEMPLATE_KEY: template})
    elif template is not None:
        (made / _TEMPLATE).write_text(template, encoding="utf-8")
    else:
        (made / _TEMPLATE).unlink()


def _change(path: Path, before: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Change the values in a file of JSON that differ between `before` and `wanted`."""
    values = json.loads(path.read_text(encoding="utf-8"))
    changed = _joined(values, before, wanted)
    if changed != values:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _joined(original: Mapping[str, Any], before: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(original)
    for key in sorted(before.keys() | wanted.keys()):
        old, new = before.get(key), wanted.get(key)
        if key in before and key in wanted and old == new:
            continue
        name = "torch_dtype" if key == "dtype" and "torch_dtype" in original else key  # until transformers 4.56
        if isinstance(old, dict) and isinstance(new, dict) and isinstance(original.get(name), dict):
            joined[name] = _joined(original[name], old, new)
        elif key in wanted:
            joined[name] = new
        else:
            joined.pop(name, None)
    return joined
