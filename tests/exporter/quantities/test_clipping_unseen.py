"""Gradients that change without a change of their version are published as clipped at each sampled step."""

from __future__ import annotations

import pytest
import torch
from tests.exporter.runs import config_of, published
from torch import nn

from rankscope_exporter import Monitor


def replaced_data(gradient: torch.Tensor) -> None:
    gradient.data = gradient.data * 0.5


def through_numpy(gradient: torch.Tensor) -> None:
    gradient.numpy()[...] *= 0.5


SCALES = {
    "through data": lambda gradient: gradient.data.mul_(0.5),
    "by foreach": lambda gradient: torch._foreach_mul_([gradient.data], 0.5),
    "replaced data": replaced_data,
    "through numpy": through_numpy,
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("clipped_steps", [{10, 11}, {2, 5}])
def test_clipping_without_a_new_version_is_found_at_each_step(scale, clipped_steps):
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    reduced, clipped = {}, {}
    with Monitor(config_of("gradients")).attach(net, optimizer) as monitor:
        for step in range(1, 13):
            optimizer.zero_grad()
            net(torch.randn(2, 4)).square().sum().backward()
            for name, parameter in net.named_parameters():
                reduced[step, name] = float(parameter.grad.double().norm())
                if step in clipped_steps:
                    SCALES[scale](parameter.grad)
                    clipped[step, name] = float(parameter.grad.double().norm())
            optimizer.step()
        found = published(monitor)

    assert pytest.approx(clipped, rel=1e-5) == found.norms("grad_clipped")
    assert pytest.approx(reduced, rel=1e-5) == found.norms("grad_reduced")
