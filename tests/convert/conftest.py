import pytest
import torch


@pytest.fixture
def olmo2_norm_in_fp64(monkeypatch):
    """The stock norm over all heads at once runs in fp32, where a mean of repeated numbers rounds."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr("transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm.forward", forward)
