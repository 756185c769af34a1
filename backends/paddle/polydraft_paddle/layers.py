"""Makes a Paddle `nn.Layer` a model: its decoder blocks compute themselves, over rows and a cache that core provides.

A user builds a `LayerModel` and passes it to `Engine` or `LLM` in place of a checkpoint; target blocks and MTP blocks may both be
layers. It does not run steps: rows, KV cache, rotation, attention, head, verification and drafts stay with core and the backend.

    def forward(self, x, positions, attend):        # of a block: x [n, hidden], positions [n] int32
        q, k, v = ...                               # [n, heads * head_dim], [n, kv_heads * head_dim] twice, not rotated
        x = x + self.o_proj(attend(q, k, v))        # rotates, stores k and v, attends: [n, heads * head_dim]
        return x + self.mlp(self.norm(x))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polydraft.errors import CapabilityError, CheckpointError
from polydraft.models.block import BlockCall
from polydraft.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from polydraft.device import Launch, Stream
    from polydraft.models.block import CustomBlock

DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


class LayerModel(Checkpoint):
    """A model whose tensors are parameters of `layer`; its `blocks`, given by prefix ("layers.0", "mtp.0"), compute themselves.

    `path` is a directory with config.json and tokenizer.json of a family that core knows; `rename` turns a parameter's name into
    that of the family's checkpoint, which most layers have already. Linear layers of Paddle keep their weights the other way
    round; that is taken care of. Errors: `CheckpointError` for two parameters of one name."""

    def __init__(
        self, path: str | Path, layer: Any, blocks: Mapping[str, Any], *, rename: Callable[[str], str] = lambda name: name
    ) -> None:
        import paddle

        turned = {f"{prefix}.weight" for prefix, part in layer.named_sublayers() if isinstance(part, paddle.nn.Linear)}
        self._parameters: dict[str, tuple[Any, bool]] = {}
        for name, value in layer.state_dict().items():
            known = rename(name)
            if known in self._parameters:
                raise CheckpointError(f"two parameters of the layer are called {known}; rename them apart")
            self._parameters[known] = value, name in turned
        layer.eval()
        self._blocks = {prefix: LayerBlock(prefix, block) for prefix, block in blocks.items()}
        super().__init__(path)

    def names(self) -> tuple[str, ...]:
        """Every parameter."""
        return tuple(sorted(self._parameters))

    def file(self, name: str) -> Path:
        """What an error names in a file's place."""
        return self.path / f"nn.Layer ({name})"

    def shape(self, name: str) -> tuple[int, ...]:
        """As a checkpoint would have it."""
        value, turned = self._parameter(name)
        return tuple(value.shape[::-1] if turned else value.shape)

    def dtype(self, name: str) -> str:
        """How the parameter is kept."""
        kept = str(self._parameter(name)[0].dtype).rpartition(".")[2]
        if kept not in DTYPES:
            raise CheckpointError(f"parameter {name} of the layer is {kept}, wanted one of {', '.join(DTYPES)}; cast the layer")
        return DTYPES[kept]

    def read_into(self, name: str, out: NDArray[np.float32]) -> None:
        """Copy a parameter to the host."""
        value, turned = self._parameter(name)
        host = value.astype("float32").numpy()
        out[...] = host.T if turned else host

    def same_bytes(self, name: str, other: str) -> bool:
        """Whether two parameters hold the same numbers."""
        return bool(np.array_equal(self.tensor(name), self.tensor(other)))

    def custom_blocks(self) -> dict[str, CustomBlock]:
        """The blocks that are layers."""
        return dict(self._blocks)

    def _parameter(self, name: str) -> tuple[Any, bool]:
        if name not in self._parameters:
            raise CheckpointError(f"the layer has no parameter {name}; give it one, or map a name to it with `rename`")
        return self._parameters[name]

    def _open(self) -> dict[str, Any]:
        return {}  # no file: every tensor is a parameter


class LayerBlock:
    """One decoder block as a layer."""

    def __init__(self, prefix: str, layer: Any) -> None:
        self.prefix, self.layer = prefix, layer

    @property
    def nbytes(self) -> int:
        """Of its parameters."""
        return sum(int(p.size) * int(p.element_size()) for p in self.layer.parameters())

    def bind(self, call: BlockCall) -> Launch:
        """The layer over the rows of `call.x`; `CapabilityError` on a device whose memory is not Paddle's."""
        import paddle

        from polydraft_paddle.device import PaddleDevice
        from polydraft_paddle.ops import put
        from polydraft_paddle.place import use

        device = call.table.device
        if not isinstance(device, PaddleDevice):
            raise CapabilityError(
                f"block {self.prefix} of this model is a Paddle layer, got the device {device.spec} of another library; name the "
                "backend paddle or xpu"
            )
        layer = self.layer.to(device=device.spec, dtype=str(call.x.tensor.dtype).rpartition(".")[2])
        rotate_and_store, attention = call.attention()
        x, qkv, attended, positions = (
            buffer.tensor for buffer in (call.x, call.scratch.qkv, call.scratch.attended, call.positions)
        )

        def launch(stream: Stream, n: int) -> None:
            if not n:
                return

            def attend(q: Any, k: Any, v: Any) -> Any:
                put(qkv[:n], paddle.concat([q, k, v], axis=1))
                rotate_and_store(stream, n)
                attention(stream, n)
                return attended[:n]

            use(device.spec)
            device.counters.launches += 1
            with paddle.no_grad():
                put(x[:n], layer(x[:n], positions[:n], attend))

        return launch
