"""Job families for measuring: plain classes, written as users write them.

Sizes are class attributes; a case overrides them.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


def tokens(size, seq, vocab):
    return torch.randint(0, vocab, (size, seq))


# --------------------------------------------------------------------------------------------- (a) own GPT, as nanoGPT has it


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, dropout, bias):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.heads, self.width, self.dropout = heads, width, dropout

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class GPTMLP(nn.Module):
    def __init__(self, width, dropout, bias):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GPTBlock(nn.Module):
    def __init__(self, width, heads, dropout, bias):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = CausalSelfAttention(width, heads, dropout, bias)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = GPTMLP(width, dropout, bias)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPTModel(nn.Module):
    def __init__(self, vocab, seq, layers, heads, width, dropout, bias):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(seq, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([GPTBlock(width, heads, dropout, bias) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width, bias=bias)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets):
        pos = torch.arange(idx.size(1), dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class GPT:
    name = "gpt-124m"
    global_batch, samples, epochs = 480, 100_000, 1
    vocab, seq, layers, heads, width, dropout, bias = 50304, 1024, 12, 12, 768, 0.0, False

    def model(self):
        return GPTModel(self.vocab, self.seq, self.layers, self.heads, self.width, self.dropout, self.bias)

    def batch(self, size):
        data = tokens(size, self.seq + 1, self.vocab)
        return data[:, :-1].contiguous(), data[:, 1:].contiguous()

    def loss(self, model, batch):
        return model(*batch)[1]


class GPTGroups(GPT):
    """Weight decay on matrices only, betas of nanoGPT."""

    name = "gpt-groups"
    dropout, bias = 0.1, True

    def optimizer(self, params):
        params = list(params)
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))


# --------------------------------------------------------------------------------------------- (p) other optimizers


class Lion(torch.optim.Optimizer):
    """A user's own optimizer: sign of an interpolated momentum, one tensor at a time."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = m * b1 + p.grad * (1 - b1)
                p.add_(update.sign(), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class GPTAdafactor(GPT):
    name = "gpt-adafactor"

    def optimizer(self, params):
        return torch.optim.Adafactor(params, lr=1e-2)


class GPTLion(GPT):
    name = "gpt-lion"

    def optimizer(self, params):
        return Lion(params, lr=1e-4, weight_decay=0.1)


class GPTSGD(GPT):
    name = "gpt-sgd"

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


# --------------------------------------------------------------------------------------------- (b) (c) Hugging Face decoders


class HFGPT2:
    name = "hf-gpt2-124m"
    global_batch, samples, epochs = 256, 100_000, 1
    vocab, seq, layers, heads, width = 50257, 1024, 12, 12, 768
    attention = "sdpa"

    def model(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=self.vocab, n_positions=self.seq, n_layer=self.layers, n_head=self.heads, n_embd=self.width,
                attn_implementation=self.attention, use_cache=False,
            )
        )

    def batch(self, size):
        return {"input_ids": tokens(size, self.seq, self.vocab)}

    def loss(self, model, batch):
        return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


class Llama:
    """Four layers of Llama-3-8B."""

    name = "llama-8b-4-layers"
    global_batch, samples, epochs = 64, 50_000, 1
    vocab, seq, layers, heads, kv_heads, width, ff = 128256, 2048, 4, 32, 8, 4096, 14336

    def config(self):
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.width, intermediate_size=self.ff, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, max_position_embeddings=8192,
            rms_norm_eps=1e-5, tie_word_embeddings=False, use_cache=False,
        )

    def model(self):
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM(self.config())

    def batch(self, size):
        ids = tokens(size, self.seq, self.vocab)
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(self, model, batch):
        return model(**batch).loss


# --------------------------------------------------------------------------------------------- (d) ResNet-50


class Bottleneck(nn.Module):
    def __init__(self, c_in, mid, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, mid, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv2 = nn.Conv2d(mid, mid, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(mid)
        self.conv3 = nn.Conv2d(mid, 4 * mid, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * mid)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or c_in != 4 * mid:
            self.downsample = nn.Sequential(nn.Conv2d(c_in, 4 * mid, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * mid))

    def forward(self, x):
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += skip
        return self.relu(x)


class ResNet(nn.Module):
    def __init__(self, depths, width, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        c = width
        for i, depth in enumerate(depths):
            mid, blocks = width * 2**i, []
            for j in range(depth):
                blocks.append(Bottleneck(c, mid, stride=2 if i and not j else 1))
                c = 4 * mid
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(c, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ResNet50:
    name = "resnet50"
    global_batch, samples, epochs = 1024, 1_281_167, 90
    depths, width, classes, image, channels_last = (3, 4, 6, 3), 64, 1000, 224, False

    def model(self):
        model = ResNet(self.depths, self.width, self.classes)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def batch(self, size):
        images = torch.randn(size, 3, self.image, self.image)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, torch.randint(0, self.classes, (size,))

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=0.1)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4)


# --------------------------------------------------------------------------------------------- (e) U-Net for diffusion


class ResBlock(nn.Module):
    def __init__(self, c_in, c_out, t_dim, groups):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.temb = nn.Linear(t_dim, c_out)
        self.norm2 = nn.GroupNorm(groups, c_out)
        self.drop = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.temb(F.silu(t))[:, :, None, None]
        h = self.conv2(self.drop(F.silu(self.norm2(h))))
        return self.skip(x) + h


class SpatialAttention(nn.Module):
    def __init__(self, c, heads, groups):
        super().__init__()
        self.norm = nn.GroupNorm(groups, c)
        self.qkv = nn.Conv2d(c, 3 * c, 1)
        self.proj = nn.Conv2d(c, c, 1)
        self.heads = heads

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(y.transpose(-1, -2).reshape(b, c, h, w))


class DownStage(nn.Module):
    def __init__(self, c_in, c_out, t_dim, groups, heads, attend, last):
        super().__init__()
        self.res = nn.ModuleList([ResBlock(c_in, c_out, t_dim, groups), ResBlock(c_out, c_out, t_dim, groups)])
        self.att = nn.ModuleList([SpatialAttention(c_out, heads, groups) if attend else nn.Identity() for _ in range(2)])
        self.down = None if last else nn.Conv2d(c_out, c_out, 3, stride=2, padding=1)

    def forward(self, x, t):
        skips = []
        for res, att in zip(self.res, self.att):
            x = att(res(x, t))
            skips.append(x)
        return (x if self.down is None else self.down(x)), skips


class UpStage(nn.Module):
    def __init__(self, c_in, c_skip, c_out, t_dim, groups, heads, attend, last):
        super().__init__()
        self.res = nn.ModuleList([ResBlock(c_in + c_skip, c_out, t_dim, groups), ResBlock(c_out + c_skip, c_out, t_dim, groups)])
        self.att = nn.ModuleList([SpatialAttention(c_out, heads, groups) if attend else nn.Identity() for _ in range(2)])
        self.up = None if last else nn.Conv2d(c_out, c_out, 3, padding=1)

    def forward(self, x, skips, t):
        for res, att, skip in zip(self.res, self.att, reversed(skips)):
            x = att(res(torch.cat([x, skip], dim=1), t))
        if self.up is not None:
            x = self.up(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return x


def sinusoid(t, dim):
    freqs = torch.exp(-math.log(10000.0) * torch.arange(dim // 2, device=t.device, dtype=torch.float32) / (dim // 2))
    angles = t.float()[:, None] * freqs[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class UNetModel(nn.Module):
    def __init__(self, channels, base, mults, attend, heads, groups):
        super().__init__()
        t_dim = 4 * base
        self.base = base
        self.time = nn.Sequential(nn.Linear(base, t_dim), nn.SiLU(), nn.Linear(t_dim, t_dim))
        self.stem = nn.Conv2d(channels, base, 3, padding=1)
        widths = [base * m for m in mults]
        n = len(widths)
        ins = [base, *widths[:-1]]
        self.downs = nn.ModuleList(
            [DownStage(ins[i], widths[i], t_dim, groups, heads, i in attend, i == n - 1) for i in range(n)]
        )
        c = widths[-1]
        self.mid1 = ResBlock(c, c, t_dim, groups)
        self.mid_att = SpatialAttention(c, heads, groups)
        self.mid2 = ResBlock(c, c, t_dim, groups)
        ups = []
        for i in reversed(range(n)):
            ups.append(UpStage(c, widths[i], widths[i], t_dim, groups, heads, i in attend, i == 0))
            c = widths[i]
        self.ups = nn.ModuleList(ups)
        self.norm = nn.GroupNorm(groups, c)
        self.head = nn.Conv2d(c, channels, 3, padding=1)

    def forward(self, x, t):
        t = self.time(sinusoid(t, self.base).to(x.dtype))
        x = self.stem(x)
        stack = []
        for down in self.downs:
            x, skips = down(x, t)
            stack.append(skips)
        x = self.mid2(self.mid_att(self.mid1(x, t)), t)
        for up in self.ups:
            x = up(x, stack.pop(), t)
        return self.head(F.silu(self.norm(x)))


class UNet:
    name = "unet-diffusion"
    global_batch, samples, epochs = 256, 200_000, 10
    channels, base, mults, attend, heads, groups, image, channels_last = 3, 128, (1, 2, 2, 4), (1, 2), 4, 32, 64, False

    def model(self):
        model = UNetModel(self.channels, self.base, self.mults, self.attend, self.heads, self.groups)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def batch(self, size):
        return {"images": torch.rand(size, self.channels, self.image, self.image) * 2 - 1, "t": torch.randint(0, 1000, (size,))}

    def loss(self, model, batch):
        x, t = batch["images"], batch["t"]
        noise = torch.randn_like(x)
        alpha = torch.cos(t.to(x.dtype) / 1000 * math.pi / 2)[:, None, None, None] ** 2
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        return F.mse_loss(model(noisy, t), noise)


# --------------------------------------------------------------------------------------------- (f) ViT-B/16


class ViTModel(nn.Module):
    def __init__(self, image, patch, layers, heads, width, classes, dropout):
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1).to(x.dtype), x], dim=1) + self.pos
        return self.head(self.encoder(x)[:, 0])


class ViT:
    name = "vit-b16"
    global_batch, samples, epochs = 1024, 1_281_167, 90
    image, patch, layers, heads, width, classes, dropout = 224, 16, 12, 12, 768, 1000, 0.1

    def model(self):
        return ViTModel(self.image, self.patch, self.layers, self.heads, self.width, self.classes, self.dropout)

    def batch(self, size):
        return torch.randn(size, 3, self.image, self.image), torch.randint(0, self.classes, (size,))

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)


# --------------------------------------------------------------------------------------------- (g) BERT with a padding mask


class Bert:
    name = "bert-base-mlm"
    global_batch, samples, epochs = 256, 500_000, 1
    vocab, seq, layers, heads, width = 30522, 512, 12, 12, 768

    def model(self):
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(
            BertConfig(
                vocab_size=self.vocab, hidden_size=self.width, num_hidden_layers=self.layers, num_attention_heads=self.heads,
                intermediate_size=4 * self.width, max_position_embeddings=self.seq,
            )
        )

    def batch(self, size):
        ids = torch.randint(0, self.vocab, (size, self.seq))
        lengths = torch.randint(self.seq // 2, self.seq + 1, (size,))
        mask = (torch.arange(self.seq)[None] < lengths[:, None]).long()
        chosen = (torch.rand(size, self.seq) < 0.15) & (mask == 1)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(chosen, ids, -100)}

    def loss(self, model, batch):
        return model(**batch).loss


# --------------------------------------------------------------------------------------------- (h) T5 encoder-decoder


class T5:
    name = "t5-base"
    global_batch, samples, epochs = 128, 300_000, 3
    vocab, source, target, layers, heads, width, ff, d_kv = 32128, 512, 128, 12, 12, 768, 3072, 64

    def model(self):
        from transformers import T5Config, T5ForConditionalGeneration

        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=self.vocab, d_model=self.width, d_kv=self.d_kv, d_ff=self.ff, num_layers=self.layers,
                num_heads=self.heads, decoder_start_token_id=0, use_cache=False,
            )
        )

    def batch(self, size):
        ids = torch.randint(1, self.vocab, (size, self.source))
        lengths = torch.randint(self.source // 2, self.source + 1, (size, 1))
        mask = (torch.arange(self.source)[None] < lengths).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(1, self.vocab, (size, self.target))}

    def loss(self, model, batch):
        return model(**batch).loss


# --------------------------------------------------------------------------------------------- (i) LSTM language model


class LSTMModel(nn.Module):
    def __init__(self, vocab, embed, hidden, layers, dropout):
        super().__init__()
        self.embed = nn.Embedding(vocab, embed)
        self.drop = nn.Dropout(dropout)
        self.lstm = nn.LSTM(embed, hidden, num_layers=layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids):
        x, _ = self.lstm(self.drop(self.embed(ids)))
        return self.head(self.drop(x))


class LSTM:
    name = "lstm-lm"
    global_batch, samples, epochs = 256, 400_000, 5
    vocab, embed, hidden, layers, dropout, seq = 33278, 1024, 1536, 3, 0.3, 256

    def model(self):
        return LSTMModel(self.vocab, self.embed, self.hidden, self.layers, self.dropout)

    def batch(self, size):
        ids = tokens(size, self.seq + 1, self.vocab)
        return ids[:, :-1], ids[:, 1:]

    def loss(self, model, batch):
        ids, targets = batch
        return F.cross_entropy(model(ids).flatten(0, 1), targets.reshape(-1))


# --------------------------------------------------------------------------------------------- own Llama-like parts, used by MoE and LoRA


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


def rope(x, theta=10000.0):
    t, d = x.size(-2), x.size(-1)
    freqs = 1.0 / theta ** (torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angles = torch.outer(torch.arange(t, device=x.device, dtype=torch.float32), freqs)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class GroupedAttention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.d, bias=False)
        self.k = nn.Linear(width, kv_heads * self.d, bias=False)
        self.v = nn.Linear(width, kv_heads * self.d, bias=False)
        self.o = nn.Linear(heads * self.d, width, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = rope(self.q(x).view(b, t, self.heads, self.d).transpose(1, 2))
        k = rope(self.k(x).view(b, t, self.kv_heads, self.d).transpose(1, 2))
        v = self.v(x).view(b, t, self.kv_heads, self.d).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class SwiGLU(nn.Module):
    def __init__(self, width, ff):
        super().__init__()
        self.gate = nn.Linear(width, ff, bias=False)
        self.up = nn.Linear(width, ff, bias=False)
        self.down = nn.Linear(ff, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, kv_heads, mlp):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attn = GroupedAttention(width, heads, kv_heads)
        self.mlp = mlp

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocab, width, layers):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def next_token_loss(logits, ids):
    logits = logits[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))


# --------------------------------------------------------------------------------------------- (j) mixture of experts


class MoE(nn.Module):
    """Top-2 routing, each expert on the rows that chose it."""

    def __init__(self, width, ff, experts, top):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([SwiGLU(width, ff) for _ in range(experts)])
        self.top = top
        self.balance = None

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = self.router(flat).float().softmax(-1)
        weights, chosen = probs.topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            rows = mask.any(-1).nonzero().squeeze(-1)
            if rows.numel() == 0:
                continue
            y = expert(flat[rows]) * weights[mask].unsqueeze(-1)
            out.index_add_(0, rows, y.to(out.dtype))
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        self.balance = len(self.experts) * (share * probs.mean(0)).sum()
        return out.view_as(x)


class MixtureLM:
    name = "moe-8x"
    global_batch, samples, epochs = 128, 100_000, 1
    vocab, seq, layers, heads, kv_heads, width, ff, experts, top = 32000, 1024, 8, 16, 16, 1024, 2816, 8, 2

    def model(self):
        return Decoder(
            self.vocab,
            self.width,
            [
                DecoderLayer(self.width, self.heads, self.kv_heads, MoE(self.width, self.ff, self.experts, self.top))
                for _ in range(self.layers)
            ],
        )

    def batch(self, size):
        return tokens(size, self.seq, self.vocab)

    def loss(self, model, batch):
        loss = next_token_loss(model(batch), batch)
        balance = sum(layer.mlp.balance for layer in model.layers) / len(model.layers)
        return loss + 0.01 * balance


# --------------------------------------------------------------------------------------------- (k) LoRA, by hand and through peft


class LoRALinear(nn.Module):
    def __init__(self, base, rank, alpha, dropout):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features, dtype=torch.float32) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32))
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(self.dropout(x), self.a), self.b) * self.scale


class LoRA:
    name = "lora-own"
    global_batch, samples, epochs = 64, 50_000, 3
    vocab, seq, layers, heads, kv_heads, width, ff = 32000, 1024, 16, 32, 8, 4096, 14336
    rank, alpha, dropout, targets = 16, 32, 0.05, ("q", "k", "v", "o")

    def model(self):
        model = Decoder(
            self.vocab,
            self.width,
            [
                DecoderLayer(self.width, self.heads, self.kv_heads, SwiGLU(self.width, self.ff))
                for _ in range(self.layers)
            ],
        )
        model.requires_grad_(False)
        model.to(torch.bfloat16)
        for layer in model.layers:
            for target in self.targets:
                setattr(layer.attn, target, LoRALinear(getattr(layer.attn, target), self.rank, self.alpha, self.dropout))
        return model

    def batch(self, size):
        return tokens(size, self.seq, self.vocab)

    def loss(self, model, batch):
        return next_token_loss(model(batch), batch)


class PeftLlama(Llama):
    """peft's LoRA on eight frozen layers of Llama-3-8B in bf16."""

    name = "lora-peft"
    layers, seq, rank = 8, 1024, 16
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

    def model(self):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_config(self.config(), dtype=torch.bfloat16)
        lora = LoraConfig(r=self.rank, lora_alpha=32, lora_dropout=0.05, target_modules=self.targets, task_type="CAUSAL_LM")
        return get_peft_model(base, lora)


# --------------------------------------------------------------------------------------------- (l) recommender


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRMModel(nn.Module):
    def __init__(self, dense, bags, tables, dim, bottom, top):
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(rows, dim, mode="sum") for rows in bags])
        self.tables = nn.ModuleList([nn.Embedding(rows, dim) for rows in tables])
        self.bottom = mlp(dense, *bottom, dim)
        n = len(bags) + len(tables) + 1
        self.register_buffer("pairs", torch.triu_indices(n, n, offset=1), persistent=False)
        self.top = mlp(dim + n * (n - 1) // 2, *top, 1)

    def forward(self, dense, multi, single):
        x = self.bottom(dense)
        features = [x]
        features += [bag(multi[:, i]) for i, bag in enumerate(self.bags)]
        features += [table(single[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([f.to(x.dtype) for f in features], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, dots.to(x.dtype)], dim=1)).squeeze(-1)


class DLRM:
    name = "dlrm"
    global_batch, samples, epochs = 65536, 40_000_000, 1
    dense, bag_rows, table_rows, dim, hot = 13, (2_000_000,) * 3, (1_000_000,) * 5, 128, 10
    bottom, top = (512, 256), (1024, 1024, 512, 256)

    def model(self):
        return DLRMModel(self.dense, self.bag_rows, self.table_rows, self.dim, self.bottom, self.top)

    def batch(self, size):
        return {
            "dense": torch.rand(size, self.dense),
            "multi": torch.randint(0, min(self.bag_rows), (size, len(self.bag_rows), self.hot)),
            "single": torch.randint(0, min(self.table_rows), (size, len(self.table_rows))),
            "click": torch.randint(0, 2, (size,)),
        }

    def loss(self, model, batch):
        logits = model(batch["dense"], batch["multi"], batch["single"])
        return F.binary_cross_entropy_with_logits(logits, batch["click"].to(logits.dtype))


class DLRMAdagrad(DLRM):
    name = "dlrm-adagrad"

    def optimizer(self, params):
        return torch.optim.Adagrad(params, lr=0.01)


# --------------------------------------------------------------------------------------------- (m) audio


class ConformerBlock(nn.Module):
    def __init__(self, width, heads, kernel, dropout):
        super().__init__()
        self.ff1 = self.feed(width, dropout)
        self.norm_att = nn.LayerNorm(width)
        self.att = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm_conv = nn.LayerNorm(width)
        self.point1 = nn.Conv1d(width, 2 * width, 1)
        self.depth = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.bn = nn.BatchNorm1d(width)
        self.point2 = nn.Conv1d(width, width, 1)
        self.ff2 = self.feed(width, dropout)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    @staticmethod
    def feed(width, dropout):
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(dropout), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x, pad):
        x = x + 0.5 * self.ff1(x)
        y = self.norm_att(x)
        x = x + self.drop(self.att(y, y, y, key_padding_mask=pad)[0])
        y = self.norm_conv(x).masked_fill(pad.unsqueeze(-1), 0.0).transpose(1, 2)
        y = self.point2(F.silu(self.bn(self.depth(F.glu(self.point1(y), dim=1)))))
        x = x + self.drop(y.transpose(1, 2))
        return self.norm(x + 0.5 * self.ff2(x))


class ConformerModel(nn.Module):
    def __init__(self, mels, width, layers, heads, kernel, vocab, dropout):
        super().__init__()
        self.sub = nn.Sequential(nn.Conv2d(1, width, 3, stride=2), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2), nn.ReLU())
        self.proj = nn.Linear(width * (((mels - 1) // 2 - 1) // 2), width)
        self.blocks = nn.ModuleList([ConformerBlock(width, heads, kernel, dropout) for _ in range(layers)])
        self.head = nn.Linear(width, vocab)

    def forward(self, mel, lengths):
        x = self.sub(mel.unsqueeze(1))
        x = self.proj(x.transpose(1, 2).flatten(2))
        lengths = ((lengths - 1) // 2 - 1) // 2
        pad = torch.arange(x.size(1), device=x.device)[None] >= lengths[:, None]
        for block in self.blocks:
            x = block(x, pad)
        return self.head(x), lengths


class Conformer:
    name = "conformer-ctc"
    global_batch, samples, epochs = 256, 281_241, 20
    mels, frames, width, layers, heads, kernel, vocab, labels, dropout = 80, 1600, 512, 12, 8, 31, 1024, 60, 0.1

    def model(self):
        return ConformerModel(self.mels, self.width, self.layers, self.heads, self.kernel, self.vocab, self.dropout)

    def batch(self, size):
        return {
            "mel": torch.randn(size, self.frames, self.mels),
            "frames": torch.randint(self.frames * 3 // 4, self.frames + 1, (size,)),
            "labels": torch.randint(1, self.vocab, (size, self.labels)),
            "label_lengths": torch.randint(self.labels // 2, self.labels + 1, (size,)),
        }

    def loss(self, model, batch):
        logits, lengths = model(batch["mel"], batch["frames"])
        log_probs = logits.float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, batch["labels"], lengths, batch["label_lengths"], zero_infinity=True)


class ConvLayer(nn.Module):
    def __init__(self, c_in, c_out, kernel, stride):
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, kernel, stride=stride, bias=False)
        self.norm = nn.LayerNorm(c_out)

    def forward(self, x):
        x = self.conv(x).transpose(1, 2)
        return F.gelu(self.norm(x).transpose(1, 2))


class WaveModel(nn.Module):
    def __init__(self, conv, width, layers, heads, classes, dropout):
        super().__init__()
        kernels, strides = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)
        self.convs = nn.ModuleList([ConvLayer(1 if i == 0 else conv, conv, k, s) for i, (k, s) in enumerate(zip(kernels, strides))])
        self.norm = nn.LayerNorm(conv)
        self.proj = nn.Linear(conv, width)
        self.pos = nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 128, padding=64, groups=16), dim=2)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=dropout, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, wave):
        x = wave.unsqueeze(1)
        for conv in self.convs:
            x = conv(x)
        x = self.proj(self.norm(x.transpose(1, 2)))
        x = x + F.gelu(self.pos(x.transpose(1, 2))[..., :-1]).transpose(1, 2)
        return self.head(self.encoder(x))


class Wave:
    """Like wav2vec 2.0 base: convolutions over the raw wave, a transformer, a class per frame."""

    name = "wave-base"
    global_batch, samples, epochs = 64, 100_000, 10
    seconds, conv, width, layers, heads, classes, dropout = 10, 512, 768, 12, 12, 504, 0.1
    rate = 16000

    def model(self):
        return WaveModel(self.conv, self.width, self.layers, self.heads, self.classes, self.dropout)

    def batch(self, size):
        return torch.randn(size, self.seconds * self.rate), torch.randint(0, self.classes, (size,))

    def loss(self, model, batch):
        wave, label = batch
        logits = model(wave)
        return F.cross_entropy(logits.flatten(0, 1), label[:, None].expand(-1, logits.size(1)).reshape(-1))


# --------------------------------------------------------------------------------------------- (n) data-dependent Python in the loss


class DetectorModel(nn.Module):
    def __init__(self, width, anchors, classes):
        super().__init__()
        def conv(a, b, s):
            return nn.Sequential(nn.Conv2d(a, b, 3, stride=s, padding=1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.1))

        self.stem = nn.Sequential(conv(3, width, 2), conv(width, width, 1))
        self.stage1 = nn.Sequential(conv(width, 2 * width, 2), conv(2 * width, 2 * width, 1))
        self.stage2 = nn.Sequential(conv(2 * width, 4 * width, 2), conv(4 * width, 4 * width, 1))
        self.stage3 = nn.Sequential(conv(4 * width, 8 * width, 2), conv(8 * width, 8 * width, 1))
        self.side2 = nn.Conv2d(4 * width, 4 * width, 1)
        self.side3 = nn.Conv2d(8 * width, 4 * width, 1)
        self.cls = nn.Conv2d(4 * width, anchors * classes, 3, padding=1)
        self.box = nn.Conv2d(4 * width, anchors * 4, 3, padding=1)
        self.classes = classes

    def flat(self, x, last):
        return x.permute(0, 2, 3, 1).reshape(x.size(0), -1, last)

    def forward(self, x):
        c2 = self.stage2(self.stage1(self.stem(x)))
        p3 = self.side3(self.stage3(c2))
        p2 = self.side2(c2) + F.interpolate(p3, size=c2.shape[-2:], mode="bilinear", align_corners=False)
        scores = torch.cat([self.flat(self.cls(p), self.classes) for p in (p2, p3)], dim=1)
        boxes = torch.cat([self.flat(self.box(p), 4) for p in (p2, p3)], dim=1)
        return scores, boxes


class Detector:
    """One-shot detector: positives by nonzero, hard negatives by masked_select and a top-k whose k is read from the data."""

    name = "detector"
    global_batch, samples, epochs = 128, 118_000, 12
    image, width, anchors, classes, positives = 512, 64, 6, 81, 0.01

    def model(self):
        return DetectorModel(self.width, self.anchors, self.classes)

    def batch(self, size):
        n = self.anchors * ((self.image // 8) ** 2 + (self.image // 16) ** 2)
        found = torch.rand(size, n) < self.positives
        label = torch.where(found, torch.randint(1, self.classes, (size, n)), 0)
        return {"images": torch.rand(size, 3, self.image, self.image), "label": label, "box": torch.randn(size, n, 4)}

    def loss(self, model, batch):
        scores, boxes = model(batch["images"])
        label = batch["label"]
        positive = label > 0
        n_positive = positive.sum().item()
        each = F.cross_entropy(scores.flatten(0, 1), label.flatten(), reduction="none").view_as(label)
        negatives = torch.masked_select(each, ~positive)
        if n_positive == 0:
            return negatives.topk(min(100, negatives.numel())).values.mean() + 0.0 * boxes.sum()
        hard = negatives.topk(min(3 * n_positive, negatives.numel())).values
        rows, cols = positive.nonzero(as_tuple=True)
        box_loss = F.smooth_l1_loss(boxes[rows, cols].float(), batch["box"][rows, cols].float(), reduction="sum")
        return (each[positive].sum() + hard.sum() + box_loss) / n_positive


# --------------------------------------------------------------------------------------------- (o) bridge: two frozen decoders


class ByteEncoder(nn.Module):
    def __init__(self, width, layers, heads, latents):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(latents, width) * 0.02)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, data, pad):
        x = self.embed(data)
        position = torch.arange(data.size(1), device=data.device)
        x = x + sinusoid(position, x.size(-1)).to(x.dtype)
        x = self.norm(self.encoder(x, src_key_padding_mask=pad))
        q = self.queries.expand(x.size(0), -1, -1)
        z = q + self.cross(q, x, x, key_padding_mask=pad, need_weights=False)[0]
        return z + self.ff(z)


class FilmAdapter(nn.Module):
    def __init__(self, width, hidden, out):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, out))
        self.skip = nn.Linear(width, out)
        self.film_scale, self.film_shift = nn.Linear(width, out), nn.Linear(width, out)
        self.out_norm = nn.LayerNorm(out)
        self.scale = nn.Parameter(torch.tensor(0.02))

    def forward(self, z):
        z = self.norm(z)
        y = self.net(z) + self.skip(z)
        y = y * (1 + self.film_scale(z)) + self.film_shift(z)
        return self.out_norm(y) * self.scale


class FrozenPairModel(nn.Module):
    def __init__(self, encoder, llama, qwen, adapters):
        super().__init__()
        self.encoder, self.llama, self.qwen, self.adapters = encoder, llama, qwen, adapters

    def forward(self, data, pad, answers):
        z = self.encoder(data, pad)
        return {name: self.branch(name, z, answers[name]) for name in answers}

    def branch(self, name, z, ids):
        llm = getattr(self, name)
        prefix = self.adapters[name](z).to(torch.bfloat16)
        words = llm.get_input_embeddings()(ids)
        logits = llm(inputs_embeds=torch.cat([prefix, words], dim=1), use_cache=False).logits
        return next_token_loss(logits[:, prefix.size(1) :], ids)


class FrozenPair:
    name = "bridge"
    global_batch, samples, epochs = 64, 87_599, 24
    layers_a, layers_b = 8, 7
    a = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
    b = dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064)
    z, depth, heads, latents, bytes, answer = 256, 6, 8, 32, 512, 224
    branches = {"llama": "llama", "qwen": "qwen"}

    def model(self):
        from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

        llama = LlamaConfig(num_hidden_layers=self.layers_a, tie_word_embeddings=False, **self.a)
        qwen = Qwen2Config(num_hidden_layers=self.layers_b, tie_word_embeddings=False, **self.b)
        frozen = [AutoModelForCausalLM.from_config(c, dtype=torch.bfloat16).requires_grad_(False).eval() for c in (llama, qwen)]
        adapters = nn.ModuleDict(
            {"llama": FilmAdapter(self.z, 2 * self.z, self.a["hidden_size"]), "qwen": FilmAdapter(self.z, 2 * self.z, self.b["hidden_size"])}
        )
        return FrozenPairModel(ByteEncoder(self.z, self.depth, self.heads, self.latents), *frozen, adapters)

    def batch(self, size):
        lengths = torch.randint(self.bytes // 2, self.bytes + 1, (size, 1))
        return {
            "data": torch.randint(0, 256, (size, self.bytes)),
            "pad": torch.arange(self.bytes)[None] >= lengths,
            "answers": {
                "llama": tokens(size, self.answer, self.a["vocab_size"]),
                "qwen": tokens(size, self.answer, self.b["vocab_size"]),
            },
        }

    def losses(self, model, batch):
        return model(batch["data"], batch["pad"], batch["answers"])

    def loss(self, model, batch):
        return sum(self.losses(model, batch).values())


Bridge = FrozenPair
"""The name that recorded cases have; the job `bridge` came later."""
