"""Seam: the weights. While `kept` lasts, vLLM's registry of loaders (0.26, 0.32) hands out one that keeps them.

The first engine loads as vLLM does, publishes what was loaded (before vLLM post-processes it, so that this works on every platform: a CPU
build packs weights into private memory then) and goes on over the sealed copy. Any other builds the model without memory (on the ``meta``
device), lays its tensors over the kept ones and post-processes in the same way. Parameters are read-only from then on; everything else
that a module holds (buffers, scales) is a private copy, because vLLM writes to some of it.

For as long as the first engine publishes there are two copies of the weights. No KV cache exists yet by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.torch_memory import view
from shadowsup.workers.vllm import versions
from shadowsup.workers.vllm.holding import Holding
from shadowsup.workers.weights import KeptWeights, TensorSpec, WeightStore

FORMATS = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "dummy", "fastsafetensors")
"""Loaders that load all of it in the way of vLLM's base class."""

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.json", "*.model")

log = logging.getLogger("shadowsup.engine")


@contextlib.contextmanager
def kept(life: Holding) -> Iterator[None]:
    """Have the model that vLLM loads meanwhile come from kept memory."""
    from vllm.model_executor import model_loader

    before = dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER)
    table = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    for name, loader in before.items():
        table[name] = _keeping(loader, life) if name in FORMATS else _refusing(name)
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def _refusing(name: str) -> Any:
    def refuse(load_config: Any) -> Any:
        raise WorkerError(f"load_format {name} is not supported with kept memory", f"use one of {', '.join(FORMATS)}", fatal=True)

    return refuse


def _keeping(base: Any, life: Holding) -> Any:
    class KeepingLoader(base):
        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            store = life.connect()
            mark = fingerprint(vllm_config, model_config, life)
            weights = store.attach(mark)
            if weights is not None:
                life.progress("mapping kept weights")
                model = _attach(vllm_config, model_config, prefix, self.load_config, weights)
            else:
                life.progress("loading weights")
                self._publish = (store, mark)
                model = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                weights = self._weights
            life.take_weights(weights, mark)
            return model

        def load_weights(self, model: Any, model_config: Any) -> None:
            _check(model)
            super().load_weights(model, model_config)
            life.progress("publishing weights")
            store, mark = self._publish
            self._weights = publish(model, store, mark)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what was loaded is no memory of anybody's any more: the KV comes next
            log.info("published %.2f GB of weights", self._weights.nbytes / 1e9)

    return KeepingLoader


def fingerprint(vllm_config: Any, model_config: Any, life: Holding) -> Fingerprint:
    """Return what the loaded bytes depend on: the model's files, vLLM's own layout of them, type and rank."""
    parallel = vllm_config.parallel_config
    device = "cpu" if life.device == "host" else "cuda"
    files = _files(Path(model_config.model))
    config = json.dumps(model_config.hf_config.to_dict(), sort_keys=True, default=str)
    return Fingerprint(
        (
            ("engine", "vllm"),
            ("vllm", versions.installed() or ""),
            ("model", str(model_config.model)),
            ("revision", str(model_config.revision)),
            ("files", hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()),
            ("config", hashlib.blake2b(config.encode(), digest_size=16).hexdigest()),
            ("dtype", str(model_config.dtype)),
            ("load_format", str(vllm_config.load_config.load_format)),
            ("args", json.dumps(life.spec.args, sort_keys=True, default=str)),
            ("platform", device),
            ("rank", f"{life.spec.rank}/{parallel.world_size}"),
        )
    )


def _files(folder: Path) -> list[list[object]]:
    """Return name, size and time of every file of a model's folder; nothing for a hub id, which its revision pins."""
    if not folder.is_dir():
        return []
    found = sorted({file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)})
    return [[file.name, status.st_size, status.st_mtime_ns] for file in found for status in (file.stat(),)]


# --- the tensors of a model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Where a module, or an object that a module holds, has a tensor."""

    key: str
    holder: Any
    name: str
    tensor: torch.Tensor
    parameter: bool

    def put(self, tensor: torch.Tensor, made: dict[int, torch.Tensor] | None = None) -> None:
        """Set it. A parameter keeps its object, or, from ``meta`` (which has no other data), its class and vLLM's own attributes.

        Args:
            made: parameters that were made so, by the identity of what they replace: tied ones stay one object.
        """
        if self.parameter and made is not None:
            new = made.get(id(self.tensor))
            if new is None:
                new = made[id(self.tensor)] = torch.Tensor._make_subclass(type(self.tensor), tensor, False)
                new.__dict__.update(self.tensor.__dict__)
            self.holder._parameters[self.name] = new
        elif self.parameter:
            self.tensor.data = tensor
        elif isinstance(self.holder, torch.nn.Module) and self.name in self.holder._buffers:
            self.holder._buffers[self.name] = tensor
        else:
            setattr(self.holder, self.name, tensor)


def slots(model: Any) -> Iterator[Slot]:
    """Yield every tensor of ``model``: parameters, buffers, and what its modules and their helpers (attention implementations, quantisation
    methods) hold as plain attributes."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield Slot(f"{path}.{name}", module, name, parameter, True)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield Slot(f"{path}.{name}", module, name, buffer, False)
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield Slot(f"{path}.{name}", module, name, value, False)
            elif (
                not isinstance(value, torch.nn.Module) and type(value).__module__.partition(".")[0] == "vllm" and hasattr(value, "__dict__")
            ):
                for inner, held in list(vars(value).items()):
                    if isinstance(held, torch.Tensor) and not isinstance(held, torch.nn.Parameter):
                        yield Slot(f"{path}.{name}.{inner}", value, inner, held, False)


def _check(model: Any) -> None:
    """Raises WorkerError: (fatal) the model has modules whose post-processing may write to the weights in place."""
    experts = {type(module).__name__ for module in model.modules() if "FusedMoE" in type(module).__name__}
    if experts:
        hint = "serve it by engine: command, without kept memory"
        raise WorkerError("a mixture of experts is not supported with kept memory", hint, fatal=True)


def publish(model: Any, store: WeightStore, mark: Fingerprint) -> KeptWeights:
    """Copy the tensors of ``model`` into kept memory, seal it, and lay its parameters over it.

    Raises:
        OutOfMemory, KeeperError: the keeper cannot, or will not.
    """
    found = {slot.key: slot for slot in slots(model) if slot.tensor.numel() and not slot.tensor.is_meta}
    first: dict[tuple[int, int], str] = {}
    same = {key: first.setdefault((id(slot.tensor), slot.tensor.data_ptr()), key) for key, slot in found.items()}
    plan = [
        TensorSpec(key, str(found[key].tensor.dtype).removeprefix("torch."), tuple(found[key].tensor.shape), found[key].tensor.nbytes)
        for key in found
        if same[key] == key
    ]
    devices = {key: str(slot.tensor.device) for key, slot in found.items()}
    extras = {"same.json": json.dumps(same).encode(), "devices.json": json.dumps(devices).encode()}
    writer = store.publish(plan, extras, mark)
    with torch.no_grad():
        for spec in plan:
            source = found[spec.name].tensor.detach()
            view(writer.tensors[spec.name], _memory_device(source.device, writer.tensors[spec.name].device)).copy_(source)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    weights = writer.seal()
    _lay_over(found, weights, same)
    return weights


def _attach(vllm_config: Any, model_config: Any, prefix: str, load_config: Any, weights: KeptWeights) -> Any:
    """Return the model over ``weights``, post-processed."""
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    device = torch.device(vllm_config.device_config.device if load_config.device is None else load_config.device)
    with set_default_torch_dtype(model_config.dtype):
        with torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        _check(model)
        same = json.loads(weights.extras["same.json"])
        devices = json.loads(weights.extras["devices.json"])
        found = {slot.key: slot for slot in slots(model)}
        _lay_over(found, weights, same, devices)
        left = [slot.key for slot in slots(model) if slot.tensor.is_meta and slot.tensor.numel()]
        if left:
            raise WorkerError(f"kept weights lack {', '.join(left[:3])}", "the model's code has changed; restart the worker", fatal=True)
        for slot in list(slots(model)):
            if slot.tensor.is_meta:  # empty
                slot.put(torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype, device=device))
        process_weights_after_loading(model, model_config, device)
    log.info("mapped %.2f GB of kept weights", weights.nbytes / 1e9)
    return model.eval()


def _lay_over(found: dict[str, Slot], weights: KeptWeights, same: dict[str, str], devices: dict[str, str] | None = None) -> None:
    """Make parameters read-only views of ``weights``. With ``devices`` (nothing has been loaded here) all else becomes a private copy."""
    made: dict[int, torch.Tensor] | None = None if devices is None else {}
    for key, source in same.items():
        slot = found.get(key)
        if slot is None or (devices is None and not slot.parameter):
            continue
        kept_tensor = weights.tensors[source]
        kept = view(kept_tensor, _memory_device(None, kept_tensor.device))
        if kept.shape != slot.tensor.shape or kept.dtype != slot.tensor.dtype:
            raise WorkerError(f"kept weights have another {key}: {tuple(kept.shape)} of {kept.dtype}", "restart the worker", fatal=True)
        if slot.parameter:
            slot.put(kept, made)
        elif devices is not None:
            slot.put(kept.to(devices[key], copy=True))


def _memory_device(source: torch.device | None, device: str) -> torch.device:
    """Return torch's name for where kept memory lies."""
    if device == "host":
        return torch.device("cpu")
    return source if source is not None and source.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
