"""A GGUF file as a folder that vLLM loads: bfloat16 safetensors, tokenizer, chat template; made once, then reused.

`ensure_checkpoint` is what the server and the command line call. The work itself is done by another process
(`python -m engines.gguf_weights SOURCE FOLDER`), so that its gigabytes of torch tensors leave with it. That process
holds a file lock while it works: of two that want the same folder, one converts and the other finds it ready. The
folder is built beside its place and renamed into it, so one that exists is whole.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (transformers and tokenizers leave most of their arguments without types)

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engines.gguf_header import GgufHeader, NotGguf, parameters, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_RECIPE: Final = b"1"
"""Part of the folder's name: a change of what is written here must not reuse older folders."""

_SPARE_BYTES: Final = 256 << 20
"""Room for the tokenizer's files, and for whoever else writes to the disk meanwhile."""

_END_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<EOT>")
"""Tokens that end an answer whatever the file's `eos_token_id` says: files name one id, chat models have several."""

_SINGLE_DIGITS: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of `tokenizer.ggml.pre` whose merges were learnt with each digit apart, which transformers does not know."""

_PROGRESS: Final = "progress "


class ConversionFailed(Exception):
    """The file can't be made into a checkpoint folder; the message says why."""


def checkpoint_folder(source: Path, cache_dir: Path) -> Path:
    """Where the checkpoint made from `source` is kept, made already or not."""
    with source.open("rb") as file:
        digest = hashlib.sha256(_RECIPE + file.read(1 << 20)).hexdigest()[:12]
    return cache_dir / f"{source.stem}-{source.stat().st_size}-{digest}"


def is_ready(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def ensure_checkpoint(
    source: Path,
    cache_dir: Path,
    progress: Callable[[float], None],
    started: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Path:
    """The checkpoint folder of `source`, converted first if it is a GGUF file. Blocks.

    `progress` is told the fraction done; `started` is given the process that converts, for whoever may want to end
    it. Raises `ConversionFailed`.
    """
    if source.is_dir():
        return source
    try:
        folder = checkpoint_folder(source, cache_dir)
    except OSError as error:
        raise ConversionFailed(f"{source} can't be read: {error.strerror}") from error
    if not is_ready(folder):
        _run(source, folder, progress, started)
    progress(1.0)
    return folder


def _run(
    source: Path,
    folder: Path,
    progress: Callable[[float], None],
    started: Callable[[subprocess.Popen[str]], None] | None,
) -> None:
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(  # noqa: S603  (our own module, on paths of the owner's configuration)
            [sys.executable, "-m", "engines.gguf_weights", str(source), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"},
        ) as process,
    ):
        if started is not None:
            started(process)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_PROGRESS):
                progress(float(line.removeprefix(_PROGRESS)))
        if process.wait() != 0:
            errors.seek(0)
            said = errors.read().strip().splitlines()
            why = said[-1] if said else f"exit code {process.returncode}"
            raise ConversionFailed(f"{source.name} could not be converted: {why}")


def convert(source: Path, folder: Path, report: Callable[[float], None]) -> None:
    """Make `folder` from `source` unless it is ready; one process at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    header = _checked_header(source, folder.parent)
    with _alone(folder):
        if is_ready(folder):
            return
        for left_over in (folder, *folder.parent.glob(f"{folder.name}.part-*")):
            shutil.rmtree(left_over, ignore_errors=True)
        report(0.02)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
        try:
            _write(source, part, header, report)
            _verify(part, header)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    report(1.0)


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Hold the lock of `folder`; the system lets go of it when the process ends, however it ends."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _checked_header(source: Path, parent: Path) -> GgufHeader:
    try:
        header = read_header(source)
    except NotGguf as error:
        raise ConversionFailed(str(error)) from error
    if (header.metadata.get("split.count") or 1) > 1:
        raise ConversionFailed("the file is one part of several; join them first (llama-gguf-split --merge)")
    needed, free = 2 * parameters(header.tensors) + _SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise ConversionFailed(f"{parent} has {free / 1e9:.2f} GB free, the weights need {needed / 1e9:.2f} GB")
    return header


def _write(source: Path, part: Path, header: GgufHeader, report: Callable[[float], None]) -> None:
    import torch  # noqa: PLC0415  (this process alone loads torch: the module is imported by the server too)
    import transformers  # noqa: PLC0415

    transformers.logging.disable_progress_bar()
    report(0.2)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**where)
    _split_digits(tokenizer, header)
    report(0.35)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    model.generation_config.eos_token_id = _ends(tokenizer, header)
    report(0.85)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    report(0.97)


def _split_digits(tokenizer: Any, header: GgufHeader) -> None:
    if header.metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        from tokenizers import pre_tokenizers  # noqa: PLC0415

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _ends(tokenizer: Any, header: GgufHeader) -> list[int]:
    named = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    known = [vocabulary[text] for text in _END_OF_TURN if text in vocabulary]
    return list(dict.fromkeys([*(token for token in named if isinstance(token, int)), *known]))


def _verify(part: Path, header: GgufHeader) -> None:
    wanted = ["config.json", "generation_config.json", "tokenizer.json"]
    if header.metadata.get("tokenizer.chat_template"):
        wanted.append("chat_template.jinja")
    missing = [name for name in wanted if not (part / name).is_file()]
    if missing or not is_ready(part):
        raise ConversionFailed(f"the result lacks {', '.join(missing) or 'its weights'}")


def main(arguments: list[str]) -> None:
    source, folder = map(Path, arguments)
    try:
        if sys.stdout.isatty():
            from rich.progress import Progress  # noqa: PLC0415  (only where someone looks at it)

            with Progress(transient=True) as bar:
                task = bar.add_task(f"Converting {source.name}", total=1.0)
                convert(source, folder, lambda done: bar.update(task, completed=done))
        else:
            convert(source, folder, lambda done: print(f"{_PROGRESS}{done:.2f}", flush=True))
    except ConversionFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
