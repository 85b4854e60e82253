"""The KL of distillation from k tokens against the exact one: docs/results/topk.

python -m benchmarks.topk    # trains three teachers where they are missing, measures, writes
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.peers.common import versions
from benchmarks.results import ROOT, commit, cpu_name, machine
from klrl.api import load_run, run
from klrl.language.data.batch import response_mask
from klrl.language.data.tasks import make_task
from klrl.language.model.causal_lm import head
from klrl.language.model.plain import packed_states
from klrl.language.run.load import Policy, language_config, make_policy, trained_policy
from klrl.language.run.rollout import decoding_of, make_sampler, respond
from klrl.runs.curves import COLOURS

PAGE, RUNS = ROOT / "docs" / "results" / "topk", Path("outputs/results/topk")
WORDS = (
    *("experiment=smollm", "threads=1", "logger=none", "eval.every=0", "eval.final=0", "seed=0"),
    *("controller=fixed", "kl.coef=0.03", "collector.prompts=4"),
)
#: Two, five and four iterations; the last may move twenty times as far in each.
TEACHERS = {
    "near": ("frames=64", "optim.lr=5e-5"),
    "middle": ("frames=160", "optim.lr=5e-5"),
    "far": ("frames=128", "optim.lr=2e-4", "loss.dtarg=0.1"),
}
CONTEXTS, PROMPTS, TOGETHER = 512, 48, 64
KS = tuple(4**n for n in range(7))
FORMS = ("truncated", "renormalised", "bucket", "k1", "k3")
SAMPLED = ("k1", "k3")
#: A tail is at least this: below, a double has no digits of 1 - sum.
TINY = 1e-15
Row = dict[str, str | int | float]


def estimate(form: str, a: Tensor, b: Tensor) -> Tensor:
    """KL(a||b) in nats [n], from log-probs of k tokens [n, k]; of k1 and k3, drawn from a.

    truncated: the terms that are there, whose sum may be negative. renormalised: of the two
    distributions given that the token is one of the k. bucket: all other tokens count as one; by
    the log-sum inequality at most the exact KL. k1, k3: Schulman 2020.
    """
    if form in SAMPLED:
        r = a - b
        return (r if form == "k1" else (-r).exp() - 1 + r).mean(-1)
    if form == "renormalised":
        a, b = a.log_softmax(-1), b.log_softmax(-1)
    value = (a.exp() * (a - b)).sum(-1)
    if form == "bucket":
        tail, other = ((1 - x.exp().sum(-1)).clamp_min(TINY) for x in (a, b))
        value = value + tail * (tail / other).log()
    return value


def measure(
    student: Tensor, teacher: Tensor, reverse: bool, draws: torch.Generator
) -> Iterator[tuple[tuple[str, str, int], Tensor]]:
    """(form, whose tokens, k), and [5, n]: value, exact KL, of the gradients <g, e>, |g|^2, |e|^2.

    From log-probs [n, V]. A gradient is that with respect to the student's logits u over the
    temperature: d log p_i / du = 1_i - p, so slopes g_i of k log-probs come to g - p sum(g).
    """
    p, a, b = student.exp(), *((student, teacher) if reverse else (teacher, student))
    exact = (a.exp() * (a - b)).sum(-1)
    slope = p * (a - b - exact[:, None]) if reverse else p - teacher.exp()
    squared = [(one * two).sum(-1) for one, two in ((p, p), (p, slope), (slope, slope))]
    drawn = torch.multinomial(a.exp(), KS[-1], replacement=True, generator=draws)
    sets = [("teacher", teacher.topk(min(KS[-1], p.shape[1])).indices)]
    sets += [("student", student.topk(min(KS[-1], p.shape[1])).indices), ("drawn", drawn)]
    for form, (of, whose), k in ((f, s, k) for f in FORMS for s in sets for k in KS):
        if (form in SAMPLED) != (of == "drawn"):
            continue
        tokens = whose[:, :k]
        x, y = student.gather(1, tokens).requires_grad_(), teacher.gather(1, tokens)
        value = estimate(form, *((x, y) if reverse else (y, x)))
        # In the loss, k1 of own samples has no gradient; as a reward (score function) it has.
        score = form == "k1" and reverse
        (g,) = torch.autograd.grad(
            ((x - y).detach() * x).mean(-1).sum() if score else value.sum(), x
        )
        # The gradient is h - p sum(h), h: the slopes at their tokens, where some are drawn twice.
        h = torch.zeros_like(p).scatter_add_(1, tokens, g) if form in SAMPLED else g
        total, of_p = g.sum(-1), (g * p.gather(1, tokens)).sum(-1)
        own = h.square().sum(-1) - 2 * total * of_p + total**2 * squared[0]
        dot = (g * slope.gather(1, tokens)).sum(-1) - total * squared[1]
        yield (form, of, k), torch.stack([value.detach(), exact, dot, own, squared[2]])


def summary(found: Tensor) -> dict[str, float]:
    """Of [5, contexts]: means; the mean cosine, and that of the whole table of gradients [n, V]."""
    value, exact, dot, own, of_exact = found
    cosine = dot / (own * of_exact).sqrt().clamp_min(1e-300)
    whole = dot.sum() / (own.sum() * of_exact.sum()).sqrt().clamp_min(1e-300)
    means = {"exact": exact.mean(), "value": value.mean(), "cosine": cosine.mean()}
    means |= {"cosine_all": whole, "negative": (value < 0).double().mean()}
    return {name: each.item() for name, each in means.items()}


@torch.no_grad()
def states() -> tuple[list[tuple[Tensor, Policy]], float]:
    """Of student and teachers in the contexts of the student's responses [512, D]; temperature."""
    config = language_config(RUNS / "near")
    student = make_policy(config, say=lambda _: None)
    prompts = make_task(config.env, seed=0).stream(student.causal.tokenizer, None, "eval")
    draws = torch.Generator().manual_seed(0)
    batch = respond(make_sampler(student), prompts.take(PROMPTS), 1, decoding_of(config), draws)
    real, found = response_mask(batch), []
    assert real.sum() >= CONTEXTS
    for policy in (student, *(trained_policy(RUNS / name) for name in TEACHERS)):
        found.append((packed_states(policy.model, batch)[real][:CONTEXTS], policy))
    return found, config.collector.temperature


def rows() -> Iterator[Row]:
    (student, *teachers), temperature = states()

    @torch.no_grad()
    def log_probs(of: tuple[Tensor, Policy], start: int) -> Tensor:
        logits = head(of[1].model)(of[0][start : start + TOGETHER])
        return (logits.double() / temperature).log_softmax(-1)

    for name, teacher in zip(TEACHERS, teachers, strict=True):
        for kl in ("reverse", "forward"):
            draws, parts = (
                torch.Generator().manual_seed(1),
                dict[tuple[str, str, int], list[Tensor]](),
            )
            for start in range(0, CONTEXTS, TOGETHER):
                pair = log_probs(student, start), log_probs(teacher, start)
                for key, found in measure(*pair, kl == "reverse", draws):
                    parts.setdefault(key, []).append(found)
            for (form, of, k), each in parts.items():
                about: Row = {"teacher": name, "kl": kl, "form": form, "of": of, "k": k}
                yield about | summary(torch.cat(each, 1))


def draw(found: Sequence[Row], path: Path) -> None:
    """Draw value and gradient against k: of the reverse KL, with the teacher's tokens."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    for (top, below), teacher in zip(figure.subplots(2, len(TEACHERS)).T, TEACHERS, strict=True):
        for form, colour in zip(FORMS, COLOURS, strict=False):
            line = [r for r in found if (r["teacher"], r["form"]) == (teacher, form)]
            line = [r for r in line if r["kl"] == "reverse" and r["of"] != "student"]
            k = [r["k"] for r in line]
            values = [float(r["value"]) / float(r["exact"]) for r in line]
            top.plot(k, values, "o-", ms=4, color=colour, label=form)
            below.plot(k, [r["cosine"] for r in line], "o-", ms=4, color=colour)
        title = f"KL(student||teacher) {float(line[0]['exact']):.3f} nats"
        top.set(title=title, xscale="log", ylim=(-0.6, 2.1), ylabel="value / exact")
        below.set(xscale="log", ylim=(-0.05, 1.05), xlabel="k", ylabel="cosine of the gradient")
    handles = top.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(FORMS), frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    torch.set_num_threads(1)
    for name, words in TEACHERS.items():
        if not (RUNS / name / "manifest.json").exists():
            run(*WORDS, *words, folder=RUNS / name)
    found = list(rows())
    with (PAGE / "figures.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        rounded = (
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in found
        )
        writer.writerows(rounded)
    draw(found, PAGE / "topk.png")
    runs = [load_run(RUNS / name) for name in TEACHERS]
    seconds = sum(row.get("time/iteration", 0) for run in runs for row in run.rows)
    about = {"number": 10, "title": "The KL of distillation from k tokens, against the exact one"}
    about |= {"runs": len(runs), "seconds": round(seconds), "versions": versions()}
    about |= {"machine": {"cpu": cpu_name(), "name": machine()}, "commit": commit()}
    (PAGE / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
