"""Train adapters on layers of bitsandbytes: low_bit.py FORMAT OPTIMIZER."""

import copy
import sys

import bitsandbytes as bnb
import torch

kind, optimizer = sys.argv[1:3]
WIDTH, LAYERS, ROWS, RANK = 512, 3, 256, 8


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        if kind == "int8":
            self.base = bnb.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False, threshold=6.0)
        else:
            self.base = bnb.nn.Linear4bit(
                WIDTH,
                WIDTH,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type=kind.split("-")[0],
                compress_statistics=kind.endswith("-double"),
            )
        self.down = torch.nn.Linear(WIDTH, RANK, bias=False, dtype=torch.bfloat16)
        self.up = torch.nn.Linear(RANK, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS))).to("cuda")
packed = bnb.nn.Int8Params if kind == "int8" else bnb.nn.Params4bit
assert isinstance(model[0].base.weight, packed)
# A copy is packed like its original.
copied = copy.deepcopy(model[0].base)
assert isinstance(copied.weight, packed) and copied.weight.weights == WIDTH**2
assert kind == "int8" or copied.weight.quant_state.blocksize == model[0].base.weight.quant_state.blocksize
del copied
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
steps = getattr(bnb.optim, optimizer)(trained, lr=1e-3)
for _ in range(4):
    batch = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    loss = model(batch).float().pow(2).mean()
    loss.backward()
    steps.step()
    steps.zero_grad()
