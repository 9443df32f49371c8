"""A checkpoint written tensor by tensor: safetensors files of bounded size, and the index that names them."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kog_triton.checkpoint.hub import INDEX, SINGLE
from kog_triton.errors import RequestError, first_line

SHARD_BYTES = 1 << 30  # of a file, which is in memory while it is written; a larger tensor has a file of its own


class ShardWriter:
    """`add` tensors, then `close`: the folder then holds model.safetensors, or several files with an index."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self._waiting_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes
        if self._waiting_bytes >= self._shard_bytes:
            self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()
        count = len(self._files)
        if count == 1:
            self._files[0][0].rename(self._folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for i, (path, names) in enumerate(self._files, 1):
            file = f"model-{i:05}-of-{count:05}.safetensors"
            path.rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        path = self._folder / f"model-{len(self._files) + 1:05}.part"
        try:
            save_file(self._waiting, path, metadata={"format": "pt"})
            path.chmod(0o644)  # the library makes it its writer's alone
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{path}: cannot be written: {first_line(error)}") from error
        self._files.append((path, list(self._waiting)))
        self._waiting, self._waiting_bytes = {}, 0
