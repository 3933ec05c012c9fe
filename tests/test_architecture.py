"""Asserts the architecture: the tree, the import direction, the effects of an import, sizes of modules and functions.

Reads the source with ast. Only the test of what an import does runs it, in a fresh interpreter.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "roundpipe"
SOURCE = Path(__file__).parents[1] / "src"

# The tree: every package and every file directly under roundpipe, with its level. Imports point to lower levels or stay
# inside their package; packages of one level do not import each other, except where ALLOWED_BESIDE says so.
LEVELS = {
    "errors": 0,
    "host_facts": 0,
    "compiled": 0,
    "fingerprints": 0,
    "context": 0,
    "monitor": 0,
    "module_copy": 0,
    "module_names": 0,
    "param_groups": 1,
    "progress": 0,
    "version": 0,
    "models": 1,
    "timeline": 1,
    "stats": 2,
    "split": 1,
    "plan": 2,
    "config": 3,
    "devices": 3,
    "microbatch": 4,
    "store": 4,
    "runtime": 5,
    "optim": 5,
    "distributed": 5,
    "api": 6,
    "checkpoint": 7,
    "report": 7,
    "loading": 8,
    "estimate": 5,
    "packed": 5,
    "integrations": 8,
    "cli": 9,
    "__main__": 10,
    "": 10,  # roundpipe/__init__.py, which only collects the public names
}
ALLOWED_BESIDE = {
    ("compiled", "errors"),
    ("compiled", "fingerprints"),
    ("context", "errors"),
    ("context", "monitor"),
    ("monitor", "errors"),
}
WITHOUT_TORCH = ("plan", "timeline", "stats", "host_facts")
KNOWS_CUDA = "roundpipe.devices.cuda"
# The path of an iteration goes through these packages. The number of modules beside them is not limited.
CORE = ("api", "runtime", "store", "optim", "plan", "devices", "microbatch")
MAX_CORE_MODULES = 66
MAX_SINGLE_IMPORTER_MODULES = 8
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
LONGER_FUNCTIONS = {"wrap_model_to_roundpipe": 73}  # its docstring describes every public argument

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the library: dotted name to file."""
    found = {}
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def part_of(module: str) -> str:
    """The package or file directly under roundpipe; empty for roundpipe itself."""
    return module.split(".")[1] if "." in module else ""


def absolute_base(module: str, node: ast.ImportFrom) -> str:
    """The module an import-from names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    is_package = modules()[module].name == "__init__.py"
    parts = module.split(".")
    anchor = parts[: len(parts) - node.level + is_package]
    return ".".join([*anchor, node.module] if node.module else anchor)


@functools.cache
def imports_of(module: str) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of everything `module` imports, at its top or inside a function; type-only ones too."""
    found = []
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(module, node)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return tuple(found)


def own_module(dotted: str) -> str | None:
    """The module of ours that `dotted` lies in: the module itself, or the one that defines the name."""
    while dotted:
        if dotted in modules():
            return dotted
        dotted = dotted.rpartition(".")[0]
    return None


def own_imports(module: str) -> Iterator[tuple[int, str]]:
    for line, dotted in imports_of(module):
        target = own_module(dotted)
        if target is not None and target != module:
            yield line, target


def functions() -> Iterator[tuple[str, FunctionNode]]:
    for module in modules():
        for node in ast.walk(tree_of(module)):
            if isinstance(node, FunctionNode):
                yield f"{module}:{node.lineno} {node.name}", node


def test_files_of_tests_have_different_names() -> None:
    """pytest takes two files of one name for one module, and collects neither of two that meet in one process."""
    files = defaultdict(list)
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        files[path.name].append(str(path.parent.name))
    repeated = [f"{name}: in {', '.join(folders)}" for name, folders in files.items() if len(folders) > 1]
    assert not repeated, listing(repeated)


def listing(offenders: list[str]) -> str:
    return "\n  " + "\n  ".join(offenders)


def test_the_tree_is_the_listed_one() -> None:
    parts = {part_of(module) for module in modules()}
    unknown, gone = sorted(parts - LEVELS.keys()), sorted(LEVELS.keys() - parts)
    assert not unknown, f"give these a level in LEVELS and in ARCHITECTURE.md: {unknown}"
    assert not gone, f"these no longer exist; remove them from LEVELS and ARCHITECTURE.md: {gone}"


def test_every_folder_with_modules_is_a_package() -> None:
    offenders = sorted({str(p.parent) for p in modules().values() if not (p.parent / "__init__.py").exists()})
    assert not offenders, "these folders have no __init__.py:" + listing(offenders)


def core_modules() -> list[str]:
    return [module for module in modules() if part_of(module) in CORE]


def test_the_core_has_few_modules() -> None:
    count = len(core_modules())
    assert count <= MAX_CORE_MODULES, f"{count} modules; at most {MAX_CORE_MODULES}: merge files that share one idea"


def single_importers() -> dict[str, str]:
    """Modules of the core that exactly one other module imports, with that module; type-only imports count too.

    A module that only its own package imports has public names, which `__init__.py` collects: it is no helper.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for _, target in own_imports(module):
            importers[target].add(module)
    return {
        module: next(iter(who))
        for module, who in sorted(importers.items())
        if len(who) == 1
        and part_of(module) in CORE
        and modules()[module].name != "__init__.py"
        and who != {module.rpartition(".")[0]}
    }


def test_few_modules_have_a_single_importer() -> None:
    lonely = [f"{module} (by {importer})" for module, importer in single_importers().items()]
    assert len(lonely) <= MAX_SINGLE_IMPORTER_MODULES, (
        f"{len(lonely)} modules have one importer, at most {MAX_SINGLE_IMPORTER_MODULES} may; a helper with one "
        "importer belongs in that file:" + listing(lonely)
    )


def test_imports_point_down() -> None:
    offenders = []
    for module in modules():
        for line, target in own_imports(module):
            above, below = part_of(module), part_of(target)
            if above == below or (above, below) in ALLOWED_BESIDE:
                continue
            if LEVELS[above] <= LEVELS[below]:
                offenders.append(f"{module}:{line} (level {LEVELS[above]}) imports {target} (level {LEVELS[below]})")
    assert not offenders, "imports must point to a lower level:" + listing(offenders)


def test_nothing_inside_imports_the_public_package() -> None:
    offenders = [
        f"{module}:{line}"
        for module in modules()
        if part_of(module)
        for line, target in own_imports(module)
        if target == PACKAGE
    ]
    assert not offenders, "import from the defining module, not from the package:" + listing(offenders)


def imports_between(importers: set[str], imported: set[str]) -> list[str]:
    return [
        f"{module}:{line} imports {target}"
        for module in modules()
        for line, target in own_imports(module)
        if part_of(module) in importers and part_of(target) in imported and part_of(module) != part_of(target)
    ]


def test_runtime_and_optim_never_import_each_other() -> None:
    offenders = imports_between({"runtime", "optim"}, {"runtime", "optim"})
    assert not offenders, "runtime and optim meet in store:" + listing(offenders)


def test_what_runs_layers_does_not_know_how_a_model_was_split() -> None:
    offenders = imports_between({"store", "runtime", "optim", "devices"}, {"split"})
    assert not offenders, "layers are the same for every way of making them:" + listing(offenders)


def test_there_is_no_import_cycle() -> None:
    graph = {module: sorted({target for _, target in own_imports(module)}) for module in modules()}
    finished: set[str] = set()

    def find_cycle(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return None
        for target in graph[module]:
            cycle = find_cycle(target, [*path, module])
            if cycle is not None:
                return cycle
        finished.add(module)
        return None

    for module in graph:
        cycle = find_cycle(module, [])
        assert cycle is None, "modules import each other in a circle: " + " -> ".join(cycle or [])


def test_planning_timelines_and_statistics_never_import_torch() -> None:
    offenders = [
        f"{module}:{line} imports {dotted}"
        for module in modules()
        if part_of(module) in WITHOUT_TORCH
        for line, dotted in imports_of(module)
        if dotted.split(".")[0] == "torch"
    ]
    assert not offenders, f"{' and '.join(WITHOUT_TORCH)} are pure:" + listing(offenders)


def code_of(module: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each line's code, without comments and strings, without spaces."""
    lines: dict[int, str] = {}
    skipped = {tokenize.COMMENT, tokenize.STRING, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(modules()[module].read_text(encoding="utf-8")).readline):
        if token.type not in skipped:
            lines[token.start[0]] = lines.get(token.start[0], "") + token.string
    yield from sorted(lines.items())


def test_only_one_file_names_cuda() -> None:
    others = [module for module in modules() if module != KNOWS_CUDA]
    offenders = [f"{module}:{line}" for module in others for line, code in code_of(module) if "torch.cuda" in code]
    offenders += [
        f"{module}:{line}"
        for module in others
        for line, dotted in imports_of(module)
        if dotted.startswith("torch.cuda") and f"{module}:{line}" not in offenders
    ]
    assert not offenders, f"only {KNOWS_CUDA} may name torch.cuda:" + listing(offenders)


def test_the_library_never_prints() -> None:
    offenders = [
        f"{module}:{node.lineno}"
        for module in modules()
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not offenders, "use logging:" + listing(offenders)


def test_every_function_is_fully_annotated() -> None:
    offenders = []
    for place, node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [argument for argument in (node.args.vararg, node.args.kwarg) if argument is not None]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls", "mcs")]
        if bare or node.returns is None:
            offenders.append(f"{place}: {', '.join(bare) or 'return type'}")
    assert not offenders, "annotations are missing:" + listing(offenders)


def test_every_file_says_what_it_is() -> None:
    offenders = [module for module in modules() if ast.get_docstring(tree_of(module)) is None]
    assert not offenders, "these need a module docstring:" + listing(offenders)


def test_files_stay_small() -> None:
    sizes = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in modules().items()}
    offenders = [f"{module}: {lines} lines" for module, lines in sizes.items() if lines > MAX_FILE_LINES]
    assert not offenders, f"at most {MAX_FILE_LINES} lines a file:" + listing(offenders)


def test_functions_stay_small() -> None:
    offenders = []
    for place, node in functions():
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > LONGER_FUNCTIONS.get(node.name, MAX_FUNCTION_LINES):
            offenders.append(f"{place}: {lines} lines")
    assert not offenders, f"at most {MAX_FUNCTION_LINES} lines a function:" + listing(offenders)


IMPORT_PROBE = """
import json, os, sys, threading
import torch

queries = []

def recorded(name, query):
    def wrapper(*args, **kwargs):
        queries.append(name)
        return query(*args, **kwargs)
    return wrapper

for name in ("is_available", "device_count", "current_device", "get_device_properties", "mem_get_info", "init"):
    setattr(torch.cuda, name, recorded(name, getattr(torch.cuda, name)))
environment_before = dict(os.environ)
threads_before = set(threading.enumerate())

import roundpipe

json.dump({
    "threads": [thread.name for thread in threading.enumerate() if thread not in threads_before],
    "environment": sorted(set(environment_before.items()) ^ set(os.environ.items())),
    "device_queries": queries + ["initialised"] * torch.cuda.is_initialized(),
}, sys.__stdout__)
"""


@functools.cache
def import_effects() -> tuple[dict[str, object], str, str]:
    """What a fresh interpreter sees when it imports the package: effects, unexpected output, errors."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": str(SOURCE), "PATH": "", "ROUNDPIPE_DEVICES": "no-such-device"},
    )
    assert done.returncode == 0, f"import roundpipe failed:\n{done.stderr}"
    printed, brace, effects = done.stdout.rpartition('{"threads"')
    return json.loads(brace + effects), printed, done.stderr


def test_importing_starts_no_thread() -> None:
    assert import_effects()[0]["threads"] == []


def test_importing_sets_no_environment_variable() -> None:
    assert import_effects()[0]["environment"] == []


def test_importing_queries_no_device() -> None:
    assert import_effects()[0]["device_queries"] == []


def test_importing_prints_nothing() -> None:
    assert import_effects()[1:] == ("", "")
