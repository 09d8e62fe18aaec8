"""A half in pieces against the same half whole, on one set of rows: what the ranks of a parallel test run.

`make_case` runs both halves whole in one process and writes features, loss and gradients; `run_encoder` and
`run_backbone` run one half in pieces on every rank and return how far each number is from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from PIL import Image
from transformers import AutoProcessor
from transformers.models.glm4v import modeling_glm4v
from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrVisionAttention

from flowtrain.config.schema import Config, TrainConfig
from flowtrain.consumer.pack_run import PackRun
from flowtrain.data.measure import prepare
from flowtrain.messages import PackOrder, UpdateOrder
from flowtrain.models.backbone import BackboneHalf, PackSample
from flowtrain.models.compiled import compile_layers
from flowtrain.models.encoder import EncoderHalf
from flowtrain.models.leak import check_packing
from flowtrain.models.loading import ensure_weights
from flowtrain.parallel.context import apply_context
from flowtrain.parallel.groups import Groups, join_groups
from flowtrain.parallel.links import Links
from flowtrain.parallel.mesh import dp_rank
from flowtrain.parallel.pieces import local_tensor
from flowtrain.parallel.roles import TensorPlan, plan_tensor
from flowtrain.parallel.spread import SideSpread
from flowtrain.parallel.tensor import apply_tensor, complete_gradients, describe, whole_of
from flowtrain.pipeline import cut_sections, schedule
from flowtrain.plan import Layout, layout_of
from flowtrain.types import Module, Pack, Phase
from flowtrain.update.collectives import Collectives
from flowtrain.update.updater import Updater

CPU = torch.device("cpu")
ROWS: list[tuple[list[tuple[int, int]], int]] = [
    ([(40, 72)], 9),
    ([], 12),
    ([(50, 20), (64, 64), (30, 30)], 20),
    ([(33, 57), (40, 40)], 2),
    ([], 3),
]
"""(height, width) of each image of a row, and its text tokens; the last image of row 3 ends it but for two tokens."""

Tensors = dict[str, torch.Tensor]


@dataclass
class Case:
    """One family's rows and what the halves make of them whole. Picklable by torch."""

    folder: Path
    run_dir: Path
    inputs: list[Tensors | None]
    tokens: list[tuple[torch.Tensor, torch.Tensor]]
    features: list[tuple[torch.Tensor, ...]]
    feature_grads: list[tuple[torch.Tensor, ...]]
    loss: float
    grads: Tensors
    head_norms: bool = False


def config_of(folder: Path, run_dir: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(run_dir), "seed": 5},
            "model": {"path": str(folder), "init": "random", "dtype": "float64"},
            "data": {"train": "unused.jsonl"},
            "train": {"max_steps": 1},
        }
    )


def make_case(folder: Path, run_dir: Path, head_norms: bool = False) -> Path:
    """Run the family's halves whole; returns the file that the ranks read. `head_norms`: see `_halves`."""
    encoder, backbone = _halves(folder, run_dir, head_norms=head_norms)
    inputs, tokens = [], []
    processor = AutoProcessor.from_pretrained(folder)
    for number, (sizes, length) in enumerate(ROWS):
        given, ids = _row(processor, backbone.model.config, sizes, length, number)
        labels = ids.clone()
        labels[: len(ids) // 2] = -100
        labels[ids == backbone.model.config.image_token_id] = -100
        inputs.append(given)
        tokens.append((ids, labels))
    case = Case(folder, run_dir, inputs, tokens, [], [], 0.0, {}, head_norms)
    encoded = encoder.encode([given for given in inputs if given is not None])
    leaves = [tuple(f.detach().requires_grad_() for f in features) for features in encoded]
    case.loss = _run_packs(backbone, case, leaves)
    case.features = [tuple(f.detach().clone() for f in features) for features in leaves]
    case.feature_grads = [tuple(f.grad for f in features) for features in leaves]
    flat, grads = [f for fs in encoded for f in fs], [g for gs in case.feature_grads for g in gs]
    torch.autograd.backward(flat, grads)
    for half in (encoder, backbone):
        case.grads |= {name: p.grad for name, p in half.parameters_by_name().items() if p.grad is not None}
    path = run_dir / "case.pt"
    torch.save(case, path)
    return path


def run_encoder(group: Any, path: Path) -> dict[str, float]:
    """Tensor parallelism over all of `group`."""
    case: Case = torch.load(path, weights_only=False)
    encoder, _ = _halves(case.folder, case.run_dir, head_norms=case.head_norms)
    plan = plan_tensor(describe(encoder), dist.get_world_size(group))
    apply_tensor(encoder, plan, group, 30.0)
    encoded = encoder.encode([given for given in case.inputs if given is not None])
    flat, grads = [f for fs in encoded for f in fs], [g for gs in case.feature_grads for g in gs]
    torch.autograd.backward(flat, grads)
    errors = {f"features {i}": _error(f, r) for i, (f, r) in enumerate(zip(flat, _flat(case.features), strict=True))}
    return errors | _gradient_errors(encoder, plan, group, case)


def run_backbone(group: Any, path: Path, axis: Literal["tp", "cp"]) -> dict[str, float]:
    """One axis over all of `group`."""
    case: Case = torch.load(path, weights_only=False)
    _, backbone = _halves(case.folder, case.run_dir)
    plan = plan_tensor(describe(backbone), dist.get_world_size(group))
    if axis == "tp":
        apply_tensor(backbone, plan, group, 30.0)
        assert check_packing(backbone) == "packed"
    else:
        apply_context(backbone, group)
        plan = replace(plan, cuts={}, partial=frozenset(backbone.parameters_by_name()))
    leaves = [tuple(f.requires_grad_() for f in features) for features in case.features]
    errors = {"loss": abs(_run_packs(backbone, case, leaves) / case.loss - 1)}
    pairs = zip(_flat(leaves), _flat(case.feature_grads), strict=True)
    errors |= {f"gradient of features {i}": _error(leaf.grad, grad) for i, (leaf, grad) in enumerate(pairs)}
    return errors | _gradient_errors(backbone, plan, group, case)


def run_layout(
    group: Any, path: Path, layout: str, freeze: tuple[str, ...] = (), kind: str = "cpu", compiled: bool = False
) -> dict[str, float]:
    """The backbone over several axes, each layer computed again in the backward. Every row is a pack of its own, dealt
    to the data-parallel ranks in turn; a rank without one runs tokens that nothing is trained on. `kind` of device: a
    rank has its own."""
    device = CPU if kind == "cpu" else torch.device(kind, dist.get_rank(group))
    if device is not CPU:
        torch.cuda.set_device(device)
    case: Case = torch.load(path, weights_only=False, map_location=device)
    _, backbone = _halves(case.folder, case.run_dir, device)
    for name, module in backbone.module_of().items():
        backbone.model.get_parameter(name).requires_grad_(module not in freeze)
    backbone.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    groups = join_groups(layout_of(layout), dist.get_rank(group), device, 30.0)
    of = groups.layout
    num_layers = backbone.model.config.get_text_config().num_hidden_layers
    spread = SideSpread(groups, 30.0, cut_sections([1.0] * num_layers, 0.5, of.pp * of.vpp))
    spread.cut(backbone)
    assert check_packing(backbone) == "packed"
    if of.cp > 1:
        apply_context(backbone, groups.carrying("cp"))
    if compiled:
        compile_layers(backbone.model, device, "aot_eager")
    holding = spread.holding
    trainable = backbone.trainable_names()
    held, modules = backbone.parameters_by_name(), backbone.module_of()
    updater = Updater(held, modules, TrainConfig(max_steps=1), holding, trainable=trainable)
    leaves = [tuple(f.requires_grad_() for f in features) for features in case.features]
    packs = [[sample] for sample in _samples(case, leaves)]
    packs += [[backbone.stand_in()]] * (-len(packs) % of.dp_degree)
    mine = packs[dp_rank(of, groups.rank) :: of.dp_degree]
    links = Links(groups, device) if of.pp > 1 else None
    order = PackOrder(Phase.TRAIN, 1, Pack(0, 0, (), (), 0, 0), (), (), True, len(mine))
    runs = [PackRun(order, (), samples, {}, backbone, links) for samples in mine]
    for work in schedule(holding.stage, of.pp, of.vpp, len(mine)):
        (runs[work.slot].forward if work.forward else runs[work.slot].backward)(work.section)
    if links is not None:
        links.flush()
    expected = {name: case.grads[name] for name in trainable}
    norm = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
    reduced = sum(updater.reduce().values()) ** 0.5
    errors = {"norm": abs(reduced / norm - 1) if norm else reduced}
    for name, parameter in updater.trainable.items():
        assert parameter.grad is not None
        errors[name] = _error(holding.whole(name, parameter.grad), expected[name], 1e-6 * norm)
    tells = holding.stage == of.pp - 1 and groups.counts(("cp", "tp"))
    loss = torch.tensor(sum(run.loss_sum for run in runs) if tells else 0.0, dtype=torch.float64)
    dist.all_reduce(loss, group=group)
    errors["loss"] = abs(float(loss) / case.loss - 1)
    if holding.stage == 0:
        own = {id(f) for samples in mine for sample in samples for f in sample.features or ()}
        pairs = zip(_flat(leaves), _flat(case.feature_grads), strict=True)
        found = {i: _error(leaf.grad, grad) for i, (leaf, grad) in enumerate(pairs) if id(leaf) in own}
        errors |= {f"gradient of features {i}": error for i, error in found.items()}
    return errors | _saved_and_loaded(group, case, updater, path.parent / layout)


def _saved_and_loaded(group: Any, case: Case, updater: Updater, folder: Path) -> dict[str, float]:
    """A step, a checkpoint, and the checkpoint in a process that holds everything, and in these ranks once more. A
    second step, of larger gradients, gives what it gives without the checkpoint: moments are what they were."""
    first, second = (UpdateOrder(step, 2.0 * step - 1, 1.0, dict.fromkeys(Module, 0.1), True, None) for step in (1, 2))
    gradients = {name: p.grad.detach().clone() for name, p in updater.trainable.items() if p.grad is not None}
    held = {name: local_tensor(parameter.detach()) for name, parameter in updater.parameters.items()}

    def step(order: UpdateOrder) -> Tensors:
        for name, gradient in gradients.items():
            updater.trainable[name].grad = gradient.clone()
        updater.update(order)
        return {name: tensor.clone() for name, tensor in held.items()}

    before = step(first)
    updater.save(folder)
    dist.barrier(group)
    _, backbone = _halves(case.folder, case.run_dir)
    parameters = {name: p for name, p in backbone.parameters_by_name().items() if p.requires_grad}
    alone = Updater(parameters, backbone.module_of(), TrainConfig(max_steps=1), Groups(Layout(), 0))
    alone.load([folder])
    errors = {"step": float(alone.step != 1)}
    whole = partial(_on_cpu, updater)
    for name, parameter in updater.parameters.items():
        errors[f"saved {name}"] = _error(whole(name, parameter.detach()), alone.parameters[name].detach())
    for name, gradient in gradients.items():
        alone.parameters[name].grad = whole(name, gradient.clone())
    after = step(second)
    alone.update(second)
    for name, parameter in updater.trainable.items():
        errors[f"next {name}"] = _error(whole(name, parameter.detach()), alone.parameters[name].detach())
    updater.load([folder])
    errors |= {f"loaded {name}": _error(tensor, before[name]) for name, tensor in held.items()}
    return errors | {f"next of loaded {name}": _error(tensor, after[name]) for name, tensor in step(second).items()}


def _on_cpu(updater: Updater, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The whole of what is in pieces like a parameter."""
    return updater.holding.whole(name, tensor).cpu()


def _halves(
    folder: Path, run_dir: Path, device: torch.device = CPU, head_norms: bool = False
) -> tuple[EncoderHalf, BackboneHalf]:
    """Weights from the seed, but none that are all alike: norms of ones and projections of zeros would hide faults.

    `head_norms`: GLM-4V's vision blocks have the attention of GLM-OCR's, which norms the queries and keys of each head.
    """
    config = config_of(folder, run_dir)
    attention = GlmOcrVisionAttention if head_norms else modeling_glm4v.Glm4vVisionAttention
    with patch.object(modeling_glm4v, "Glm4vVisionAttention", attention):
        weights = ensure_weights(config)
        halves = (
            EncoderHalf.load(folder, weights, config, device, "float64"),
            BackboneHalf.load(folder, weights, config, device, "float64"),
        )
    generator = torch.Generator().manual_seed(7)
    for half in halves:
        for parameter in half.parameters_by_name().values():
            if bool((parameter == parameter.flatten()[0]).all()):
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.data.add_(noise.to(device), alpha=0.1)
    return halves


def _row(
    processor: Any, config: Any, sizes: list[tuple[int, int]], length: int, seed: int
) -> tuple[Tensors | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(64, 200, (length,), generator=generator)
    if not sizes:
        return None, text
    noise = [torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8) for size in sizes]
    images = [Image.fromarray(values.numpy()) for values in noise]
    token = getattr(processor, "boi_token", processor.image_token)
    ids = processor(text=["a".join([token] * len(sizes))], images=[images], return_tensors="pt")["input_ids"][0]
    given = {name: value for name, value in prepare(processor, images)[0].items() if isinstance(value, torch.Tensor)}
    return given, torch.cat([text[: length // 2], ids, text[length // 2 :]])


def _run_packs(backbone: BackboneHalf, case: Case, leaves: list[tuple[torch.Tensor, ...]]) -> float:
    """Two packs, forward and backward; the sum of their losses."""
    samples = _samples(case, leaves)
    total = 0.0
    for pack in (samples[:3], samples[3:]):
        loss, trained = backbone.loss(pack)
        assert trained > 0
        loss.backward()
        total += loss.item()
    return total


def _samples(case: Case, leaves: list[tuple[torch.Tensor, ...]]) -> list[PackSample]:
    grids = [None if given is None else given.get("image_grid_thw") for given in case.inputs]
    features = iter(leaves)
    return [
        PackSample(ids, labels, None if given is None else next(features), grid)
        for (ids, labels), given, grid in zip(case.tokens, case.inputs, grids, strict=True)
    ]


def _gradient_errors(half: EncoderHalf | BackboneHalf, plan: TensorPlan, group: Any, case: Case) -> dict[str, float]:
    """Of every parameter's whole gradient, and of the norm that the ranks add up without gathering it."""
    parameters = {name: p for name, p in half.parameters_by_name().items() if p.grad is not None}
    add_up = partial(Collectives(group, "rank", 30.0).sum_, step=1)
    complete_gradients({name: p.grad for name, p in parameters.items()}, plan, add_up)
    rank = dist.get_rank(group)
    mine = sum(float(p.grad.square().sum()) for name, p in parameters.items() if plan.counts(name, rank))
    squares = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(squares, group=group)
    expected = {name: case.grads[name] for name in half.parameters_by_name() if name in case.grads}
    assert parameters.keys() == expected.keys()
    norm = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
    errors = {"norm": abs(float(squares) ** 0.5 / norm - 1)}
    for name, parameter in parameters.items():
        cut = plan.cuts.get(name)
        whole = parameter.grad if cut is None else whole_of(parameter.grad, cut, group)
        errors[name] = _error(whole, expected[name], 1e-6 * norm)
    return errors


def _flat(of_samples: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [tensor for tensors in of_samples for tensor in tensors]


def _error(ours: torch.Tensor, reference: torch.Tensor, least: float = 0.0) -> float:
    """‖difference‖ to ‖reference‖, or to `least` where that is more."""
    assert ours.shape == reference.shape
    return float((ours - reference).norm() / max(float(reference.norm()), least))
