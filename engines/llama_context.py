"""llama.cpp's C interface, the part that computes: batch, context, sampler chain.

Each call that could fail an assertion, and so end the process, is checked first and raises `NativeError` instead.
Nothing in this file is thread-safe.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines import llama_log
from engines.llama_native import NativeError, Team, assign, freed_with, lib, reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from engines.llama_native import Model

_NO_POSITION: Final = 2**31 - 2
_ROPES_OF_SEVERAL: Final = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE, lib.LLAMA_ROPE_TYPE_VISION)
DRAWN_AT_RANDOM: Final = 0xFFFFFFFF
"""The seed that llama.cpp takes as "choose one yourself"."""


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

    def add(self, sequence: int, start: int, tokens: Sequence[int], *, outputs: int) -> None:
        """Appends the tokens of a sequence from position `start`, and asks for the logits of the last `outputs`."""
        begin, end = self.count, self.count + len(tokens)
        if end > self.capacity or not tokens:
            raise NativeError(f"a batch of {end} tokens does not fit {self.capacity}, or adds none")
        if not 0 <= outputs <= len(tokens):
            raise NativeError(f"{outputs} outputs of {len(tokens)} tokens")
        self.token[begin:end] = tokens
        self.position[begin:end] = np.arange(start, start + len(tokens), dtype=np.int32)
        self.sequence[begin:end] = sequence
        self.output[begin:end] = 0
        if outputs:
            self.output[end - outputs : end] = 1
            self.outputs.extend(range(end - outputs, end))
        self.count = end

    def check(self, room: int, sequences: int, vocabulary: int) -> None:
        """To be called before each use: llama.cpp would abort, or read beyond its memory."""
        count = self.struct.n_tokens = self.count
        if not 0 < count <= min(room, self.capacity):
            raise NativeError(f"a batch of {count} tokens where {room} fit")
        if self.sequence[:count].min() < 0 or self.sequence[:count].max() >= sequences:
            raise NativeError("a batch names a sequence that there is not")
        if self.token[:count].min() < 0 or self.token[:count].max() >= vocabulary:
            raise NativeError("a batch has a token that is not in the vocabulary")


def make_context(model: Model, params: Any) -> Any:
    """llama.cpp's context of `params`, or `NativeError` with its reason."""
    with llama_log.errors_kept() as errors:
        handle = lib.llama_init_from_model(model.handle, params)
    if not handle:
        raise NativeError(reason(errors) or "llama.cpp could not make a context")
    return handle


class Context:
    """The memory of `sequences` sequences, and the compute that fills it."""

    def __init__(self, model: Model, settings: Mapping[str, Any], sequences: int, outputs: int | None = None) -> None:
        """`settings` are fields of llama_context_params; `outputs` are logits per decode, one a sequence if None."""
        if not 0 < sequences <= lib.llama_max_parallel_sequences():
            raise NativeError(f"{sequences} slots; llama.cpp has {lib.llama_max_parallel_sequences()} at most")
        params = lib.llama_context_default_params()
        assign(params, settings)
        params.n_seq_max = sequences
        # Without a bound the compute buffer holds logits for every token of a batch; only a few are asked for.
        params.n_outputs_max = self.most_outputs = outputs or sequences
        self.handle = handle = make_context(model, params)
        self._model = model
        self._free = freed_with(self, lib.llama_free, handle)
        self.team = Team(handle)
        self._memory = lib.llama_get_memory(handle)
        if not self._memory:
            raise NativeError(f'a {model.architecture} model makes embeddings and no text: set task = "embed"')
        self.sequences = sequences
        self.batch_size = int(lib.llama_n_batch(handle))
        self.sequence_length = int(lib.llama_n_ctx_seq(handle))
        self.cells = int(lib.llama_n_ctx(handle))
        small_window = model.window if not params.swa_full else 0
        self.can_trim = not model.is_recurrent and not small_window
        self.window = 0 if model.is_recurrent else small_window
        # llama.cpp copies of the layers with a window no more than the last of it, however much there is.
        self.copied = model.window if self.can_trim else 0
        self.can_share = self.can_trim and bool(params.kv_unified) and model.architecture != "deepseek4"
        # Shifting positions of several parts aborts.
        self._one_position = lib.llama_model_rope_type(model.handle) not in _ROPES_OF_SEVERAL
        self._outputs: list[int] = []

    def close(self) -> None:
        self.team.rest()
        self._free()

    def decode(self, batch: Batch) -> int:
        """llama_decode's code: 0 done, 1 no room (nothing changed), 2 aborted, negative failed."""
        batch.check(self.batch_size, self.sequences, self._model.vocabulary.size)
        if len(batch.outputs) > self.most_outputs:
            raise NativeError(f"a batch asks for {len(batch.outputs)} outputs where {self.most_outputs} fit")
        self.team.work()
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
        if length and not self.can_trim and not self._is_in_window(sequence, length):
            raise NativeError("this model's memory can't be cut back")
        if not lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise NativeError(f"llama.cpp kept what was to be removed from sequence {sequence}")

    def _is_in_window(self, sequence: int, length: int) -> bool:
        """All that the token at position `length` looks at is there. llama.cpp cuts back without asking that."""
        first = int(lib.llama_memory_seq_pos_min(self._memory, sequence))
        return 0 <= first <= max(0, length - self.window) if self.window else False

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
        return self._copy(sequence, lib.LLAMA_STATE_SEQ_FLAGS_NONE)

    def checkpoint(self, sequence: int) -> NDArray[np.uint8]:
        """A copy of what of a sequence can't be cut back: a recurrent state, a sliding window."""
        self._check_sequence(sequence)
        return self._copy(sequence, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def _copy(self, sequence: int, flags: int) -> NDArray[np.uint8]:
        data = np.empty(lib.llama_state_seq_get_size_ext(self.handle, sequence, flags), np.uint8)
        if lib.llama_state_seq_get_data_ext(self.handle, _bytes(data), data.size, sequence, flags) != data.size:
            raise NativeError(f"sequence {sequence} could not be copied")
        return data

    def restore(self, sequence: int, data: NDArray[np.uint8]) -> bool:
        """Fills an empty sequence from a copy; False, and it stays empty, where there is no room for it."""
        self._check_sequence(sequence)
        if lib.llama_state_seq_set_data(self.handle, _bytes(data), data.size, sequence) == data.size:
            return True
        lib.llama_memory_seq_rm(self._memory, sequence, 0, -1)
        return False

    def go_back(self, sequence: int, data: NDArray[np.uint8], length: int) -> bool:
        """Makes a sequence what it was at a checkpoint of `length` tokens; False, and it is empty, where that fails."""
        self._check_sequence(sequence)
        flags = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = lib.llama_state_seq_set_data_ext(self.handle, _bytes(data), data.size, sequence, flags)
        if size == data.size and lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
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
        self._free = freed_with(self, lib.llama_sampler_free, self.handle)
        for name, arguments in steps:
            lib.llama_sampler_chain_add(self.handle, getattr(lib, f"llama_sampler_init_{name}")(*arguments))
        lib.llama_sampler_chain_add(self.handle, lib.llama_sampler_init_dist(seed))

    def close(self) -> None:
        self._free()


def _bytes(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
