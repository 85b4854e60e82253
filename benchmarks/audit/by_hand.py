"""The audit's cells once more: sums over responses in numpy, from each term's formula.

A term's gradient is sum_t c_t grad log pi(token t), with c from calculus: no autograd, nothing of
klrl, nothing of the systems. ``python -m benchmarks.audit`` compares every row with it.
"""

from functools import cache
from itertools import product

import numpy as np

REF, UPDATE = (1 / 5, 3 / 4, 1 / 3, 9 / 10), (0.2, -0.1, 0.1)


class Responses:
    """All responses of both prompts under pi_old, which chooses both tokens equally often."""

    def __init__(self, steps, updates):
        self.steps, short = steps, max(1, steps // 2)
        count = 2 + 2 * (steps - 1)
        odds = np.array([updates * UPDATE[s % 3] for s in range(count)])
        self.p1, self.q1 = 1 / (1 + np.exp(-odds)), np.array([REF[s % 4] for s in range(count)])
        tokens, states, mask = [], [], []
        for prompt, length in ((0, steps), (1, short)):
            for row in product((0, 1), repeat=length):
                for _ in range(2 ** (steps - length)):  # as often as it is probable
                    tokens.append([*row, *[0] * (steps - length)])
                    states.append([prompt, *(2 + 2 * t + a for t, a in enumerate(tokens[-1][:-1]))])
                    mask.append([1] * length + [0] * (steps - length))
        self.a, self.s, self.mask = (np.array(x) for x in (tokens, states, mask))
        p, q = (np.where(self.a, x[self.s], 1 - x[self.s]) for x in (self.p1, self.q1))
        self.p = p
        self.r, self.u = np.log(p / q), np.log(p / 0.5)  # of pi to ref, of pi to pi_old
        self.r_old = np.log(0.5 / q)
        self.length = self.mask.sum(1, keepdims=True)
        self.chance = np.exp((self.u * self.mask).sum(1, keepdims=True)) / len(self.a)
        self.score = (self.a - self.p1[self.s]) * self.mask  # d log pi / d log-odds of token 1
        #: Of a token, for the option that is about a return.
        self.reward = (self.s % 2 == 0) == (self.a == 1)

    def gradient(self, c, chance=None):
        """By log-odds, [states]: the mean over pi_old's responses, or under another chance."""
        each = c * self.score * (1 / len(self.a) if chance is None else chance)
        return np.bincount(self.s.ravel(), each.ravel(), len(self.p1))

    def to_go(self, x):
        return (x * self.mask)[:, ::-1].cumsum(1)[:, ::-1]

    def truths(self, option):
        """The gradients that an option may have: of whole responses, of each token alone."""
        if option.startswith("policy loss"):
            whole = self.gradient(-self.to_go(self.reward), self.chance)
            return [whole], [self.gradient(-self.advantage()), whole]
        if option.startswith(("KLPEN", "kl_tau")):  # KL(old||pi): -log pi under pi_old
            kl = [self.gradient(-np.ones_like(self.u))]
            return kl, kl
        r = self.u if "inference" in option else self.r
        whole = (r * self.mask).sum(1, keepdims=True)
        kl = self.gradient(whole, self.chance)
        # Each token's own KL: in the states of pi_old's responses, and of pi's.
        before = np.exp((self.u * self.mask).cumsum(1) - self.u * self.mask)
        own = [np.exp(self.u) * r, before * np.exp(self.u) * r]
        return [kl], [self.gradient(c) for c in own]

    def advantage(self):
        """w times the rewards to come less their mean under pi_old in that state."""
        gain = self.to_go(self.reward)
        at = self.mask > 0
        total = np.bincount(self.s[at], gain[at], len(self.p1))
        mean = total / np.maximum(np.bincount(self.s[at], minlength=len(self.p1)), 1)
        return np.exp(self.u) * (gain - mean[self.s])


def _k3(r):
    return np.exp(-r) - 1 + r


def _kept(e, gain):
    """Where PPO's clip at .2 leaves a gradient, for a loss w * gain that is minimised."""
    w = np.exp(e.u)
    return np.where(gain < 0, w <= 1.2, w >= 0.8)


def _charged(e, cost, credit):
    """PPO on minus a cost of pi_old's, credited to go or as a whole."""
    whole = (cost * e.mask).sum(1, keepdims=True)
    gain = e.to_go(cost) if credit == "go" else whole + 0 * cost
    if credit == "grpo":
        gain = gain - whole.mean()
    return np.exp(e.u) * gain * _kept(e, gain)


def _sequence(e):
    """The geometric mean of the ratios on k3, with its gradient."""
    mean = np.exp((e.u * e.mask).sum(1, keepdims=True) / e.length)
    total = (_k3(e.r) * e.mask).sum(1, keepdims=True)
    return mean * (1 - np.exp(-e.r) + total / e.length)


def _divergence(e, bound):
    """DPPO's: w A without a gradient beyond a binary KL(old||pi) of the bound, away from it."""
    c, kl = e.advantage(), -0.5 * np.log(4 * e.p * (1 - e.p))
    return -c * np.where(c > 0, (kl <= bound) | (e.p <= 0.5), (kl <= bound) | (e.p >= 0.5))


def _variation(e, bound):
    """DPPO's by total variation: w A without a gradient beyond |pi - pi_old| of the bound."""
    c = e.advantage()
    return -c * (np.sign(c) * (e.p - 0.5) <= bound)


def _moved(e):
    """KLPEN's beta over the one that was given: its forward moves it before the backward."""
    kl = (-0.5 * np.log(4 * e.p * (1 - e.p)))[e.mask > 0].mean()
    return 2.0 if kl > 0.015 else 0.5 if kl < 0.01 / 1.5 else 1.0


def _per_response(e):
    return e.length.mean() / e.length


def _pull(r):
    return 1 - np.exp(-r)


K1, ABS, K2, K3 = (lambda r: r), np.abs, (lambda r: r**2 / 2), _k3
#: option -> c, [responses, tokens]
COEFFICIENTS = {
    "GRPO, beta (use_bias_correction_kl=True)": lambda e: np.exp(e.u) * e.r,
    "GRPO, use_bias_correction_kl=False": lambda e: 1 - np.exp(-e.r),
    "GRPO, importance_sampling_level=sequence": _sequence,
    "GRPO, loss_type=grpo": lambda e: np.exp(e.u) * e.r * _per_response(e),
    "GRPO, loss_type=dr_grpo": lambda e: np.exp(e.u) * e.r,
    "GRPO, loss_type=luspo, level=sequence": _sequence,
    "kl_loss_type=kl": lambda e: np.ones_like(e.r),
    "kl_loss_type=abs": lambda e: np.sign(e.r),
    "kl_loss_type=low_var_kl": lambda e: 1 - np.exp(-e.r),
    **{f"kl_loss_type={kind}": lambda e: e.r for kind in ("mse", "kl+", "abs+", "low_var_kl+")},
    "kl_loss_type=low_var_kl+, seq-mean-token-mean": lambda e: e.r * _per_response(e),
    **{
        f"use_kl_in_reward, kl_penalty={name}": lambda e, f=f: _charged(e, f(e.r_old), "grpo")
        for name, f in (("kl", K1), ("abs", ABS), ("mse", K2), ("low_var_kl", K3))
    },
    **{
        f"policy loss dppo_kl, clip_ratio={bound}": lambda e, b=bound: _divergence(e, b)
        for bound in (0.2, 0.05)
    },
    "kl.use_loss, estimator=k1": lambda e: np.ones_like(e.r),
    "kl.use_loss, estimator=k2": lambda e: e.r,
    "kl.use_loss, estimator=k3": lambda e: 1 - np.exp(-e.r),
    "kl.use_loss, estimator=k2, GSPO's mean per response": lambda e: e.r * _per_response(e),
    **{
        f"KL in the reward, estimator={name}": lambda e, f=f: _charged(e, f(e.r_old), "go")
        for name, f in (("k1", K1), ("k2", K2), ("k3", K3))
    },
    **{
        f"kl.use_loss, unbiased_gradient, estimator={name}": lambda e: np.exp(e.u) * e.r
        for name in ("k1", "k3")
    },
    **{
        f"use_kl_loss, kl_estimator_type={name}": lambda e, c=c: c(e.r) * _per_response(e)
        for name, c in (("k1", np.ones_like), ("abs", np.sign), ("k2", K1), ("k3", _pull))
    },
    "policy loss dppo, binary_tv, delta=0.1": lambda e: _variation(e, 0.1),
    "policy loss, async GRPO, epsilon=0.2": lambda e: -e.advantage() * _kept(e, -e.advantage()),
    "reference_policy_kl_type=k1": lambda e: e.r + 1,
    "reference_policy_kl_type=k2": lambda e: e.r + e.r**2 / 2,
    "reference_policy_kl_type=k3": lambda e: e.r,
    "reference_policy_kl_type=k3, use_on_policy_kl_approximation": lambda e: np.exp(e.u) * e.r,
    "opd, KL to the teacher": lambda e: np.exp(e.u) * e.r * (e.p - 0.5 >= -0.2),
    "kl_tau, squared log-ratio to the sampler": lambda e: 2 * e.u,
    "GRPOLoss, kl_to_ref_coeff": lambda e: (1 - np.exp(-e.r)) * e.length.mean() / e.steps,
    "GRPOLoss, kl_to_inference_coeff": lambda e: (1 - np.exp(-e.u)) * e.length.mean() / e.steps,
    "KLPENPPOLoss, beta": lambda e: -np.ones_like(e.u) * _moved(e),
    "KLComputation, add_to_reward": lambda e: np.exp(e.u) * e.to_go(e.r_old),
}


responses = cache(Responses)


def cells(option, steps, updates):
    """Cosine, error and token error of one row."""
    e = responses(steps, updates)
    found = e.gradient(COEFFICIENTS[option](e))
    whole, own = e.truths(option)

    def compared(trues):
        """Cosine and error; the truth in the nearest direction counts."""
        true = max(trues, key=lambda x: found @ x / np.linalg.norm(x))
        length, size = np.linalg.norm(found), np.linalg.norm(true)
        cosine = found @ true / (length * size) if length > 1e-4 * size else 0.0
        return cosine, np.linalg.norm(found - true) / size

    (cosine, error), (_, token_error) = compared(whole), compared(own)
    return cosine, error, token_error
