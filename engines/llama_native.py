"""llama.cpp's C interface as a few typed objects: model, vocabulary, context, batch, sampler chain.

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

# A spinning barrier with a foreign process on the cores costs a factor of ten; libgomp reads this when it loads.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from llama_cpp import llama_cpp

from engines import llama_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

lib: Any = llama_cpp
"""llama.cpp's functions and structures; the binding's types for them are not what ctypes takes."""

llama_log.install()
lib.llama_backend_init()

_NO_VOCABULARY: Final = 0
"""llama_vocab_type of a file without one; tokenizing with it aborts."""
_PIECE_BYTES: Final = 256
_NO_POSITION: Final = 2**31 - 2
_ROPES_OF_SEVERAL: Final = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE, lib.LLAMA_ROPE_TYPE_VISION)
DRAWN_AT_RANDOM: Final = 0xFFFFFFFF
"""The seed that llama.cpp takes as "choose one yourself"."""


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


def built_with_amx() -> bool:
    return b"AMX_INT8 = 1" in lib.llama_print_system_info()


def gpu_offload() -> bool:
    return bool(lib.llama_supports_gpu_offload())


class Model:
    """A loaded model. It is freed by `close()`, or when nobody holds it any more."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._free = weakref.finalize(self, lib.llama_model_free, handle)
        self._free.atexit = False

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
        _assign(params, settings)
        params.progress_callback = on_progress
        with llama_log.errors_kept() as errors:
            handle = lib.llama_model_load_from_file(os.fsencode(path), params)
        if failure:
            raise failure[0]
        if not handle:
            raise NativeError(_reason(errors) or "llama.cpp could not load the file")
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
        """The tokens that end a generation."""
        is_end = lib.llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if is_end(self.handle, token))

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

    def tokenize(self, text: str) -> list[int]:
        """Texts of special tokens become those tokens; nothing is added."""
        data = text.encode("utf-8", "replace")
        room = len(data) + 16
        while True:
            tokens = np.empty(room, np.int32)
            address = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            count = lib.llama_tokenize(self.handle, data, len(data), address, room, False, True)
            if count >= 0:
                return tokens[:count].tolist()
            if count == -(2**31):
                raise NativeError("the text has too many tokens")
            room = -count


class Batch:
    """Tokens for one decode, in arrays that llama.cpp reads in place."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.outputs: list[int] = []
        self.token: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.position: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.sequence: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.output: NDArray[np.int8] = np.zeros(capacity, np.int8)
        self._one: NDArray[np.int32] = np.ones(capacity, np.int32)
        # Each token points at its own cell of `sequence`, the list of the sequences that it belongs to.
        first = self.sequence.ctypes.data
        self._lists: NDArray[np.uint64] = np.arange(first, first + 4 * capacity, 4, dtype=np.uint64)
        number = ctypes.POINTER(ctypes.c_int32)
        self.struct = lib.llama_batch(
            n_tokens=0,
            token=self.token.ctypes.data_as(number),
            embd=None,
            pos=self.position.ctypes.data_as(number),
            n_seq_id=self._one.ctypes.data_as(number),
            seq_id=self._lists.ctypes.data_as(ctypes.POINTER(number)),
            logits=self.output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def clear(self) -> None:
        self.count = 0
        self.outputs.clear()

    def add(self, sequence: int, start: int, tokens: Sequence[int], *, output: bool) -> None:
        """Appends the tokens of a sequence from position `start`; `output` asks for the logits of the last."""
        begin, end = self.count, self.count + len(tokens)
        if end > self.capacity or not tokens:
            raise NativeError(f"a batch of {end} tokens does not fit {self.capacity}, or adds none")
        self.token[begin:end] = tokens
        self.position[begin:end] = np.arange(start, start + len(tokens), dtype=np.int32)
        self.sequence[begin:end] = sequence
        self.output[begin:end] = 0
        if output:
            self.output[end - 1] = 1
            self.outputs.append(end - 1)
        self.count = end


class Context:
    """The memory of `sequences` sequences, and the compute that fills it."""

    def __init__(self, model: Model, settings: Mapping[str, Any], sequences: int) -> None:
        """`settings` are fields of llama_context_params."""
        if not 0 < sequences <= lib.llama_max_parallel_sequences():
            raise NativeError(f"{sequences} slots; llama.cpp has {lib.llama_max_parallel_sequences()} at most")
        params = lib.llama_context_default_params()
        _assign(params, settings)
        params.n_seq_max = sequences
        params.swa_full = True
        # Without a bound the compute buffer holds logits for every token of a batch; only each last one is asked for.
        params.n_outputs_max = sequences
        with llama_log.errors_kept() as errors:
            handle = lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise NativeError(_reason(errors) or "llama.cpp could not make a context")
        self.handle = handle
        self._model = model
        self._free = weakref.finalize(self, lib.llama_free, handle)
        self._free.atexit = False
        self._memory = lib.llama_get_memory(handle)
        self.sequences = sequences
        self.batch_size = int(lib.llama_n_batch(handle))
        self.sequence_length = int(lib.llama_n_ctx_seq(handle))
        self.cells = int(lib.llama_n_ctx(handle))
        self.can_trim = not model.is_recurrent
        self.can_share = self.can_trim and bool(params.kv_unified) and model.architecture != "deepseek4"
        # Shifting positions of several parts aborts.
        self._one_position = lib.llama_model_rope_type(model.handle) not in _ROPES_OF_SEVERAL
        self._outputs: list[int] = []

    def close(self) -> None:
        self._free()

    def decode(self, batch: Batch) -> int:
        """llama_decode's code: 0 done, 1 no room (nothing changed), 2 aborted, negative failed."""
        count = batch.count
        if not 0 < count <= min(self.batch_size, batch.capacity):
            raise NativeError(f"a batch of {count} tokens where {self.batch_size} fit")
        if batch.sequence[:count].min() < 0 or batch.sequence[:count].max() >= self.sequences:
            raise NativeError("a batch names a sequence that there is not")
        if batch.token[:count].min() < 0 or batch.token[:count].max() >= self._model.vocabulary.size:
            raise NativeError("a batch has a token that is not in the vocabulary")
        if len(batch.outputs) > self.sequences:
            raise NativeError("a batch asks for more outputs than there are sequences")
        batch.struct.n_tokens = count
        code = int(lib.llama_decode(self.handle, batch.struct))
        self._outputs = list(batch.outputs) if code == 0 else []
        return code

    def logits(self) -> NDArray[np.float32]:
        """The outputs of the last decode, a row each in the batch's order: llama.cpp's own memory, writable."""
        address = lib.llama_get_logits(self.handle)
        if not address or not self._outputs:
            raise NativeError("there are no logits")
        shape = (len(self._outputs), self._model.vocabulary.size)
        return np.ctypeslib.as_array(address, shape=shape)

    def draw(self, chain: Chain, row: int) -> int:
        """Lets the chain choose from a row of `logits()`, as that row is now."""
        if not 0 <= row < len(self._outputs):
            raise NativeError(f"there is no output {row}")
        return int(lib.llama_sampler_sample(chain.handle, self.handle, self._outputs[row]))

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets a sequence's positions from `length` on."""
        self._check_sequence(sequence)
        if length and not self.can_trim:
            raise NativeError("this model's memory can't be cut back")
        if not lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise NativeError(f"llama.cpp kept what was to be removed from sequence {sequence}")

    def share(self, source: int, target: int, length: int) -> None:
        """Makes the first `length` positions of a sequence those of an empty one too."""
        self._check_sequence(source)
        self._check_sequence(target)
        if not self.can_share:
            raise NativeError("this context can't share memory between sequences")
        lib.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def save(self, sequence: int) -> NDArray[np.uint8]:
        """A copy of all that is computed of a sequence."""
        self._check_sequence(sequence)
        data = np.empty(lib.llama_state_seq_get_size(self.handle, sequence), np.uint8)
        if lib.llama_state_seq_get_data(self.handle, _bytes(data), data.size, sequence) != data.size:
            raise NativeError(f"sequence {sequence} could not be copied")
        return data

    def restore(self, sequence: int, data: NDArray[np.uint8]) -> bool:
        """Fills an empty sequence from a copy; False, and it stays empty, where there is no room for it."""
        self._check_sequence(sequence)
        if lib.llama_state_seq_set_data(self.handle, _bytes(data), data.size, sequence) == data.size:
            return True
        lib.llama_memory_seq_rm(self._memory, sequence, 0, -1)
        return False

    def rewind(self) -> None:
        """Makes llama.cpp look for free cells from the first one on, not from where it took the last.

        Its interface has no call for that, but a shift of positions that no cell has ends so, and does nothing else.
        """
        if self.can_share and self._one_position:
            lib.llama_memory_seq_add(self._memory, 0, _NO_POSITION, _NO_POSITION + 1, 1)

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self.sequences:
            raise NativeError(f"there is no sequence {sequence}")


class Chain:
    """A chain of llama.cpp's samplers that ends in a random draw."""

    def __init__(self, steps: Sequence[tuple[str, tuple[float, ...]]], seed: int) -> None:
        """`steps` are names of llama_sampler_init_* with their arguments."""
        self.handle = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._free = weakref.finalize(self, lib.llama_sampler_free, self.handle)
        self._free.atexit = False
        for name, arguments in steps:
            lib.llama_sampler_chain_add(self.handle, getattr(lib, f"llama_sampler_init_{name}")(*arguments))
        lib.llama_sampler_chain_add(self.handle, lib.llama_sampler_init_dist(seed))

    def close(self) -> None:
        self._free()


def _assign(params: Any, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if not hasattr(params, name):
            raise NativeError(f"llama.cpp has no setting {name}")
        setattr(params, name, value)


def _bytes(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _reason(errors: list[str]) -> str:
    """The first error line, which is the cause; the later ones say only that the call failed."""
    return errors[0] if errors else ""
