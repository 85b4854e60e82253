"""One iteration of GRPO with a KL to a reference, in plain torch: docs/one_page.md explains it.

Shapes: B = N prompts x G responses are rows of P + R tokens, from a vocabulary of V tokens.
Prompts are padded on the left, responses on the right. Log-probs and KLs are in nats.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass
class Settings:
    """The settings of ``klrl experiment=sort_digits loss=grpo advantage=grpo``.

    kl_coef is klrl's kl.coef, and so on.
    """

    collector_group_size: int = 8  # G
    collector_temperature: float = 1.0
    kl_coef: float = 0.1  # reward per nat of KL(policy||reference)
    kl_placement: str = "reward"  # or loss
    kl_estimator: str = "k1"  # in the loss: k3
    loss_clip_epsilon: float = 0.2
    learner_epochs: int = 2
    learner_minibatches: int = 4
    optim_lr: float = 1e-4
    optim_eps: float = 1e-5
    optim_max_grad_norm: float = 1.0


def next_tokens(c, model, tokens, real, width):  # [B, P+R] -> log pi(.|prefix) [B, R, V]
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=real.long(), position_ids=positions).logits
    return (logits[:, -width - 1 : -1] / c.collector_temperature).log_softmax(-1)


def chosen(log_p, tokens):  # [B, R, V] -> log pi of the response's tokens, [B, R]
    return log_p.gather(-1, tokens[:, -log_p.shape[1] :, None]).squeeze(-1)


def kl(log_p, log_q):  # KL(p||q) of each next token, [B, R, V] -> [B, R]
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def relative(score, size):  # [B] -> [B]
    groups = score.reshape(-1, size)
    centred, std = groups - groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    return torch.where(std > 1e-6, centred / std, 0.0).flatten()


def response_mean(x, mask):  # [B, R] -> the mean over responses of their means over tokens
    return ((x * mask).sum(1) / mask.sum(1)).mean()


def iterate(c, model, reference, adam, rollout, shuffled=torch.randperm):
    tokens, real, mask, score = rollout  # [B, P+R], [B, P+R], [B, R], [B]
    width, in_loss = mask.shape[1], c.kl_placement == "loss"
    with torch.no_grad():
        old, ref = (next_tokens(c, net, tokens, real, width) for net in (model, reference))
        old_log_prob, ref_log_prob = chosen(old, tokens), chosen(ref, tokens)
        k1 = (old_log_prob - ref_log_prob) * mask
        to_go = k1.flip(1).cumsum(1).flip(1)  # sum of k1 from each token on
        advantage = relative(score, c.collector_group_size)[:, None].expand_as(k1)
        if not in_loss:
            advantage = advantage - c.kl_coef * to_go
    rows = torch.arange(len(tokens)).reshape(-1, c.collector_group_size)  # [N, G]
    measured = []
    for _ in range(c.learner_epochs):
        for prompts in shuffled(len(rows)).chunk(c.learner_minibatches):
            b = rows[prompts].flatten()
            log_prob = chosen(next_tokens(c, model, tokens[b], real[b], width), tokens[b])
            ratio = (log_prob - old_log_prob[b]).exp()  # w = pi_theta / pi_old
            A, e = advantage[b], c.loss_clip_epsilon
            gain = torch.minimum(ratio * A, ratio.clamp(1 - e, 1 + e) * A)
            r = log_prob - ref_log_prob[b]
            charged = c.kl_coef * in_loss * ratio * ((-r).exp() - 1 + r)  # coef w k3
            loss = -response_mean(gain - charged, mask[b])
            adam.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), c.optim_max_grad_norm)
            adam.step()
            terms = (-response_mean(gain, mask[b]), response_mean(charged, mask[b]), norm)
            measured.append([float(x.detach()) for x in terms])
    with torch.no_grad():
        kl_old = kl(old, next_tokens(c, model, tokens, real, width))
    names = ("loss/objective", "loss/kl_ref", "learner/grad_norm")
    row = dict(zip(names, np.mean(measured, 0).tolist(), strict=True))
    means = {"kl/ref/k1": k1, "kl/ref/exact": kl(old, ref), "kl/old/exact": kl_old}
    return row | {name: float(x[mask].mean()) for name, x in means.items()}
