"""A user's own task file: its hypothesis, its data, and the tokenizer to check them with."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from plot_ot.abstract.causal_model import CausalModel
from plot_ot.abstract.hypothesis import Hypothesis
from plot_ot.errors import PlotError
from plot_ot.models.loading import guarded, refuse_unreachable
from plot_ot.models.named import PACKAGED, known_names, model_directory
from plot_ot.models.tiny import build_tokenizer, is_tiny
from plot_ot.subjects import Subject
from plot_ot.subjects.decoder.architecture import transformers_library


def require_file(task: Path) -> None:
    """Refuse a task file that is not there."""
    if not task.is_file():
        raise PlotError(f"There is no task file {task}.")


def load_task(path: Path) -> ModuleType:
    """The user's file as a module, as `python TASK.py` would see it; an error in it is told with its line."""
    spec = importlib.util.spec_from_file_location(f"plot_ot_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise PlotError(f"{path} is no Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    folder, wrote = str(path.resolve().parent), sys.dont_write_bytecode
    sys.modules[spec.name], sys.dont_write_bytecode = module, True
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        raise PlotError(f"{path}{_line(path, e)}: {_reason(e)}") from e
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = wrote
    return module


def _line(path: Path, e: BaseException) -> str:
    if isinstance(e, SyntaxError):
        return f" line {e.lineno}"
    mine = [f.lineno for f in traceback.extract_tb(e.__traceback__) if Path(f.filename) == path]
    return f" line {mine[-1]}" if mine else ""


def _reason(e: BaseException) -> str:
    if isinstance(e, SyntaxError):
        return f"SyntaxError: {e.msg}"
    return str(e) if isinstance(e, PlotError) else f"{type(e).__name__}: {e}"


def hypothesis_of(module: ModuleType, path: Path) -> Hypothesis | CausalModel:
    """What the file calls `hypothesis`."""
    found = getattr(module, "hypothesis", None)
    if not isinstance(found, Hypothesis | CausalModel):
        what = f"it is {type(found).__name__}" if hasattr(module, "hypothesis") else "there is none"
        raise PlotError(f"{path} must define `hypothesis`, a Hypothesis or a CausalModel; {what}.")
    return found


def name_of(hypotheses: Sequence[Hypothesis | CausalModel], paths: Sequence[Path]) -> list[str]:
    """What the hypotheses of several files are called: as they call themselves, or after their files."""
    own = [str(getattr(h, "name", "hypothesis")) for h in hypotheses]
    names = [path.stem if name == "hypothesis" else name for name, path in zip(own, paths, strict=True)]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def own_subject(module: ModuleType, path: Path, *, of_blocks: bool) -> Subject:
    """The network that a task file brings; options that choose a language model's blocks are refused beside it."""
    found = getattr(module, "subject", None)
    if not isinstance(found, Subject):
        raise PlotError(f"Which network? Give --model, or let {path} define `subject`.")
    if of_blocks:
        raise PlotError(f"--layers and --kinds are for language models; {path} brings its own `subject`.")
    return found


def data_of(module: ModuleType, path: Path, option: str = "--pairs FILE") -> Any:
    """What the file calls `pairs` or `inputs`, made if it is a function."""
    for name in ("pairs", "inputs"):
        found = getattr(module, name, None)
        if callable(found):
            try:
                return found()
            except Exception as e:
                raise PlotError(f"{path}{_line(path, e)}: `{name}` failed: {_reason(e)}") from e
        if found is not None:
            return found
    raise PlotError(f"{path} defines neither `pairs` nor `inputs`. Add one, or give {option}.")


def load_tokenizer(name: str) -> Any:
    """A tokenizer alone: of a directory, a hub id, or a model that `plot-ot models` lists."""
    if is_tiny(name):
        return build_tokenizer()
    library = transformers_library()
    path = model_directory(name) if name in PACKAGED else Path(name).expanduser()
    if path.is_dir():
        return guarded(library.AutoTokenizer.from_pretrained, "tokenizer", str(path), local_files_only=True)
    if path.exists() or name in PACKAGED or name.startswith((".", "/", "~")) or name.count("/") != 1:
        listed = f" Fetch it: plot-ot models --fetch {name}." if name in PACKAGED else ""
        listed = listed or ("" if "/" in name else known_names(name))
        raise PlotError(f"There is no directory {path} with a tokenizer.{listed}")
    refuse_unreachable(name)
    return guarded(library.AutoTokenizer.from_pretrained, "tokenizer", name)
