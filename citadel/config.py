"""models.toml, read once and checked whole: what comes out is frozen and right, or a `ConfigError` of one clear line.

Every key that exists is a field below, with its default and its unit; nothing else reads the file.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

EngineName = Literal["hyperqwen", "llama", "strata", "replay"]
OPTION_TABLES: Final[dict[str, str]] = {"hyperqwen": "vllm", "llama": "llama", "strata": "strata", "replay": "replay"}
"""The name of each engine's own table under `[models.X]`."""

_SLOTS: Final[dict[tuple[str, str | None], int]] = {
    ("hyperqwen", "batch"): 64,
    ("hyperqwen", "single"): 8,
    ("llama", None): 1,
    ("strata", None): 1,
    ("replay", None): 64,
}


class ConfigError(Exception):
    """models.toml cannot be used; the message is one line that names the key's full path, `others` are more of them."""

    def __init__(self, message: str, others: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.others = tuple(others)


_LOADING: Final = (
    *("engine", "task", "source", "mode", "slots", "context_length", "memory_gb", "format", "chat_template"),
    *OPTION_TABLES.values(),
)
"""The keys of a model that only a load puts into effect."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Seconds = Annotated[float, Field(ge=0, strict=False)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=False)]
Gigabytes = Annotated[float, Field(gt=0, strict=False)]


def _xdg(variable: str, fallback: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / fallback) / "citadel"


def default_data_dir() -> Path:
    return _xdg("XDG_DATA_HOME", ".local/share")


class Server(_Table):
    """`[server]`. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    """The address to listen on; `0.0.0.0` is every one of this machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8040
    """0: any free one."""
    default_model: str | None = None
    """None: the first model of the file."""
    owned_by: str = "hl1"
    """What `/v1/models` says of each model."""
    data_dir: Path = Field(default_factory=default_data_dir, strict=False)
    """Where keys and usage are kept."""
    cache_dir: Path = Field(default_factory=lambda: _xdg("XDG_CACHE_HOME", ".cache"), strict=False)
    """Where files made from weights are kept, such as a GGUF's tensors for vLLM."""
    max_body_bytes: Count = 33_554_432
    """Of a request's body, counted after decompression."""
    wait_max_s: Seconds = 1800
    """The most that `X-LLM-Wait` may ask for."""
    wait_stream_s: Seconds = 1800
    """How long a streamed request waits for its model where it does not say."""
    wait_s: Seconds = 80
    """How long any other request does."""
    comment_s: Annotated[float, Field(gt=0, strict=False)] = 15
    """Between the comment lines of a stream that waits."""
    drain_s: Seconds = 30
    """What running answers get when the server ends."""
    cors_origins: tuple[str, ...] = Field(default=("*",), strict=False)
    """Where pages that call this server may come from; `*` is anywhere."""
    reasoning_content: bool = True
    """Whether reasoning is sent by this second name, too, which some clients read."""
    metrics_public: bool | None = None
    """None: public on a loopback host only."""
    auto_download: bool = False
    """Whether a request may fetch weights from a hub; else only `models pull` does."""


class Limits(_Table):
    """`[limits]`: what holds for every key and member that has no figure of its own. None is no limit."""

    open_calls: Count = 96
    """Requests open at once, over all callers."""
    open_per_member: Count = 64
    """Requests that a member has open at once."""
    calls_per_minute: Count | None = None
    """Calls of a key in any 60 seconds."""
    calls_per_day: Count | None = None
    """Calls of a key in any 24 hours."""
    daily_calls: Count | None = None
    """Calls of a key from midnight to midnight UTC."""
    daily_tokens: Count | None = None
    """Prompt and completion tokens of a member from midnight to midnight UTC."""
    max_parallel: Count | None = None
    """Calls of a member at once per model."""


class Gpu(_Table):
    """`[gpu]`. `memory_limit_gb` and `ram_limit_gb` bound what all loaded models may take together, in 10^9 bytes."""

    lease_expiry_s: Seconds = 60
    """A lease that is not renewed for this long ends."""
    busy_after_s: Seconds = 900
    """A request that waited this long behind media jobs is told `gpu-busy`."""
    memory_limit_gb: Gigabytes | None = None
    """GPU memory that all loaded models may take together."""
    ram_limit_gb: Gigabytes | None = None
    """RAM that all loaded models may take together."""
    min_residency_s: Seconds = 30
    """A model in use takes calls at least this long before it drains for another one; idle, it goes at once."""
    max_wait_s: Seconds = 300
    """Who has waited this long need not wait for the other's minimum residency."""


class SamplingDefaults(_Table):
    """`[models.X.sampling]`: what a request that says nothing gets, in front of the checkpoint's own defaults."""

    temperature: Annotated[float, Field(ge=0, le=2, strict=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, strict=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, strict=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, strict=False)] | None = None

    def given(self) -> dict[str, float]:
        return self.model_dump(exclude_none=True)


class Model(_Table):
    """`[models.X]`. `vllm`, `llama`, `strata` and `replay` are the engines' own tables, passed through to them."""

    engine: EngineName
    """vLLM is `hyperqwen`, llama.cpp is `llama`, and `strata` beyond the GPU's memory; `replay` plays recordings."""
    source: Annotated[str, Field(min_length=1)]
    """A path from this file, `package:NAME/FILE`, or a hub id `ORG/NAME`, with `:FILE` for one file of it."""
    task: Literal["generate", "embed"] = "generate"
    """`embed`: it makes vectors of texts (`/v1/embeddings`), and no text."""
    mode: Literal["batch", "single"] | None = None
    """For hyperqwen: `batch` (the default) or `single`, with fewer slots for low latency."""
    slots: Count | None = None
    """Requests that run at once. None: 64 in batch, 8 in single, 1 for llama and strata."""
    context_length: Count | None = None
    """Prompt and output tokens of one request. None: the model's own."""
    max_output_tokens: Count | None = None
    """The most that one answer may have. None: what the context leaves."""
    format: str = "auto"
    """How the model writes reasoning and tool calls; `auto` tells it from the template."""
    chat_template: Path | None = Field(default=None, strict=False)
    """A Jinja file in the place of the template that the weights carry."""
    aliases: tuple[str, ...] = Field(default=(), strict=False)
    """Other names by which requests may ask for the model."""
    preload: bool = False
    """Load it when the server starts."""
    pin: bool = False
    """Never unload it to make room."""
    ttl_s: Seconds | None = None
    """Unload it when it was idle for this long."""
    cold_start_s: Annotated[int, Field(ge=1)] = 60
    """What a load takes, until this machine's own first one is measured."""
    notes: str = ""
    """What `/v1/models` tells callers of it."""
    max_parallel: Count | None = None
    """Calls of a member at once. None: 1 for llama and strata, else no bound of its own."""
    memory_gb: Gigabytes | None = None
    """What it takes, weights and cache together. None: estimated from the files."""
    stall_s: Seconds = 60
    """Requests running and no token for this long: the engine is restarted."""
    backoff_s: Annotated[tuple[Seconds, Seconds], Field(strict=False)] = (10, 300)
    """After a failed start: the first wait, and the longest."""
    reasoning_budget: Count | None = None
    """Tokens that the model may think for; then its reasoning is closed, and it has to answer."""
    sampling: SamplingDefaults = SamplingDefaults()
    """What a request that says nothing gets."""
    vllm: dict[str, Any] | None = None
    """hyperqwen: arguments of vLLM, as they are."""
    llama: dict[str, Any] | None = None
    """llama: see `engines/llama_options.py`."""
    strata: dict[str, Any] | None = None
    """strata: see `engines/llama_options.py`."""
    replay: dict[str, Any] | None = None
    """replay: see `engines/replay.py`."""

    @field_validator("backoff_s")
    @classmethod
    def _first_then_longest(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError("the first wait is longer than the longest")
        return value

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        own = OPTION_TABLES[self.engine]
        for table in OPTION_TABLES.values():
            if table != own and getattr(self, table) is not None:
                raise ValueError(f"the table {table!r} is not for the engine {self.engine!r}, whose own is {own!r}")
        if self.mode is not None and self.engine != "hyperqwen":
            raise ValueError(f"mode is for hyperqwen only, and this is {self.engine}")
        if self.task == "embed" and self.engine == "replay":
            raise ValueError("the engine 'replay' makes no embeddings")
        return self

    def loads_differently(self, other: Model) -> bool:
        """Whether a model that was loaded by `other` must be loaded again to be as this says."""
        return any(getattr(self, name) != getattr(other, name) for name in _LOADING)

    @property
    def options(self) -> dict[str, Any]:
        return getattr(self, OPTION_TABLES[self.engine]) or {}

    @property
    def effective_mode(self) -> Literal["batch", "single"] | None:
        return (self.mode or "batch") if self.engine == "hyperqwen" else None

    @property
    def effective_slots(self) -> int:
        return self.slots or _SLOTS[self.engine, self.effective_mode]

    @property
    def effective_max_parallel(self) -> int | None:
        """Calls that one member may have on this model; None is no bound of the model's own."""
        return self.max_parallel or (1 if self.engine in ("llama", "strata") else None)


class Config(_Table):
    """The whole file. `folder` is where it lies: relative paths in it start there."""

    server: Server = Server()
    limits: Limits = Limits()
    gpu: Gpu = Gpu()
    models: dict[str, Model]
    folder: Path = Field(default=Path(), strict=False)

    @model_validator(mode="after")
    def _names_are_clear(self) -> Self:
        if not self.models:
            raise ValueError("models: there is none; a model is a table [models.NAME]")
        seen = dict.fromkeys(self.models, "a model")
        for name, model in self.models.items():
            for alias in model.aliases:
                if alias in seen:
                    raise ValueError(f"models.{name}.aliases: {alias!r} is {seen[alias]} already")
                seen[alias] = f"an alias of {name}"
        default = self.server.default_model
        if default is not None and default not in seen:
            raise ValueError(f"server.default_model: there is no model {default!r}{_nearest(default, seen)}")
        return self

    @property
    def default_model(self) -> str:
        return self.server.default_model or next(iter(self.models))

    def find(self, name: str) -> str | None:
        """The id of the model with this id or alias."""
        if name in self.models:
            return name
        return next((id_ for id_, model in self.models.items() if name in model.aliases), None)


def load(path: Path, *, server_overrides: dict[str, Any] | None = None) -> Config:
    """Read `path`; `server_overrides` replace keys of `[server]`. Raises ConfigError."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from None
    folder = path.resolve().parent
    if "folder" in raw:
        raise ConfigError(f"{path}: folder: unknown key{_nearest('folder', set(Config.model_fields) - {'folder'})}")
    if isinstance(raw.setdefault("server", {}), dict):
        raw["server"] |= server_overrides or {}
    try:
        config = Config.model_validate({**raw, "folder": folder})
    except ValidationError as error:
        first, *others = (f"{path}: {_one_line(problem, raw)}" for problem in error.errors(include_url=False))
        raise ConfigError(first, others) from None
    for name, model in config.models.items():
        if model.chat_template is not None and not (folder / model.chat_template).is_file():
            raise ConfigError(f"{path}: models.{name}.chat_template: there is no file {folder / model.chat_template}")
    return config


def _one_line(problem: ErrorDetails, raw: dict[str, Any]) -> str:
    where = [str(part) for part in problem["loc"]]
    key = ".".join(where)
    match problem["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key{_nearest(where[-1], _known_keys(where[:-1], raw))}"
        case "missing":
            return f"{key}: this key is required"
        case "value_error":
            text = problem["msg"].removeprefix("Value error, ")
            return f"{key}: {text}" if key else text
        case _:
            return f"{key}: {problem['msg'][0].lower()}{problem['msg'][1:]}, not {problem['input']!r}"


def _known_keys(table: list[str], raw: dict[str, Any]) -> set[str]:
    match table:
        case []:
            return set(Config.model_fields) - {"folder"}
        case ["server"]:
            return set(Server.model_fields)
        case ["limits"]:
            return set(Limits.model_fields)
        case ["gpu"]:
            return set(Gpu.model_fields)
        case ["models", name]:
            engine = raw["models"][name].get("engine")
            foreign = set(OPTION_TABLES.values()) - {OPTION_TABLES.get(engine, "")}
            return set(Model.model_fields) - foreign
        case _:
            return set(SamplingDefaults.model_fields)


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)
    return f"; the nearest known one is {close[0]!r}" if close else ""
