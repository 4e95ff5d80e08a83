"""A parameter as a matrix ``[rows, cols]``: rows are cut into stripes, columns are selected.

Of a weight ``[out, in]`` rows are outputs and columns are input channels. A convolution ``[out, in, *kernel]`` has
``in * kernel`` columns; a stack of matrices ``[experts, out, in]`` (last dimension of 32 or more) has
``experts * out`` rows.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["ParameterMatrix", "is_dense"]

# Below this a 3-D weight's last dimension is taken for a kernel, not for input channels.
_STACKED_COLUMNS = 32


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one run of memory, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class ParameterMatrix:
    """Row and column access to a parameter of two or more dimensions, whatever its memory layout.

    Writes go through ``detach()`` and so bump the version counter: autograd then refuses a backward that would
    have read the old values, as it does after any optimizer's step.
    """

    __slots__ = ("cols", "param", "rows")

    def __init__(self, param: Tensor) -> None:
        self.param = param
        shape = param.shape
        stacked = param.ndim == 3 and shape[2] >= _STACKED_COLUMNS and param.is_contiguous()
        self.rows = shape[0] * shape[1] if stacked else shape[0]
        self.cols = param.numel() // self.rows if self.rows else 0

    def of(self, tensor: Tensor) -> Tensor:
        """``tensor``, of the parameter's shape, as ``[rows, cols]``: a view where its layout allows one."""
        return tensor.detach().reshape(self.rows, self.cols)

    def write_rows(self, start: int, stop: int, values: Tensor) -> None:
        """Copies ``values`` (``[stop - start, cols]``) into rows ``start:stop``."""
        param = self.param.detach()
        if param.is_contiguous():
            param.view(self.rows, self.cols)[start:stop].copy_(values)
        else:
            target = param[start:stop]
            target.copy_(values.reshape(target.shape))

    def write_columns(self, columns: Tensor, values: Tensor) -> None:
        """Copies ``values`` (``[rows, len(columns)]``) into columns."""
        param = self.param.detach()
        if param.is_contiguous():
            param.view(self.rows, self.cols).index_copy_(1, columns, values)
        else:
            matrix = param.reshape(self.rows, self.cols).clone()
            param.copy_(matrix.index_copy_(1, columns, values).view(param.shape))
