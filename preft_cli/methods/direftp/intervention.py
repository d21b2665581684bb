"""The module behind one decoder block.

    h_i <- h_i + m_i W2^T (W1 h_i + b)        m_i = 1 if position i is adapted, else 0

Shapes: B batch, T tokens, D hidden size, R rank.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn, zeros

from preft_cli.methods.mask import PromptMask


class Intervention(nn.Module):
    """DiReFT on a stream. Its parameters are float32 whatever the stream's type is, and it starts as a no-op.

    Plain, that is W2 = 0 under a random W1. With `orthogonal` the rows of W2 are orthonormal from the first step to the
    last, so W1 and b are 0 instead.
    """

    def __init__(self, hidden_size: int, rank: int, *, orthogonal: bool, dropout: float) -> None:
        super().__init__()
        self.w1 = nn.Parameter(zeros(rank, hidden_size))
        """[R, D]"""
        self.w2 = nn.Parameter(zeros(rank, hidden_size))
        """[R, D]"""
        # Of this name, since weight decay leaves biases alone.
        self.bias = nn.Parameter(zeros(rank))
        """[R]"""
        self.dropout = nn.Dropout(dropout)
        self.mask: PromptMask | None = None
        """None: all positions are adapted."""
        self.enabled = True
        if orthogonal:
            nn.init.orthogonal_(self.w2)
            # Householder reflections, as pyreft's class has them. Without trivialisation, which would keep a [D, D] matrix
            # for each layer: 2 GB for a model of 8B parameters.
            nn.utils.parametrizations.orthogonal(self, "w2", orthogonal_map="householder", use_trivialization=False)
        else:
            nn.init.kaiming_uniform_(self.w1, a=5**0.5)  # as nn.Linear does

    def forward(self, h_BTD: Tensor) -> Tensor:
        if not self.enabled:
            return h_BTD
        shrunk_BTR = F.linear(self.dropout(h_BTD.to(self.w1.dtype)), self.w1, self.bias)
        if self.mask is not None:
            shrunk_BTR = self.mask.hide(shrunk_BTR)
        return h_BTD + (shrunk_BTR @ self.w2).to(h_BTD.dtype)
