"""Training scripts in the usual styles, and commands that run them, for the tests of knobs."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.scripts.command import parse_command

if TYPE_CHECKING:
    from trimtab.spec.script import ScriptCommand

IMAGENET = """
import argparse
import torch
parser = argparse.ArgumentParser(description='training')
parser.add_argument('data', nargs='?', default='imagenet')
parser.add_argument('-j', '--workers', default=4, type=int)
parser.add_argument('-b', '--batch-size', default=256, type=int, metavar='N',
                    help='mini-batch size (default: 256), this is the total '
                         'batch size of all GPUs on the current node when '
                         'using Data Parallel or Distributed Data Parallel')
parser.add_argument('--world-size', default=-1, type=int)
parser.add_argument('--dummy', action='store_true')
def worker(gpu, ngpus_per_node, args):
    args.batch_size = int(args.batch_size / ngpus_per_node)
"""

WORDS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument('--batch_size', type=int, default=20, metavar='N', help='batch size')
parser.add_argument('--eval_batch_size', type=int, default=10)
parser.add_argument('--bptt', type=int, default=35)
args = parser.parse_args()
"""

NANO = """
import os
batch_size = 12 # if gradient_accumulation_steps > 1, this is the micro-batch size
gradient_accumulation_steps = 5 * 8 # used to simulate larger batch sizes
block_size = 1024
dtype = 'bfloat16' if torch.cuda.is_bf16_supported() else 'float16'
compile = True # use PyTorch 2.0 to compile the model to be faster
exec(open('configurator.py').read())
gradient_accumulation_steps //= ddp_world_size
"""

TRAINER = """
from transformers import HfArgumentParser, Trainer, TrainingArguments
@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="gpt2", metadata={"help": "the model"})
parser = HfArgumentParser((ModelArguments, TrainingArguments))
"""

ACCELERATE = """
import argparse
from accelerate import Accelerator
def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=8,
                        help="Batch size (per device) for the training dataloader.")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--allow_tf32", action="store_true")
accelerator = Accelerator()
"""

LIGHTNING = """
from lightning.pytorch.cli import LightningCLI
LightningCLI(Model, Data)
"""

TIMM = """
import argparse
group = argparse.ArgumentParser()
group.add_argument('-b', '--batch-size', type=int, default=128, help='Input batch size for training')
group.add_argument('-vb', '--validation-batch-size', type=int, default=None)
group.add_argument('--grad-accum-steps', type=int, default=1)
group.add_argument('--grad-checkpointing', action='store_true', default=False)
group.add_argument('--amp', action='store_true', default=False)
group.add_argument('--amp-dtype', default='float16', type=str, help='lower precision AMP dtype')
group.add_argument('--torchcompile', nargs='?', type=str, default=None, const='inductor')
"""

CLICK = """
import click
@click.command()
@click.option("--batch-size", "-b", default=32, help="Samples per GPU.")
@click.option("--amp/--no-amp", default=False)
@click.option("--no-compile", is_flag=True)
def main(batch_size, amp, no_compile):
    with torch.autocast("cuda", dtype=torch.bfloat16): ...
"""

TYPER = """
import typer
from typing import Annotated
app = typer.Typer()
@app.command()
def main(
    data: str,
    batch_size: int = 16,
    grad_accum: Annotated[int, typer.Option("--accumulate", help="micro-batches")] = 2,
    bf16: bool = True,
    compile: bool = typer.Option(False, "--compile/--eager"),
): ...
"""

FIRE = """
import fire
def train(base_model: str = "", batch_size: int = 128, micro_batch_size: int = 4, fast: bool = False):
    gradient_accumulation_steps = batch_size // micro_batch_size
    gradient_accumulation_steps = gradient_accumulation_steps // world_size
fire.Fire(train)
"""

TYRO = """
import tyro
@dataclass
class Args:
    batch_size: int = 8
    compile: bool = False
args = tyro.cli(Args)
"""

BOOLEAN = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=64)
parser.add_argument("--accum-iter", default=1, type=int)
parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--use-checkpoint-activations", dest="checkpoint_activations",
                    type=str2bool, default="False")
parser.add_argument("--recompute-depth", type=int, default=2)
"""

ENVIRONMENT = """
import os
batch = int(os.environ.get("BATCH_SIZE", "8"))
rounds = int(os.getenv("GRAD_ACCUM", 4))
rank = int(os.environ["RANK"])
"""

CONSTANTS = """
BATCH_SIZE = 64
loader = DataLoader(dataset, batch_size=BATCH_SIZE)
"""

GLOBAL = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--global-batch-size", type=int, default=512)
parser.add_argument("--micro-batch-size", type=int, default=8)
parser.add_argument("--precision", choices=["fp32", "amp_fp16", "amp_bf16"], default="fp32")
parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
"""

MINGPT = """
from trainer import Trainer
C.trainer = Trainer.get_default_config()
config.merge_from_args(sys.argv[1:])
class Trainer:
    @staticmethod
    def get_default_config():
        C = CN()
        C.batch_size = 64
        C.device = 'auto'
        return C
"""

SCRIPTS = {
    "imagenet": IMAGENET,
    "words": WORDS,
    "nano": NANO,
    "trainer": TRAINER,
    "accelerate": ACCELERATE,
    "lightning": LIGHTNING,
    "timm": TIMM,
    "click": CLICK,
    "typer": TYPER,
    "fire": FIRE,
    "tyro": TYRO,
    "boolean": BOOLEAN,
    "environment": ENVIRONMENT,
    "constants": CONSTANTS,
    "global": GLOBAL,
    "mingpt": MINGPT,
    "": "",
}


def make_command(text: str) -> ScriptCommand:
    """Return the command of a line; the files that it names need not exist."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("train.py").write_text("", encoding="utf-8")
        return parse_command(shlex.split(text), environment={"PATH": str(Path(sys.executable).parent)})
