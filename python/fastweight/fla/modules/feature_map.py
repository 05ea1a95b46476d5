# SPDX-License-Identifier: Apache-2.0
"""fla.modules.feature_map: the maps of q and k that its linear attention layer offers."""
import torch
from torch import nn

__all__ = ["DPFPFeatureMap", "HadamardFeatureMap", "HedgehogFeatureMap", "T2RFeatureMap"]


class HedgehogFeatureMap(nn.Module):
    """softmax over [2 y, -2 y], y = layer(x), which starts as the identity. Source: arXiv 2402.04347."""

    def __init__(self, head_dim):
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim)
        self.init_weights_()

    def init_weights_(self):
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        y = 2 * self.layer(x)
        return torch.cat((y, -y), -1).softmax(-1)


class T2RFeatureMap(nn.Module):
    """relu(layer(x)), head_dim to dot_dim (None: head_dim). Source: arXiv 2103.13076."""

    def __init__(self, head_dim, dot_dim=None, bias=False):
        super().__init__()
        self.head_dim, self.dot_dim, self.bias = head_dim, head_dim if dot_dim is None else dot_dim, bias
        self.layer = nn.Linear(head_dim, self.dot_dim, bias=bias)

    def forward(self, x):
        return self.layer(x).relu()


class DPFPFeatureMap(nn.Module):
    """y = [relu(x), -relu(x)] times itself rolled by 1 .. nu, one after the other; no parameters. Source: arXiv 2102.11174, whose second
    half is relu(-x): here it is as fla has it."""

    def __init__(self, head_dim, nu=4):
        super().__init__()
        del head_dim
        self.nu = nu

    def forward(self, x):
        y = torch.cat((x.relu(), -x.relu()), -1)
        return torch.cat([y * y.roll(shift, -1) for shift in range(1, self.nu + 1)], -1)


class HadamardFeatureMap(nn.Module):
    """layer1(x) layer2(x)."""

    def __init__(self, head_dim):
        super().__init__()
        self.layer1 = nn.Linear(head_dim, head_dim)
        self.layer2 = nn.Linear(head_dim, head_dim)

    def forward(self, x):
        return self.layer1(x) * self.layer2(x)
