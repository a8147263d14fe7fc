"""Estimates the memory of one rank of a PyTorch job, in bytes, from config.json alone, for the recipe
(engine.torch_trainer) with DistributedDataParallel, `fully_shard` or DeepSpeed's ZeRO.

Per trained parameter, of N ranks, with Adam and a computation in c bytes (4 in fp32, else 2):

                 weights    gradients      moments  master  buffers
    ddp          4          4              8        -       4 with N > 1: the reducer's buckets, copies of the gradients
    fsdp         4/N        4/N            8/N      -       what is gathered: two blocks (full) or all (grad_op)
    ZeRO-1       c          in the bucket  8/N      4/N     c/N of reduced gradients, and the bucket
    ZeRO-2       the same
    ZeRO-3       c/N        c/N            8/N      4/N     the bucket, and what is gathered

With accumulation ZeRO-1 has whole gradients, c, since it reduces them in the last iteration alone. Frozen parameters
have weights alone. Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (SC 2020), for what is partitioned; gradient_as_bucket_view in the documentation of
torch.nn.parallel.DistributedDataParallel; torch.distributed.fsdp.fully_shard; stage_1_and_2.py and stage3.py in
deepspeed/runtime/zero for the buffers. Activations are those of transformers' models with fused attention (sdpa),
operation by operation.

The peak is the largest of three moments: the gradient of the loss, the end of the backward pass, and the update; on
the CPU also a fourth one, when the model is loaded. Every rank loads the whole of it into its machine's memory before
it is divided or moved to a GPU, unless ZeRO-3 divides it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from engine.plan.document import MemoryBreakdown
from engine.plan.memory.architecture import Layer, Sublayer
from engine.plan.memory.estimate import FLOAT32_BYTES, Rank, Workload, inputs, norms
from engine.plan.memory.shape import ModelShape
from engine.protocol.job import BUCKET_ELEMENTS, TorchSettings

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CUDA_RESERVE_BYTES = 2**30
"""Outside PyTorch's allocator on a GPU: CUDA's context with the kernels of PyTorch, cuBLAS's workspaces and NCCL's
buffers, 0.5 to 1 GiB."""
PROCESS_BYTES = 430 * 10**6
"""Resident memory of an interpreter with torch, transformers, accelerate and peft, before a model: measured."""
DEEPSPEED_BYTES = 60 * 10**6
"""DeepSpeed adds this to it: measured."""
_PREFETCH_ELEMENTS = BUCKET_ELEMENTS // 4
"""stage3_prefetch_bucket_size of engine.protocol.job."""
_LIVE_ELEMENTS = 10**9
"""stage3_max_live_parameters and stage3_max_reuse_distance, DeepSpeed's defaults: a parameter that is used again within
so many others stays gathered."""
_SENT = 0.6
"""Copies of parts of a bucket of ZeRO-1 and 2, over the bucket, that are alive while it is reduced: measured."""
_LOSS_ARRAYS = 3
"""Arrays of tokens × vocabulary in float32 at the gradient of the loss: logits, log-softmax and its gradient."""
_WORKING_ARRAYS = 3
"""Arrays of a block's widest matrix, and of its residual stream, that its backward pass has besides."""


@dataclass(frozen=True)
class TorchWorkload(TorchSettings, Workload):
    """That of a PyTorch job."""

    strategy: str = "ddp"
    grad_checkpoint: bool = False
    moments: int = 2
    """Float32 arrays of the optimizer for each trained weight: 2 for Adam, 1 for SGD with momentum."""
    on_gpu: bool = True

    @property
    def compute_bytes(self) -> int:
        return COMPUTE_BYTES[self.precision]


class TorchMemory(MemoryBreakdown):
    """`peak_bytes` is what the process has beside the reserve on its GPU or, on the CPU, in all."""

    offloaded_bytes: int
    """State that is kept in the machine's memory instead of the GPU's; 0 on the CPU, where there is only one memory."""
    loaded_bytes: int
    """The model in the machine's memory before it is on the GPU; 0 on the CPU, where it is in the peak."""
    trainable_parameters: int

    @property
    def host_bytes(self) -> int:
        """Bytes of the machine's memory, for a rank on a GPU."""
        return max(self.offloaded_bytes, self.loaded_bytes)

    @property
    def host_use(self) -> str:
        return "to load the model" if self.loaded_bytes > self.offloaded_bytes else "for what is offloaded"


@dataclass(frozen=True)
class _Buffers:
    """Bytes of communication buffers that are alive at all times, and additionally at the gradient of the loss and at
    the end of the backward pass."""

    always: int = 0
    loss: int = 0
    backward: int = 0


class _TorchRank(Rank):
    workload: TorchWorkload

    def __init__(self, shape: ModelShape, workload: TorchWorkload) -> None:
        super().__init__(shape, workload)
        total = shape.total_parameters
        self.frozen = total - self.trained.parameters if self.full else total
        self.zero = workload.zero_stage if workload.strategy == "deepspeed" else 0
        self.shards = max(1, workload.world_size)
        """Ranks that share what is partitioned."""

    @cached_property
    def frozen_bytes(self) -> int:
        """In the type of the computation, but for a base that stays packed: in integers (AWQ, GPTQ, bitsandbytes)."""
        shape, packed = self.shape, self.shape.quantization
        if self.full or packed is None or packed.packing.mode != "affine":
            return self.frozen * self.workload.compute_bytes
        model = shape.architecture
        ends = sum(map(shape.matrix_bytes, [model.embedding, *([model.head] if model.head else [])]))
        return sum(shape.layer_bytes) + ends + model.last_norm * shape.dtype_bytes

    @cached_property
    def weights(self) -> int:
        """Trained weights are float32, and all of a model that is fully fine-tuned; DeepSpeed has all of them in the
        type of the computation."""
        if self.zero:
            whole = self.trained.parameters * self.workload.compute_bytes + self.frozen_bytes
        else:
            frozen = self.frozen * FLOAT32_BYTES if self.full else self.frozen_bytes
            whole = self.trained.parameters * FLOAT32_BYTES + frozen
        return -(-whole // self.shards) if self.workload.strategy == "fsdp" or self.zero == 3 else whole

    @cached_property
    def loaded(self) -> int:
        """The whole model as it is loaded, with its adapters."""
        if self.zero == 3:
            return 0
        loaded_type = FLOAT32_BYTES if self.full else self.workload.compute_bytes
        same = loaded_type == self.shape.dtype_bytes and (self.full or self.workload.precision != "fp16")
        if same and self.workload.on_gpu:
            # Mapped from the file, whose pages all ranks share and the system may take back.
            return 0
        if self.full:
            return self.shape.total_parameters * loaded_type
        return self.frozen_bytes + self.trained.parameters * FLOAT32_BYTES

    @property
    def mapped(self) -> int:
        """Bytes of a model's file that stay resident on the CPU: ZeRO-1 and 2 copy the trained weights out of it, and
        the frozen ones keep it mapped. The system takes these pages back where memory is short."""
        stays = 0 < self.zero < 3 and self.full and self.workload.precision == "fp32" and self.frozen > 0
        return self.trained.parameters * FLOAT32_BYTES if stays and not self.workload.on_gpu else 0

    @cached_property
    def optimizer(self) -> int:
        """Moments in float32, and DeepSpeed's masters, which it also has in fp32."""
        per_parameter = self.workload.moments * FLOAT32_BYTES + (FLOAT32_BYTES if self.zero else 0)
        return -(-self.trained.parameters * per_parameter // (1 if self.workload.strategy == "ddp" else self.shards))

    @cached_property
    def gradients(self) -> int:
        """Those alive at the end of the backward pass: float32, with ZeRO the rank's part in the computation's type."""
        trained, compute = self.trained.parameters, self.workload.compute_bytes
        if self.workload.strategy == "ddp":
            return trained * FLOAT32_BYTES
        return -(-trained * (compute if self.zero else FLOAT32_BYTES) // self.shards)

    @property
    def accumulated(self) -> int:
        """Gradients of an update's earlier iterations. ZeRO-1 keeps them whole and on the GPU until its end."""
        if self.workload.accumulation == 1:
            return 0
        if self.zero == 1:
            return self.trained.parameters * self.workload.compute_bytes
        return 0 if "gradients" in self.away else self.gradients

    @cached_property
    def update(self) -> int:
        """Working memory of the update, of ZeRO alone: a gradient in float32, and with Adam another array: measured."""
        arrays = (2 if self.workload.moments == 2 else 1) if self.zero else 0
        return -(-self.trained.parameters // self.shards) * FLOAT32_BYTES * arrays

    @cached_property
    def blocks(self) -> list[int]:
        """Parameters of each layer, adapters included."""
        first = len(self.shape.architecture.layers) - len(self.trained_layers)
        adapters = 0 if self.full else -(-self.trained.parameters // max(1, len(self.trained_layers)))
        return [
            layer.parameters + (adapters if number >= first else 0)
            for number, layer in enumerate(self.shape.architecture.layers)
        ]

    @cached_property
    def buffers(self) -> _Buffers:
        trained, compute, workload = self.trained.parameters, self.workload.compute_bytes, self.workload
        largest = max(self.blocks)
        # The embedding, the head and the last norm.
        outside = self.shape.total_parameters - sum(layer.parameters for layer in self.shape.architecture.layers)
        if workload.strategy == "ddp":
            return _Buffers(always=trained * FLOAT32_BYTES if workload.world_size > 1 else 0)
        if workload.strategy == "fsdp":
            # The section that is used, the next one, and the flat copy that the next one is gathered into.
            two = min(2 * largest, sum(self.blocks))
            inside = sum(self.blocks) if workload.sharding == "grad_op" else two
            gathered = (outside + inside + max(outside, largest)) * compute
            reduced = largest if self.full else trained // max(1, len(self.trained_layers))
            back = reduced * (compute + FLOAT32_BYTES) + -(-reduced * FLOAT32_BYTES // self.shards)
            return _Buffers(loss=gathered, backward=(outside + two) * compute + back)
        # On a GPU a bucket is allocated whole; on the CPU memory is resident once it is written to.
        bucket = (BUCKET_ELEMENTS if workload.on_gpu else min(trained, BUCKET_ELEMENTS)) * compute
        if self.zero < 3:
            # Two buckets, one filled while the other is sent, from the start of the backward pass to its end.
            both = 2 * bucket if workload.on_gpu else min(trained, 2 * BUCKET_ELEMENTS) * compute
            sent = round(_SENT * min(trained, BUCKET_ELEMENTS) * compute)
            return _Buffers(loss=both if workload.on_gpu else 0, backward=both + sent)
        whole = sum(self.blocks) + outside
        live = min(whole, _LIVE_ELEMENTS) * compute
        fetched = min(whole, _PREFETCH_ELEMENTS + largest) * compute
        return _Buffers(always=bucket, loss=live + fetched, backward=live)

    @cached_property
    def away(self) -> frozenset[str]:
        """The parts of the state that are not on the GPU."""
        workload = self.workload
        if workload.offload == "none" or workload.strategy == "ddp" or not workload.on_gpu:
            return frozenset()
        if workload.strategy == "fsdp" or self.zero == 3:
            return frozenset({"weights", "gradients", "optimizer"})
        return frozenset({"gradients", "optimizer"})

    @property
    def offloaded(self) -> int:
        """Bytes of the machine's memory, with those of the update, which is made there. What counts as gradients of
        ZeRO-1 and 2 is a buffer for the updated weights; accumulation has another one (accumulated_grads_in_cpu)."""
        if not self.away:
            return 0
        if self.workload.offload == "nvme":
            # grad_partitions_flat_buffer, from which they are written.
            return self.gradients
        state = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        again = self.gradients if 0 < self.zero < 3 and self.workload.accumulation > 1 else 0
        return sum(state[name] for name in self.away) + self.update + again

    @cached_property
    def _per_token(self) -> list[tuple[int, int]]:
        """Bytes per token of each trained layer: what it keeps, and the working memory of its backward pass."""
        by_layer = {}
        for key, layer in {id(layer): layer for layer in self.trained_layers}.items():
            widest = max((matrix.outputs * matrix.active for matrix in layer.matrices), default=0)
            working = _WORKING_ARRAYS * (widest + self.shape.hidden) * self.workload.compute_bytes
            by_layer[key] = self._kept(layer), working
        return [by_layer[id(layer)] for layer in self.trained_layers]

    @property
    def _autocast(self) -> bool:
        """The operations convert, and not the parameters: DDP in 16 bits."""
        return self.workload.strategy == "ddp" and self.workload.compute_bytes < FLOAT32_BYTES

    @property
    def _residual(self) -> int:
        """Bytes of an element of the residual stream: under autocast the embedding is as its weights are."""
        return FLOAT32_BYTES if self._autocast and self.full else self.workload.compute_bytes

    def _kept(self, layer: Layer) -> int:
        one = self.workload.compute_bytes
        copied = one if self._autocast else FLOAT32_BYTES
        kept = (_kept_by(part, one) + inputs(part, self.workload, one, copied) for part in layer.sublayers)
        return norms(layer, self.workload, self._residual) + sum(kept)

    def activations(self, batch: int) -> tuple[int, int, int]:
        """Bytes that all layers keep, those of the backward pass of one, and of the loss."""
        tokens, per_token = batch * self.workload.sequence, self._per_token
        kept = [size for size, _ in per_token]
        working = max((size for _, size in per_token), default=0)
        if self.workload.grad_checkpoint:
            working += max(kept, default=0)
            kept = [self.shape.hidden * self._residual] * len(kept)
        one = self.workload.compute_bytes
        logits = self.shape.vocabulary * (_LOSS_ARRAYS * FLOAT32_BYTES + (one if one < FLOAT32_BYTES else 0))
        return tokens * sum(kept), tokens * working, tokens * logits

    @cached_property
    def converted(self) -> int:
        """16-bit copies of float32 weights, which autocast makes in the forward pass and the backward pass needs."""
        if not self._autocast or not self.full:
            return 0
        return (self.shape.total_parameters - self.shape.architecture.embedding.weights) * self.workload.compute_bytes


def _kept_by(sublayer: Sublayer, one: int) -> int:
    """Bytes per token that a sublayer keeps beside the inputs of its matrices: of attention the queries, keys and
    values, the latter two repeated for all heads, and the output; of a feed-forward network what goes into the
    activation and, with a gate, what comes out of it. Of others, what MLX's operations keep."""
    outputs = {matrix.source: matrix for matrix in sublayer.matrices}
    if sublayer.scores and sublayer.window is None and "out" in outputs:
        return 4 * outputs["out"].inputs * one
    if "inner" in outputs and not sublayer.kept_float32:
        down = outputs["inner"]
        inward = sum(matrix.outputs * matrix.active for matrix in sublayer.matrices if matrix.source == "in")
        gated = inward >= 2 * down.inputs * down.active
        return (inward + (down.inputs * down.active if gated else 0)) * one
    return sublayer.kept * one + sublayer.kept_float32 * FLOAT32_BYTES


def torch_estimate(shape: ModelShape, workload: TorchWorkload) -> TorchMemory:
    """Raises InputError as `engine.plan.memory.estimate.estimate` does."""
    return _estimate(_TorchRank(shape, workload), workload.batch)


def torch_estimates(shape: ModelShape, workload: TorchWorkload) -> Callable[[int], TorchMemory]:
    """As `torch_estimate`, for any number of sequences."""
    return partial(_estimate, _TorchRank(shape, workload))


def _estimate(rank: _TorchRank, batch: int) -> TorchMemory:
    workload, buffers = rank.workload, rank.buffers
    state = {"weights": rank.weights, "gradients": rank.gradients, "optimizer": rank.optimizer}
    here = {name: 0 if name in rank.away else size for name, size in state.items()}
    update = 0 if "optimizer" in rank.away else rank.update
    kept, working, loss = rank.activations(batch)
    always = here["weights"] + here["optimizer"] + buffers.always
    at_loss = rank.accumulated + kept + rank.converted + loss + buffers.loss
    at_end = max(here["gradients"], rank.accumulated) + working + buffers.backward
    at_update = here["gradients"] + update
    communication = buffers.always + (buffers.loss if at_loss >= at_end else buffers.backward)
    process = PROCESS_BYTES + (DEEPSPEED_BYTES if rank.zero else 0) + rank.mapped
    return TorchMemory(
        weights_bytes=here["weights"],
        gradients_bytes=here["gradients"],
        optimizer_bytes=here["optimizer"],
        activations_bytes=kept + rank.converted,
        logits_bytes=loss,
        communication_bytes=communication,
        update_bytes=update,
        reserve_bytes=CUDA_RESERVE_BYTES if workload.on_gpu else process,
        peak_bytes=max(always + max(at_loss, at_end, at_update), 0 if workload.on_gpu else rank.loaded),
        offloaded_bytes=rank.offloaded,
        loaded_bytes=rank.loaded if workload.on_gpu else 0,
        trainable_parameters=rank.trained.parameters,
    )
