"""accelerate launch accelerate_loop.py --mixed_precision bf16 --gradient_accumulation_steps 2"""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm


def get_dataloaders(args):
    torch.manual_seed(args.seed)
    tokens = torch.randint(0, 128, (args.samples, args.max_length))
    labels = tokens.sum(1) % 2
    split = args.samples * 3 // 4
    train = TensorDataset(tokens[:split], labels[:split])
    evaluation = TensorDataset(tokens[split:], labels[split:])
    return (
        DataLoader(train, shuffle=True, batch_size=args.per_device_train_batch_size, drop_last=True),
        DataLoader(evaluation, shuffle=False, batch_size=8),
    )


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(128, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def training_function(args):
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        cpu=args.cpu,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(project_dir=args.output_dir, automatic_checkpoint_naming=True),
    )
    set_seed(args.seed)
    train_loader, eval_loader = get_dataloaders(args)
    model = Classifier(args.width).to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=len(train_loader))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(args.num_epochs):
        model.train()
        bar = tqdm(train_loader, disable=not accelerator.is_local_main_process)
        for tokens, labels in bar:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(tokens), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            bar.set_postfix(loss=loss.item())
        model.eval()
        right = total = 0
        for tokens, labels in eval_loader:
            with torch.no_grad():
                predictions = model(tokens).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {right / total:.3f}")
        accelerator.save_state()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of a training script.")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=32)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--output_dir", default="accelerate_out")
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
