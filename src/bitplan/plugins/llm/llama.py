"""llama.cpp, through the library in the wheel `xllamacpp`: a GGUF file that is run on rows of tokens.

The wheel's own interface generates text and gives no scores of a prompt, so llama.cpp's C functions in it are called.
Structures of settings are passed on as the library makes them, whatever their size; of their fields only the first
three of a context are set, and what became of these is asked.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitplan.adapters.foreign import require
from bitplan.core.errors import FileError, InputError


class _Opaque(ctypes.Structure):
    """Settings of a model or a context, larger than either."""

    _fields_ = [("content", ctypes.c_uint64 * 128)]


class _TokenBatch(ctypes.Structure):
    """Tokens to compute, as llama.h has had them for years, and room for what may come."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
        ("more", ctypes.c_uint64 * 8),
    ]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_said: list[str] = []


def _listen(level: int, text: bytes, _: Any) -> None:
    """Keep what llama.cpp says, for errors; nothing is printed."""
    _said.append(text.decode(errors="replace").strip())
    del _said[:-20]


_LISTENER = _Log(_listen)  # for as long as the library may speak


class LlamaFile:
    """A GGUF file in llama.cpp: rows of tokens → the scores of every token to come, each row by itself."""

    name = "llama.cpp"

    def __init__(self, path: Path, *, tokens: int, threads: int = 1) -> None:
        self._library = library = _opened()
        _said.clear()
        self._model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        if not self._model:
            raise FileError(f"llama.cpp cannot load {path}: {_reason()}")
        settings = library.llama_context_default_params()
        head = (ctypes.c_uint32 * 3).from_buffer(settings)
        head[:] = [tokens] * 3
        self._context = library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise FileError(f"llama.cpp cannot run {path}: {_reason()}")
        if library.llama_n_batch(self._context) != tokens or library.llama_n_ctx(self._context) < tokens:
            raise InputError("this xllamacpp has other settings than bitplan knows: install another version of it")
        library.llama_set_n_threads(self._context, threads, threads)
        self.tokens, self.words = tokens, library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def __call__(self, row: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores (tokens, words) of one row."""
        if len(row) > self.tokens:
            raise InputError(f"a row has {len(row)} tokens, and this was opened for {self.tokens}")
        library, batch = self._library, self._library.llama_batch_init(len(row), 0, 1)
        batch.count = len(row)
        for place, token in enumerate(row.tolist()):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, place, 1
            batch.seq_id[place][0], batch.logits[place] = 0, 1
        try:
            library.llama_memory_clear(library.llama_get_memory(self._context), True)
            failed = library.llama_decode(self._context, batch)
        finally:
            library.llama_batch_free(batch)
        if failed:
            raise InputError(f"llama.cpp cannot compute {len(row)} tokens: {_reason()}")
        scores = library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(scores, (len(row), self.words)).copy()

    def close(self) -> None:
        """Let go of its memory."""
        if self._context:
            self._library.llama_free(self._context)
            self._library.llama_model_free(self._model)
        self._context = self._model = None


@cache
def _opened() -> Any:
    """The library, with the types of what is called."""
    require("xllamacpp", "llama", "running a GGUF file")
    import xllamacpp.xllamacpp

    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    types: dict[str, tuple[Any, list[Any]]] = {
        "llama_backend_init": (None, []),
        "llama_model_default_params": (_Opaque, []),
        "llama_context_default_params": (_Opaque, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, _Opaque]),
        "llama_init_from_model": (pointer, [pointer, _Opaque]),
        "llama_n_ctx": (ctypes.c_uint32, [pointer]),
        "llama_n_batch": (ctypes.c_uint32, [pointer]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (number, [pointer]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
        "llama_set_n_threads": (None, [pointer, number, number]),
        "llama_batch_init": (_TokenBatch, [number, number, number]),
        "llama_batch_free": (None, [_TokenBatch]),
        "llama_decode": (number, [pointer, _TokenBatch]),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [pointer]),
        "llama_free": (None, [pointer]),
        "llama_model_free": (None, [pointer]),
        "llama_log_set": (None, [_Log, pointer]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, name, None)
        if function is None:
            raise InputError(f"this xllamacpp does not have llama.cpp's {name}: install another version of it")
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_LISTENER, None)
    library.llama_backend_init()
    return library


def _reason() -> str:
    """What llama.cpp said last that is no progress."""
    return next((line for line in reversed(_said) if len(line) > 3), "it says nothing")[:200]
