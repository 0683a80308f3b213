"""What a run will take, by arithmetic: memory by kind, the longest sample that fits, FLOPs, hours.

    python -m pod.fit recipe=llama3-32k plan=true gpu=H100 utilisation=0.4

Nothing is loaded: of the model, only the fields of its config are needed. Where a number depends on blocks that are not
known yet, it is the largest that the recipe's saving allows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pod.blocks import LayerBlocks
from pod.files import read_json
from pod.model.memory import GPUS, RESERVED, Gpu, Memory, Sharing
from pod.model.sequence_parallel import check_heads
from pod.model.shape import KNOWN_CONFIGS, Shape
from pod.recipe.errors import RecipeError
from pod.recipe.loading import load_recipe, recipes
from pod.recipe.schema import Recipe, accumulate, data_parallel_size, output_folder, steps
from pod.training.base_model import new_config


@dataclass(frozen=True)
class Plan:
    """A run's arithmetic.

    Attributes:
        recipe: the run's.
        memory: of one GPU.
        gpu_name: which GPU; utilisation: share of its peak FLOP/s that counts towards the model.
        upper_bound: the blocks are not known yet, so anchors are counted at their most.
    """

    recipe: Recipe
    memory: Memory
    gpu_name: str
    utilisation: float
    upper_bound: bool

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.gpu_name]

    @property
    def steps(self) -> int:
        return steps(self.recipe.trainer)

    @property
    def tokens_per_step(self) -> int:
        return self.memory.micro_batch * self.memory.length * data_parallel_size(self.recipe) * accumulate(self.recipe)

    @property
    def longest(self) -> int:
        return self.memory.longest(self.gpu.memory)

    @property
    def flops_per_token(self) -> tuple[float, float]:
        """As `Shape.flops_per_token`; a frozen matrix takes 4 FLOPs per parameter, a dense teacher its forward."""
        memory = self.memory
        matrices, attention = memory.shape.flops_per_token(memory.length, memory.sharing.idle)
        forward, seen = replace(memory.shape, window=None).flops_per_token(memory.length)
        if memory.adapters:
            matrices = matrices * 4 / 6 + 6.0 * memory.adapters
        if memory.distills:
            matrices, attention = matrices + forward / 3, attention + seen / 3
        return matrices, attention

    @property
    def hours(self) -> float:
        """At `utilisation` of the GPUs' peak, recomputation not counted as use."""
        flops = sum(self.flops_per_token) * self.tokens_per_step * self.steps
        return flops / (self.memory.processes * self.gpu.flops * self.utilisation) / 3600

    def lines(self) -> Iterator[str]:
        """The report."""
        memory, shape, trainer = self.memory, self.memory.shape, self.recipe.trainer
        matrices, attention = self.flops_per_token
        fits = "fits" if memory.total <= self.gpu.memory else "DOES NOT FIT"
        bound = ", anchors at their most" if self.upper_bound and memory.sharing.pairs else ""
        stay = "on the host" if memory.offload_parameters else "half of them the teacher's" if memory.teacher else ""
        kinds = [
            ("parameters", memory.parameters, stay),
            ("gradients", memory.gradients, "on the host" if memory.gradients == 0 else ""),
            ("optimiser", memory.optimizer, "on the host" if memory.offload_optimizer else ""),
            ("checkpoints", memory.checkpoints, f"of these running anchors {gib(memory.anchors)}{bound}"),
            ("working", memory.working, "the largest moment; of it or beside it:"),
            ("  attention", memory.attention, "one layer, backward"),
            ("  mlp", memory.mlp, "one layer, backward"),
            ("  logits", memory.logits, f"{memory.loss_chunk} positions"),
            ("communication", memory.communication, ""),
            ("reserved", RESERVED, "context, NCCL, fragments"),
        ]
        if not memory.checkpointing:
            kinds[3] = ("activations", memory.checkpoints, "no gradient checkpointing")
        elif memory.offload_checkpoints:
            kinds[3] = ("checkpoints", memory.checkpoints, "the rest on the host")
        groups = data_parallel_size(self.recipe)
        zero = f"ZeRO-{memory.stage}" if memory.zero else "DDP" if memory.processes > 1 else "one process"
        trained = f", {memory.adapters / 1e6:.1f}M of adapters trained" if memory.adapters else ""
        taught = ", taught by the dense base" if memory.distills else ""
        yield f"plan of {self.recipe.name}: {shape.parameters / 1e9:.3f}B parameters{trained}{taught}"
        yield (
            f"layout         {trainer.num_nodes} node(s) x {trainer.devices} {self.gpu_name}, {zero}: "
            f"{groups} sample(s) at a time, each over {memory.sequence_parallel} GPU(s)"
        )
        yield (
            f"step           {self.tokens_per_step:,} tokens = {groups} x {memory.micro_batch} samples of "
            f"{memory.length:,} tokens x {accumulate(self.recipe)} accumulated"
        )
        yield f"per GPU        {gib(memory.total)} of {gib(self.gpu.memory)}: {fits}"
        for kind, value, remark in kinds:
            yield f"  {kind:<14}{gib(value):>12}  {remark}".rstrip()
        if memory.host:
            yield f"host memory    {gib(memory.host)} for each GPU, {gib(memory.host * trainer.devices)} a node"
        yield f"longest        {self.longest:,} tokens in a sample"
        yield (
            f"FLOPs          {(matrices + attention) / 1e9:,.1f}G per token, "
            f"{100 * attention / (matrices + attention):.1f} % of them attention ({attention / 1e9:,.1f}G)"
        )
        yield (
            f"time           {self.steps:,} steps, {self.steps * self.tokens_per_step / 1e9:,.3f}B tokens: "
            f"{self.hours:,.1f} hours at {100 * self.utilisation:g} % of {self.gpu.flops / 1e12:g} TFLOP/s"
        )


def gib(value: float) -> str:
    """Bytes as text, in GiB, or in MiB below a tenth of one."""
    return f"{value / 2**30:.2f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:.2f} MiB"


def config_of(recipe: Recipe) -> dict[str, Any]:
    """The config of the recipe's model: its own, that of a local folder or of the run that will write it, or that of a
    known hub model.

    Raises:
        RecipeError: the model is none of these, or no model can be made of its config.
    """
    base = recipe.model.base
    if base is None:
        new_config(recipe.model.config)
        return dict(recipe.model.config)
    file = Path(base) / "config.json"
    if file.is_file():
        return read_json(file)
    if base in KNOWN_CONFIGS:
        return KNOWN_CONFIGS[base]
    for name in recipes():
        earlier = load_recipe([f"recipe={name}"])
        if name != recipe.name and output_folder(earlier) in (Path(base), *Path(base).parents):
            return config_of(earlier)
    raise RecipeError(
        f"model.base={base}: there is no {file}, and the plan does not know that model's sizes. Put its config.json "
        f"into a folder and name that, or name one of {', '.join(KNOWN_CONFIGS)}"
    )


def make_plan(recipe: Recipe, gpu: str = "H100", utilisation: float = 0.4) -> Plan:
    """Plan a recipe, on GPUs as it lays them out; strategy auto is ddp, as in `pod.fit`.

    Args:
        recipe: what to plan.
        gpu: a key of `GPUS`.
        utilisation: the share of the peak FLOP/s that the model's FLOPs take, in (0, 1].

    Raises:
        RecipeError: an unknown GPU or model, or a layout that the model cannot have.
    """
    if gpu not in GPUS:
        raise RecipeError(f"gpu={gpu}: must be one of {', '.join(GPUS)}")
    if not 0 < utilisation <= 1:
        raise RecipeError(f"utilisation={utilisation}: must be in (0, 1]")
    shape = Shape.from_config(config_of(recipe))
    if recipe.model.share == "window":
        shape = replace(shape, window=recipe.model.sink_size + recipe.model.recent_size)
    trainer, spread = recipe.trainer, recipe.trainer.sequence_parallel_size
    try:
        check_heads(shape.heads, shape.kv_heads, spread)
    except ValueError as error:
        raise RecipeError(f"trainer.{error}") from error
    wanted, blocks = recipe.blocks, None
    if wanted.file is not None:
        blocks = LayerBlocks.load(wanted.file)
        try:
            blocks.check(shape.layers, shape.kv_heads)
        except ValueError as error:
            raise RecipeError(f"blocks.file={wanted.file}: {error}") from error
    elif wanted.size is not None:
        if wanted.size > shape.layers:
            raise RecipeError(f"blocks.size={wanted.size}: the model has {shape.layers} layers")
        blocks = LayerBlocks.uniform(shape.layers, shape.kv_heads, wanted.size)
    if blocks is not None:
        sharing = Sharing.of(blocks, recipe.model.share)
    else:
        most = wanted.kv_saving if wanted.threshold is None else 0.25  # where the most pairs go on
        sharing = Sharing.at_most(shape, most, recipe.model.share)
    zero = trainer.strategy == "deepspeed"
    memory = Memory(
        shape,
        sharing,
        length=recipe.data.sequence_length,
        micro_batch=recipe.data.micro_batch_size,
        zero=zero,
        stage=trainer.zero_stage,
        processes=trainer.devices * trainer.num_nodes,
        sequence_parallel=spread,
        weight_bytes=2 if trainer.precision == "bf16-true" or recipe.model.dtype == "bfloat16" else 4,
        activation_bytes=4 if trainer.precision == "32-true" else 2,
        autocast=trainer.precision == "bf16-mixed" and recipe.model.dtype == "float32" and not zero,
        checkpointing=recipe.model.gradient_checkpointing,
        loss_chunk=trainer.loss_chunk,
        tiled_mlp=recipe.model.mlp_tiles > 1,
        offload_checkpoints=recipe.model.offload_checkpoints,
        offload_optimizer=trainer.offload != "nothing",
        offload_parameters=trainer.offload == "parameters",
        adapters=shape.adapters(recipe.lora.rank, recipe.lora.targets),
        quantized=recipe.model.load_in_4bit,
        distills=recipe.distill.weight > 0,
        teacher=recipe.distill.weight > 0 and recipe.lora.rank == 0,
    )
    return Plan(recipe, memory, gpu, utilisation, upper_bound=blocks is None or wanted.streaming > 0)


def show_plan(arguments: Sequence[str]) -> None:
    """`python -m pod.fit recipe=NAME [key=value ...] plan=true [gpu=NAME] [utilisation=X]`: print the plan.

    Raises:
        RecipeError: an argument that is none; as `load_recipe` and `make_plan`.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if given["plan"] != "true":
        raise RecipeError(f"plan={given['plan']}: write plan=true, or leave it out to train")
    try:
        utilisation = float(given.get("utilisation", "0.4"))
    except ValueError:
        raise RecipeError(f"utilisation={given['utilisation']}: wanted a number") from None
    own = ("plan=", "gpu=", "utilisation=")
    recipe = load_recipe([argument for argument in arguments if not argument.startswith(own)])
    print("\n".join(make_plan(recipe, given.get("gpu", "H100"), utilisation).lines()))
