"""What programs give as descriptors: tuples, arrays, tensors, lists. Makes NIXL's lists of them.

Neither numpy nor torch is imported here: arrays are known by the buffer protocol, tensors by what
they can be asked.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from ._enums import nixl_mem_t
from ._lists import nixlRegDList, nixlXferDList
from .logging import get_logger

logger = get_logger(__name__)

MEMORY = {
    "DRAM": nixl_mem_t.DRAM_SEG,
    "VRAM": nixl_mem_t.VRAM_SEG,
    "FILE": nixl_mem_t.FILE_SEG,
    "BLOCK": nixl_mem_t.BLK_SEG,
    "OBJ": nixl_mem_t.OBJ_SEG,
    "cpu": nixl_mem_t.DRAM_SEG,
    "cuda": nixl_mem_t.VRAM_SEG,
}

_TENSOR = ("data_ptr", "numel", "element_size", "get_device", "is_contiguous", "device")
"""What torch's tensors, and those of libraries like it, have."""

_List = TypeVar("_List", nixlXferDList, nixlRegDList)


def columns_of(value: Any) -> int | None:
    """The number of columns of a two-dimensional array; `None` if it is none."""
    try:
        shape = memoryview(value).shape
    except (TypeError, ValueError):
        return None
    return shape[1] if shape and len(shape) == 2 else None


def _is_tensor(value: Any) -> bool:
    return all(hasattr(value, name) for name in _TENSOR)


def to_list(kind: type[_List], descs: Any, mem_type: str | None, columns: int) -> _List | None:
    """A list of this kind, with tuples of this length. As in NIXL, `None` and a log line say no."""
    if isinstance(descs, kind):
        return descs
    if _is_tensor(descs):
        return _of_tensors(kind, [descs], columns)
    if columns_of(descs) is not None:
        return _of_array(kind, descs, mem_type)
    if not isinstance(descs, Sequence) or len(descs) == 0:
        logger.error(
            "a list with descriptors is needed for a %s, not %s", kind.__name__, type(descs).__name__
        )
        return None
    if _is_tensor(descs[0]):
        return _of_tensors(kind, descs, columns)
    if not isinstance(descs[0], tuple) or len(descs[0]) != columns:
        logger.error("tuples of %d are needed for a %s", columns, kind.__name__)
        return None
    if mem_type is None:
        logger.error("a memory type is needed with tuples")
        return None
    return kind(MEMORY[mem_type], list(descs))


def _of_array(kind: type[_List], descs: Any, mem_type: str | None) -> _List | None:
    if mem_type is None:
        logger.error("a memory type is needed with an array")
        return None
    if columns_of(descs) != 3:
        logger.error("an array of N x 3 is needed for a %s, not N x %s", kind.__name__, columns_of(descs))
        return None
    return kind(MEMORY[mem_type], descs)


def _of_tensors(kind: type[_List], tensors: Sequence[Any], columns: int) -> _List | None:
    rows: list[tuple[Any, ...]] = []
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device != tensors[0].device:
            logger.error("tensors must be contiguous and on one device")
            return None
        row: tuple[Any, ...] = (
            tensor.data_ptr(),
            tensor.numel() * tensor.element_size(),
            max(tensor.get_device(), 0),
        )
        rows.append(row if columns == 3 else (*row, b""))
    on_host = tensors[0].get_device() == -1
    return kind(nixl_mem_t.DRAM_SEG if on_host else nixl_mem_t.VRAM_SEG, rows)
