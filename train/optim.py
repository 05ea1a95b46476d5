# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of the blocks, AdamW for everything else; both follow one learning rate."""
import torch


def orthogonalize(x, steps=5):
    """x [n, rows, cols] -> nearly orthogonal matrices, by a quintic Newton-Schulz iteration, in bf16 on a GPU and fp32 on a CPU."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.float().square().sum((-1, -2), keepdim=True).sqrt() + 1e-7).to(x.dtype)
    for _ in range(steps):
        y = x @ x.transpose(-1, -2)
        x = a * x + (b * y + c * (y @ y)) @ x
    return x.transpose(-1, -2) if tall else x


def muon_direction(grads, buffers, momentum):
    """Updates the momentum buffers in place and returns the step directions, all [n, rows, cols]."""
    buffers.lerp_(grads, 1 - momentum)
    x = orthogonalize(torch.lerp(grads, buffers, momentum))
    rows, cols = x.shape[-2:]
    return x.float() * max(1.0, rows / cols) ** 0.5


class Optimizer:
    """`lr` is Muon's; AdamW runs at `lr * adam_ratio`. Everything stays on the device, so a step can be captured."""

    def __init__(self, model, lr, weight_decay, momentum=0.95, adam_ratio=0.15, compile_fn=lambda f: f):
        self.lr, self.adam_ratio, self.momentum = lr, adam_ratio, momentum
        matrices, rest = {}, []
        for name, p in model.named_parameters():
            if p.ndim == 2 and "embed" not in name and "lm_head" not in name and min(p.shape) > 16:
                matrices.setdefault(tuple(p.shape), []).append(p)
            else:
                rest.append(p)
        self.groups = [(ps, torch.zeros(len(ps), *shape, device=ps[0].device)) for shape, ps in matrices.items()]
        device = rest[0].device
        self.lr_now = torch.zeros((), device=device)
        self.shrink = torch.ones((), device=device)
        self.weight_decay = weight_decay
        self.direction = compile_fn(muon_direction)
        fused = device.type == "cuda"
        self.adam = torch.optim.AdamW(rest, lr=torch.zeros((), device=device), betas=(0.9, 0.98), eps=1e-10,
                                      weight_decay=0.0, fused=fused, capturable=fused)

    def set_scale(self, scale):
        """scale: the schedule's factor on the learning rates, 0..1."""
        self.lr_now.fill_(-self.lr * scale)
        self.shrink.fill_(1 - self.lr * scale * self.weight_decay)
        for group in self.adam.param_groups:
            group["lr"].fill_(self.lr * scale * self.adam_ratio)

    def zero_grad(self):
        for ps, _ in self.groups:
            for p in ps:
                p.grad = None
        self.adam.zero_grad(set_to_none=True)

    def forget(self):
        """Clears moments and step counts in place."""
        for _, buffers in self.groups:
            buffers.zero_()
        for state in self.adam.state.values():
            for x in state.values():
                x.zero_()

    @torch.no_grad()
    def step(self):
        for ps, buffers in self.groups:
            d = self.direction(torch.stack([p.grad for p in ps]), buffers, self.momentum)
            torch._foreach_mul_(ps, self.shrink)
            torch._foreach_add_(ps, list((d * self.lr_now).unbind(0)))
        self.adam.step()
