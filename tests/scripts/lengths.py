"""Classify texts of different lengths: the collate function pads, batches hold texts of like length."""
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

BATCH, LONGEST, EPOCHS = 8, 40, 1
device = "cuda" if torch.cuda.is_available() else "cpu"


class Texts(Dataset):
    def __init__(self, count=96):
        draw = random.Random(0)
        self.texts = [[draw.randrange(1, 100) for _ in range(draw.randint(4, LONGEST))] for _ in range(count)]
        self.lengths = [len(text) for text in self.texts]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return torch.tensor(self.texts[index]), self.lengths[index] % 2


class Buckets(Sampler):
    def __init__(self, lengths, size):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[i : i + size] for i in range(0, len(order), size)]
        random.Random(1).shuffle(self.batches)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def collate(samples):
    texts, labels = zip(*samples)
    lengths = torch.tensor([len(text) for text in texts])
    return {
        "tokens": pad_sequence(texts, batch_first=True),
        "lengths": lengths,
        "labels": torch.tensor(labels),
    }


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, 2)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        mask = (tokens != 0).unsqueeze(-1)
        return self.out((states * mask).sum(1) / mask.sum(1))


texts = Texts()
loader = DataLoader(texts, batch_sampler=Buckets(texts.lengths, BATCH), collate_fn=collate)
model = Reader().to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for epoch in range(EPOCHS):
    right = total = 0
    for batch in loader:
        logits = model(batch["tokens"].to(device), batch["lengths"])
        labels = batch["labels"].to(device)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += (logits.argmax(-1) == labels).sum().item()
        total += len(labels)
        print(f"{tuple(batch['tokens'].shape)} loss {loss:.3f} accuracy {right / total:.1%}")
