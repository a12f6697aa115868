"""llama.cpp's C interface as a few typed objects: model and vocabulary.
llama_context.py has the rest.

Inside one process a failed assertion of llama.cpp ends everything, so each call that could fail one is checked here
first and raises `NativeError` instead. Nothing in this file is thread-safe but `Vocabulary`.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines import llama_log, openmp
from engines.llama_log import lib

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

llama_log.install()
lib.llama_backend_init()

_NO_VOCABULARY: Final = 0
"""llama_vocab_type of a file without one; tokenizing with it aborts."""
_PIECE_BYTES: Final = 256
_linked: Final = lib._lib  # noqa: SLF001 - leads to the OpenMP that llama.cpp was linked with
# Of another OpenMP than GNU's it would end the threads of others, too.
_pause: Final = getattr(_linked, "omp_pause_resource_all", None) if openmp.is_gnus(_linked) else None
_watch: Final = openmp.watch(_linked, openmp.NEVER_LONG if lib.llama_supports_gpu_offload() else openmp.Spin())


class NativeError(Exception):
    """llama.cpp refused, or would have aborted the process."""


def tokenize_address() -> int:
    """Where llama_tokenize is, for native code of others that calls it."""
    return ctypes.cast(lib.llama_tokenize, ctypes.c_void_p).value or 0


def trim_heap() -> None:
    """Gives freed memory back to the system; glibc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def let_threads_go() -> None:
    """To be called by a thread that computes no more for now: ends the threads that libgomp keeps for it.

    Once a process keeps more of them than there are cores, libgomp has none of them spin for long, though only those of
    one model compute: of two models on two cores each then takes more than twice the time for a token.
    """
    if _pause is not None:
        _pause(openmp.PAUSE_SOFT)


class Team:
    """The threads that compute in a context of llama.cpp."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._threads = self._set = (int(lib.llama_n_threads(handle)), int(lib.llama_n_threads_batch(handle)))
        self._watch = _watch if min(self._threads) > 1 else None
        self._working = False

    def work(self) -> None:
        """To be called before computing, by the thread that does. With fewer threads while other models compute."""
        if self._watch is None:
            return
        if not self._working:
            self._working = True
            self._watch.at_work(min(self._threads))
        wanted = (self._watch.share(self._threads[0]), self._watch.share(self._threads[1]))
        if wanted != self._set:
            self._set = wanted
            lib.llama_set_n_threads(self._handle, *wanted)

    def rest(self) -> None:
        """To be called when there is nothing to compute for now, by the same thread."""
        let_threads_go()
        if self._watch and self._working:
            self._working = False
            self._watch.at_rest(min(self._threads))


def built_with_amx() -> bool:
    return b"AMX_INT8 = 1" in lib.llama_print_system_info()


def gpu_offload() -> bool:
    return bool(lib.llama_supports_gpu_offload())


class Model:
    """A loaded model. It is freed by `close()`, or when nobody holds it any more."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._free = freed_with(self, lib.llama_model_free, handle)

    @classmethod
    def load(
        cls,
        path: Path,
        settings: Mapping[str, Any],
        go_on: Callable[[float], bool] = lambda _fraction: True,
    ) -> Model:
        """`settings` are fields of llama_model_params. `go_on` is told the fraction loaded; False cancels."""
        params = lib.llama_model_default_params()
        failure: list[BaseException] = []

        @lib.llama_progress_callback
        def on_progress(fraction: float, _data: object) -> bool:
            try:
                return go_on(fraction)
            except BaseException as error:  # noqa: BLE001 - nothing may be raised through C; it is raised below
                failure.append(error)
                return False

        # GCC before 13 drops the tile configuration that ggml's AMX kernels load, and the first matrix product is a
        # segmentation fault. A library does not tell its compiler, so its AMX kernels are used only where asked for.
        params.use_extra_bufts = not built_with_amx()
        assign(params, settings)
        params.progress_callback = on_progress
        with llama_log.errors_kept() as errors:
            handle = lib.llama_model_load_from_file(os.fsencode(path), params)
        if failure:
            raise failure[0]
        if not handle:
            raise NativeError(reason(errors) or "llama.cpp could not load the file")
        return cls(handle)

    def close(self) -> None:
        self._free()

    def metadata(self, key: str) -> str | None:
        """A scalar of the file's metadata, as text; None where it is missing or an array."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, size)
            if length < 0:
                return None
            if length < size:
                return buffer.value.decode("utf-8", "replace")
            size = length + 1

    @property
    def architecture(self) -> str:
        return self.metadata("general.architecture") or ""

    @property
    def is_recurrent(self) -> bool:
        """Some of its state can't be cut back to an earlier position."""
        return bool(lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle))

    @property
    def window(self) -> int:
        """How many tokens back some of its layers look; 0 where all look at all."""
        return max(0, int(lib.llama_model_n_swa(self.handle)))

    @property
    def generates_text(self) -> bool:
        return bool(
            lib.llama_model_has_decoder(self.handle)
            and not lib.llama_model_has_encoder(self.handle)
            and not lib.llama_model_is_diffusion(self.handle)
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self)


class Vocabulary:
    """Tokens and their texts. Its methods may be called from any thread."""

    def __init__(self, model: Model) -> None:
        self.handle = lib.llama_model_get_vocab(model.handle)
        if not self.handle or lib.llama_vocab_type(self.handle) == _NO_VOCABULARY:
            raise NativeError("the file has no vocabulary")
        self.size = int(lib.llama_vocab_n_tokens(self.handle))
        self._pieces: list[bytes | None] = [None] * self.size

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a generation, found among all: tens of milliseconds. `is_end` asks for one."""
        is_end = lib.llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if is_end(self.handle, token))

    def is_end(self, token: int) -> bool:
        return bool(lib.llama_vocab_is_eog(self.handle, token))

    def special(self) -> dict[str, int]:
        """The named tokens that the vocabulary has."""
        named = {
            "bos_token": lib.llama_vocab_bos,
            "eos_token": lib.llama_vocab_eos,
            "eot_token": lib.llama_vocab_eot,
            "sep_token": lib.llama_vocab_sep,
            "pad_token": lib.llama_vocab_pad,
            "mask_token": lib.llama_vocab_mask,
        }
        found = {name: int(get(self.handle)) for name, get in named.items()}
        return {name: token for name, token in found.items() if 0 <= token < self.size}

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; those of a special token are its name."""
        if not 0 <= token < self.size:
            raise NativeError(f"token {token} is not in the vocabulary")
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._render(token, _PIECE_BYTES)
        return piece

    def _render(self, token: int, room: int) -> bytes:
        buffer = ctypes.create_string_buffer(room)
        length = lib.llama_token_to_piece(self.handle, token, buffer, room, 0, True)
        return buffer.raw[:length] if length >= 0 else self._render(token, -length)

    def is_special(self, token: int) -> bool:
        """Its text in a prompt or a grammar means the token, not these characters."""
        kind = lib.llama_vocab_get_attr(self.handle, token)
        piece = self.piece(token)
        marker = piece.startswith(b"<") and piece.endswith(b">")
        return bool(kind & lib.LLAMA_TOKEN_ATTR_CONTROL or (kind & lib.LLAMA_TOKEN_ATTR_USER_DEFINED and marker))

    def tokenize(self, data: bytes, *, add_special: bool = False) -> list[int]:
        """Texts of special tokens become those tokens; with `add_special` the file's own go around the text."""
        room = len(data) + 16
        while True:
            tokens = np.empty(room, np.int32)
            address = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            count = lib.llama_tokenize(self.handle, data, len(data), address, room, add_special, True)
            if count >= 0:
                return tokens[:count].tolist()
            if count == -(2**31):
                raise NativeError("the text has too many tokens")
            room = -count


def assign(params: Any, settings: Mapping[str, Any]) -> None:
    """Sets fields of one of llama.cpp's structures of parameters."""
    for name, value in settings.items():
        if not hasattr(params, name):
            raise NativeError(f"llama.cpp has no setting {name}")
        setattr(params, name, value)


def freed_with(owner: object, free: Callable[[Any], None], handle: Any) -> weakref.finalize[[Any], Any]:
    """Frees `handle` when called, or when `owner` is gone; not at exit, where llama.cpp may be gone already."""
    finalizer = weakref.finalize(owner, free, handle)
    finalizer.atexit = False
    return finalizer


def reason(errors: list[str]) -> str:
    """The first error line, which is the cause; the later ones say only that the call failed."""
    return errors[0] if errors else ""
