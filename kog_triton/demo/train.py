"""Trains the demo model or its twin on a corpus folder (corpus.py).

    python -m kog_triton.demo.train --data DIR --out DIR [--twin] [--tokens N] [--resume]

AdamW, linear warm-up, linear decay to zero, a small z-loss, clipped gradients; bfloat16 compute
and float32 weights on a GPU, float32 on a CPU. Everything a step depends on is the settings, the
saved tensors and the step number (the data order is a function of it), so a resumed run continues
exactly. DIR gets step-N folders, written aside and renamed, of which the newest is kept.
"""

import argparse
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kog_triton.demo.model import Decoder, Shape
from kog_triton.errors import RunError


@dataclass(frozen=True)
class Settings:
    """What a run is; a checkpoint is resumed only under the same settings."""

    tokens: int = 400_000_000
    batch: int = 64  # windows a step
    window: int = 1024  # tokens
    peak_rate: float = 3e-3
    warmup: int = 300  # steps
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    z_loss: float = 1e-4
    clip: float = 1.0
    seed: int = 0

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.batch * self.window))

    def rate(self, step: int) -> float:
        """Learning rate of a step: up over `warmup` steps, then down to zero in a straight line."""
        up = (step + 1) / self.warmup
        down = (self.steps - step) / max(1, self.steps - self.warmup)
        return self.peak_rate * min(up, down, 1.0)


def read_ids(file: Path) -> Tensor:
    """The uint16 ids of a corpus file as int32; RunError if there is no such file."""
    if not file.is_file():
        raise RunError(f"{file} is missing; write it with python -m kog_triton.demo.corpus")
    return torch.from_numpy(np.fromfile(file, dtype=np.uint16).astype(np.int32))


class Windows:
    """The data order: each pass over the text is cut at a new offset and shuffled anew."""

    def __init__(self, ids: Tensor, settings: Settings) -> None:
        self.ids = ids
        self.settings = settings
        self.per_pass = (len(ids) - 1 - settings.window) // settings.window // settings.batch
        if self.per_pass < 1:
            needed = settings.window * (settings.batch + 1) + 1
            raise RunError(f"train.bin has {len(ids)} tokens, one batch needs {needed}")
        self._pass = -1
        self._starts = torch.empty(0, dtype=torch.long)

    def batch(self, step: int) -> Tensor:
        """Ids [batch, window + 1] of one step, as int64 on the device of the text."""
        pass_idx, batch_idx = divmod(step, self.per_pass)
        size, window = self.settings.batch, self.settings.window
        if pass_idx != self._pass:
            generator = torch.Generator().manual_seed(self.settings.seed * 100_003 + pass_idx)
            offset = int(torch.randint(window, (1,), generator=generator))
            order = torch.randperm(self.per_pass * size, generator=generator)
            self._starts = (order * window + offset).to(self.ids.device)
            self._pass = pass_idx
        starts = self._starts[batch_idx * size : (batch_idx + 1) * size]
        positions = starts[:, None] + torch.arange(window + 1, device=self.ids.device)
        return self.ids[positions].long()


class Training:
    """One run's state: model, optimizer, step and loss curve."""

    def __init__(self, shape: Shape, settings: Settings, data: Path, device: str) -> None:
        self.shape, self.settings = shape, settings
        self.windows = Windows(read_ids(data / "train.bin").to(device), settings)
        on_gpu = device == "cuda"
        self.model = Decoder(shape, torch.bfloat16 if on_gpu else torch.float32)
        self.model.initialize(settings.seed)
        self.model.to(device)
        parameters = list(self.model.named_parameters())
        # Norm gains and embeddings are scales, not maps: decay would only shrink them.
        decayed = [p for n, p in parameters if p.dim() > 1 and "tok_embeddings" not in n]
        others = [p for n, p in parameters if p.dim() == 1 or "tok_embeddings" in n]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            fused=on_gpu,
        )
        self.names = [n for g in (decayed, others) for p in g for n, q in parameters if p is q]
        self.loss = torch.compile(self._loss) if on_gpu else self._loss
        self.step = 0
        self.curve: list[tuple[int, float]] = []  # (step, mean loss since the entry before)
        self.seconds = 0.0  # of training, over all resumes

    def _loss(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cross-entropy, what is minimized) in nats a token, of ids [batch, window + 1]."""
        logits = self.model(ids[:, :-1]).float().flatten(0, 1)
        normalizer = torch.logsumexp(logits, dim=-1)
        chosen = logits.gather(1, ids[:, 1:].reshape(-1, 1)).squeeze(1)
        loss = (normalizer - chosen).mean()
        return loss.detach(), loss + self.settings.z_loss * normalizer.square().mean()

    def advance(self) -> Tensor:
        """One step; returns its cross-entropy as a tensor, without waiting for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate(self.step)
        loss, objective = self.loss(self.windows.batch(self.step))
        objective.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss

    def save(self, out: Path) -> Path:
        """Write step-N whole or not at all, then remove older ones."""
        folder = out / f"step-{self.step:07d}"
        aside = out / f"{folder.name}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(self.model.state_dict(), aside / "model.safetensors")
        state = self.optimizer.state_dict()["state"]
        save_file(
            {
                f"{name}.{key}": value.contiguous()
                for index, name in enumerate(self.names)
                for key, value in state[index].items()
            },
            aside / "optimizer.safetensors",
        )
        (aside / "state.json").write_text(json.dumps(self._description()) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
        for old in sorted(out.glob("step-*")):
            if old != folder:
                shutil.rmtree(old)
        return folder

    def _description(self) -> dict[str, object]:
        return {
            "step": self.step,
            "seconds": self.seconds,
            "shape": asdict(self.shape),
            "settings": asdict(self.settings),
            "curve": self.curve,
        }

    def restore(self, folder: Path) -> None:
        """Continue from a step-N folder; RunError if it was written under other settings."""
        saved = json.loads((folder / "state.json").read_text())
        for key in ("shape", "settings"):
            own = self._description()[key]
            if saved[key] != own:
                raise RunError(f"{folder} has other {key}: {saved[key]}; start a new --out folder")
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        tensors = load_file(folder / "optimizer.safetensors")
        state: dict[int, dict[str, Tensor]] = {i: {} for i in range(len(self.names))}
        for index, name in enumerate(self.names):
            for key in ("step", "exp_avg", "exp_avg_sq"):
                state[index][key] = tensors[f"{name}.{key}"]
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.curve = [tuple(entry) for entry in saved["curve"]]


def newest(out: Path) -> Path:
    """The step-N folder with the highest N; RunError if there is none."""
    folders = sorted(p for p in out.glob("step-*") if p.suffix != ".tmp")
    if not folders:
        raise RunError(f"{out}: no step-N folder to read; train first")
    return folders[-1]


def run(training: Training, out: Path, log_every: int, save_every: int, stop: int | None) -> None:
    """Train to the last step (or `stop`), printing progress; saves at the end and on the way."""
    settings = training.settings
    last = min(settings.steps, stop if stop is not None else settings.steps)
    pending: list[Tensor] = []
    started = time.monotonic()
    while training.step < last:
        pending.append(training.advance())
        step = training.step
        if step % log_every == 0 or step == last:
            loss = float(torch.stack(pending).mean())
            elapsed = time.monotonic() - started
            training.seconds += elapsed
            rate = len(pending) * settings.batch * settings.window / elapsed
            training.curve.append((step, round(loss, 6)))
            left = (last - step) * settings.batch * settings.window / rate
            print(f"step {step}/{settings.steps} loss {loss:.4f} {rate:,.0f} tokens/s eta {left:.0f}s", flush=True)
            if not np.isfinite(loss):
                raise RunError(f"step {step}: the loss is {loss}; lower --peak-rate and retrain")
            pending, started = [], time.monotonic()
        if step % save_every == 0 or step == last:
            training.save(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model")
    parser.add_argument("--data", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--twin", action="store_true", help="train the ordinary decoder instead")
    parser.add_argument("--resume", action="store_true", help="continue from the newest in --out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--save-every", type=int, default=1000, help="steps")
    parser.add_argument("--stop", type=int, help="leave after this step, as an interruption would")
    for name in ("tokens", "batch", "window", "peak_rate", "warmup", "seed"):
        default = getattr(Settings, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    arguments = parser.parse_args()
    names = ("tokens", "batch", "window", "peak_rate", "warmup", "seed")
    settings = Settings(**{name: getattr(arguments, name) for name in names})
    shape = Shape().twin() if arguments.twin else Shape()
    torch.set_float32_matmul_precision("high")
    training = Training(shape, settings, arguments.data, arguments.device)
    if arguments.resume:
        training.restore(newest(arguments.out))
    run(training, arguments.out, arguments.log_every, arguments.save_every, arguments.stop)


if __name__ == "__main__":
    main()
