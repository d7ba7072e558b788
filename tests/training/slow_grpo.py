"""GRPO, slowly: one completion at a time through the library's own module in float64, straight from DeepSeekMath's eq. 3 and 4
(arXiv 2402.03300). And the small things that tests of the learner need: groups made by hand, and a learner over a tiny model."""

import copy
import random
import statistics
from dataclasses import replace

import torch

from groupwise.config.schema import Config
from groupwise.models.load import Policy
from groupwise.models.scorer import make_scorer
from groupwise.training.learner import Learner
from groupwise.types import Completion, Group, Problem, Prompt, Turn

END = 2


def config_of(**sections):
    """A fp32 config on the CPU; ``config_of(algorithm={...}, optimizer={...})``."""
    sections.setdefault("model", {}).setdefault("dtype", "float32")
    sections.setdefault("algorithm", {}).setdefault("kl", None)
    return Config(**sections)


def learner_of(model, config):
    """A learner over ``model`` (which it takes over), and a float64 copy of the model as it was."""
    before = copy.deepcopy(model).double()
    policy = Policy(model, tokenizer=None, end_token_ids=(END,), context_length=256, name="tiny")
    return Learner(make_scorer(policy, config.model), config), before


def slow_logprobs(model, prompt_ids, completion_ids, temperature=1.0):
    """``[T]`` for one completion, unpadded and alone in its batch."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(completion_ids)), ids[0, len(prompt_ids) :]]


def slow_episode(model, prompt_ids, completion, temperature=1.0):
    """``slow_logprobs`` of an episode's tokens: where its history was rewritten, that is the prompt of what follows, which has 0."""
    found, pieces, at = [], [[tuple(prompt_ids), ()]], 0
    for turn in completion.turns:
        ids, at = completion.token_ids[at : at + turn.tokens], at + turn.tokens
        if turn.rewritten:
            pieces.append([ids, ()])
        else:
            pieces[-1][1] += ids
    for number, (before, after) in enumerate(pieces):
        found += [torch.zeros(len(before), dtype=torch.float64)] * (number > 0)
        found += [slow_logprobs(model, before, after, temperature)] * bool(after)
    return torch.cat(found)


def make_groups(model, rewards, seed=0, vocabulary=128, longest=9, temperature=1.0):
    """One group for each list of rewards, of random tokens; logprobs are ``model``'s, so the groups are as if it had sampled."""
    rng = random.Random(seed)
    groups = []
    for index, group_rewards in enumerate(rewards):
        prompt_ids = tuple(rng.randrange(3, vocabulary) for _ in range(rng.randrange(3, 12)))
        prompt = Prompt(Problem(id=f"p{index}", question="?", answer="1"), "?", prompt_ids)
        completions = []
        for sample in range(len(group_rewards)):
            ids = tuple(rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, longest)))
            ids = (*ids, END) if rng.random() < 0.7 else ids
            with torch.no_grad():
                logprobs = tuple(slow_logprobs(model, prompt_ids, ids, temperature).tolist())
            completions.append(
                Completion("", ids, logprobs, "stop" if ids[-1] == END else "length", sample, temperature=temperature)
            )
        groups.append(Group(prompt, tuple(completions), tuple(group_rewards), {}))
    return groups


def divided_in_turns(groups, seed=0):
    """The same tokens as episodes: what the policy sampled and what it was given take turns, at random places. Half of the completions end
    with what was given, and some have one turn alone. Given tokens have the log-probability 0."""
    rng = random.Random(seed)

    def divided(completion):
        left, turns = len(completion.token_ids), []
        while left:
            size = rng.randint(1, left)
            turns.append(Turn("tool" if len(turns) % 2 else "assistant", "", size))
            left -= size
        episode = replace(completion, turns=tuple(turns))
        own = zip(episode.sampled, completion.logprobs, strict=True)
        return replace(episode, logprobs=tuple(x if sampled else 0.0 for sampled, x in own))

    return [replace(group, completions=tuple(map(divided, group.completions))) for group in groups]


def forked(groups, model, seed=0):
    """The same tokens as episodes that fork: of what the policy is given between its turns, most is a rewritten history.
    Log-probabilities are ``model``'s again."""
    rng = random.Random(seed)

    def one(prompt, completion):
        turns = tuple(replace(turn, rewritten=not turn.sampled and rng.random() < 0.7) for turn in completion.turns)
        episode = replace(completion, turns=turns)
        with torch.no_grad():
            own = zip(slow_episode(model, prompt.token_ids, episode, episode.temperature).tolist(), episode.sampled, strict=True)
        return replace(episode, logprobs=tuple(x if sampled else 0.0 for x, sampled in own))

    return [replace(g, completions=tuple(one(g.prompt, c) for c in g.completions)) for g in divided_in_turns(groups, seed)]


def slow_advantages(rewards, epsilon=1e-4):
    mean = sum(rewards) / len(rewards)
    return [(r - mean) / (statistics.stdev(rewards) + epsilon) for r in rewards]


def slow_loss(model, groups, *, old=None, reference=None, beta=0.0, epsilon=0.2, temperature=1.0):
    """-(1/N) sum_i (1/|o_i|) sum_t { min(ratio A, clip(ratio) A) - beta k3 }, and the share of tokens that the clip cuts off: over the
    tokens that the policy sampled."""
    count = sum(len(group.completions) for group in groups)
    loss, cut, tokens = 0.0, 0, 0
    for group in groups:
        for completion, advantage in zip(group.completions, slow_advantages(group.rewards), strict=True):
            ids = group.prompt.token_ids, completion.token_ids
            new = slow_logprobs(model, *ids, temperature)
            with torch.no_grad():
                before = new if old is None else slow_logprobs(old, *ids, temperature)
            own = [t for t in range(len(new)) if completion.sampled[t]]
            for t in own:
                ratio = torch.exp(new[t] - before[t].detach())
                free, bound = ratio * advantage, torch.clamp(ratio, 1 - epsilon, 1 + epsilon) * advantage
                term = torch.min(free, bound)
                cut += int(bound < free)
                tokens += 1
                if beta:
                    with torch.no_grad():
                        anchor = slow_logprobs(reference, *ids, temperature)[t]
                    log_ratio = anchor - new[t]
                    term = term - beta * (torch.exp(log_ratio) - log_ratio - 1)
                loss = loss - term / (len(own) * count)
    return loss, cut / tokens


def slow_gradient(loss, model):
    """The gradient of a slow loss by the module's parameter names."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def present_model(learner, like):
    """A float64 copy of the policy as it is now; ``like`` is any float64 copy of the same architecture."""
    model = copy.deepcopy(like)
    model.load_state_dict(learner.scorer.module.state_dict())
    return model


def watch_gradients(learner):
    """Every optimiser step's gradient, by the module's parameter names, before clipping; and the policy's weights then."""
    seen, step = [], learner.optimizer.step

    def watched(rate):
        seen.append(by_module_name(learner.scorer))
        return step(rate)

    learner.optimizer.step = watched
    return seen


def by_module_name(scorer):
    """The fused gradients, cut back into the module's own parameters, which are views of the fused ones; of what has any."""
    fused = {p.untyped_storage().data_ptr(): p for _, p in scorer.named_parameters()}
    found = {}
    for name, parameter in scorer.module.named_parameters():
        owner = fused[parameter.untyped_storage().data_ptr()]
        if owner.grad is None:
            continue
        first = parameter.storage_offset() // parameter.stride(0)
        found[name] = owner.grad[first : first + len(parameter)].clone()
    return found


def distance(one, other):
    """Norm of the difference relative to the second's norm, over all parameters."""
    assert one.keys() == other.keys()
    flat = [torch.cat([g[name].double().flatten() for name in sorted(g)]) for g in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())
