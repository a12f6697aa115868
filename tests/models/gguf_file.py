"""What every GGUF file of the tests is ended by."""

from __future__ import annotations

from typing import Any


def finish(writer: Any) -> None:
    """Writes all that a gguf.GGUFWriter was given to its file, and closes it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
