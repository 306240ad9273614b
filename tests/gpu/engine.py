"""An engine for `Steps` whose kernels are torch operations, on a GPU or the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from kvoffload.transfer.layout import DeviceLayout, DeviceRegion

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_LAYERS = 8
_SIDE = {"cpu": 32, "cuda": 2048}  # Multiplying matrices of this size keeps the device busy.
_PRODUCTS = 8


class TorchEngine:
    """KV memory with patterns in its blocks, and matrix products that keep the device busy.

    Args:
        device: torch's name of the device.
        blocks: the number of blocks.
        page: the bytes of a block in one layer.
        whole_blocks: whether the layers of a block are adjacent; otherwise the blocks of a layer are.
        own_stream: whether the engine uses a separate stream, as vLLM does.
    """

    def __init__(self, device: str, blocks: int, page: int, *, whole_blocks: bool, own_stream: bool) -> None:
        self._device = torch.device(device)
        words, sizes = page // 4, (_LAYERS, blocks, page // 4)
        memory = torch.zeros(_LAYERS * blocks * words, dtype=torch.int32, device=device)
        if whole_blocks:
            self._kv = memory.view(blocks, _LAYERS, words).transpose(0, 1)
            pages, starts = _LAYERS * page, [memory.data_ptr()]
        else:
            self._kv = memory.view(sizes)
            pages, starts = page, [memory.data_ptr() + layer * blocks * page for layer in range(_LAYERS)]
        name = "cpu" if self._device.type == "cpu" else str(self._device)
        self.layout = DeviceLayout.of(DeviceRegion(at, pages, pages, blocks, name, memory) for at in starts)
        self._stream = torch.cuda.Stream(self._device) if own_stream and self.on_gpu else None
        ramp = torch.arange(words, dtype=torch.int64, device=device) * 2654435761 % 2**31
        layers = torch.arange(_LAYERS, dtype=torch.int32, device=device) * 7919
        self._pattern = ramp.to(torch.int32)[None] ^ layers[:, None]
        self._wrong = torch.zeros((), dtype=torch.int64, device=device)
        side = _SIDE[self._device.type]
        draws = torch.Generator(device).manual_seed(0)
        self._matrix = torch.randn(side, side, device=device, generator=draws)

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def wrong(self) -> int:
        """Wait for the device, and return how many reads found wrong bytes."""
        return int(self._wrong.item())

    def enter(self) -> None:
        """Make the engine's stream current, and keep it busy, so that a copy without a fence runs too early."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        self.compute()

    def write(self, block: int, seed: int) -> None:
        self._kv[:, block] = self._pattern ^ (seed * 1000003 % 2**31)

    def read(self, block: int, seed: int) -> None:
        self._wrong += (self._kv[:, block] != self._pattern ^ (seed * 1000003 % 2**31)).any()

    def compute(self) -> None:
        for _ in range(_PRODUCTS):
            self._matrix = (self._matrix @ self._matrix).clamp(-1, 1)

    def capture(self) -> None:
        """Capture a graph in the mode in which no thread may make unsafe CUDA calls."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            self.compute()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self._device)

    def on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.current_stream(self._device)) if self.on_gpu else nullcontext()
