"""shim"""

from __future__ import annotations

import torch

from meshwright.nn.attention.mask_spec import MaskSpec


class AttentionMask:
    def __init__(self, spec: MaskSpec, seq_len: int, *, device: torch.device, backend: str = "auto") -> None:
        self.causal, self.dense = spec.causal, None
        if spec.documents is not None or spec.window is not None or spec.prefix:
            rows = []
            for sample in range(len(spec.documents or ((),))):
                m = torch.zeros(seq_len, seq_len, dtype=torch.bool)
                start = 0
                for n in spec.lengths(sample, seq_len):
                    for q in range(n):
                        lo, hi = spec.visible(q, n)
                        m[start + q, start + lo : start + hi] = True
                    start += n
                rows.append(m)
            self.dense = torch.stack(rows)[:, None]
