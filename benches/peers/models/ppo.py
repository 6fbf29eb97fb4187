"""examples/ppo.rs in PyTorch: proximal policy optimization that learns to balance a pole."""

import json
import sys
import time
from collections import deque

import torch
from torch import nn
from torch.distributions import Categorical

CARTS, STEPS, ROUNDS, BATCH, PASSES, LONGEST = 16, 128, 60, 256, 6, 500
DISCOUNT, DECAY = 0.99, 0.95
# The most that can be gained, which is the unit of the policy's values.
MOST = 1 / (1 - DISCOUNT)


class Carts:
    """Carts with poles: place and speed, and the pole's angle and its speed."""

    def __init__(self):
        self.states, self.steps = self.new(CARTS), torch.zeros(CARTS)

    @staticmethod
    def new(count):
        return 0.1 * (torch.rand(count, 4) - 0.5)

    def push(self, right):
        """Pushes for 20 ms. Returns the episodes that end, whose carts start anew."""
        place, speed, angle, turn = self.states.unbind(1)
        push = (torch.where(right, 10.0, -10.0) + 0.05 * turn**2 * angle.sin()) / 1.1
        turning = 9.8 * angle.sin() - angle.cos() * push
        turning = turning / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        moving = push - 0.05 * turning * angle.cos() / 1.1
        self.states = self.states + 0.02 * torch.stack([speed, moving, turn, turning], 1)
        self.steps = self.steps + 1
        place, _, angle, _ = self.states.unbind(1)
        ended = (place.abs() > 2.4) | (angle.abs() > 0.2095) | (self.steps == LONGEST)
        lengths.extend(self.steps[ended].tolist())
        self.states[ended], self.steps[ended] = self.new(int(ended.sum())), 0.0
        return ended


@torch.no_grad()
def play():
    """Returns states, actions, log-probabilities, advantages and gains of a round's steps."""
    rows, values = [], []
    for _ in range(STEPS):
        states = carts.states
        logits, value = policy(states).split([2, 1], 1)
        choice = Categorical(logits=logits)
        action = choice.sample()
        rows.append((states, action, choice.log_prob(action), carts.push(action == 1)))
        values.append(MOST * value.squeeze(1))
    values.append(MOST * policy(carts.states)[:, 2])
    states, actions, before, ended = (torch.stack(column) for column in zip(*rows))
    values, goes_on = torch.stack(values), DISCOUNT * (~ended).float()
    advantages, later = torch.empty(STEPS, CARTS), torch.zeros(CARTS)
    for at in reversed(range(STEPS)):
        later = 1 + goes_on[at] * (values[at + 1] + DECAY * later) - values[at]
        advantages[at] = later
    gains = advantages + values[:-1]
    advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    return [column.flatten(0, 1) for column in (states, actions, before, advantages, gains)]


def loss_of(states, actions, before, advantages, gains):
    logits, value = policy(states).split([2, 1], 1)
    choice = Categorical(logits=logits)
    ratio = (choice.log_prob(actions) - before).exp()
    better = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    error = (value.squeeze(1) - gains / MOST).square().mean()
    return 0.5 * error - better - 0.01 * choice.entropy().mean()


torch.manual_seed(7)
policy = nn.Sequential(
    nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
)
optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, weight_decay=0)
lengths = deque(maxlen=20)
carts = Carts()
started = time.perf_counter()
for round in range(ROUNDS):
    steps = play()
    for _ in range(PASSES):
        for part in torch.randperm(STEPS * CARTS).split(BATCH):
            loss = loss_of(*(column[part] for column in steps))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    mean = sum(lengths) / max(len(lengths), 1)
    if round % 5 == 4:
        print(f"round {round + 1:2}: episodes of {mean:.0f} steps")
seconds = time.perf_counter() - started
print(json.dumps({"example": "ppo", "framework": "PyTorch", "seconds": seconds, "result": mean}))
sys.exit(mean < 400)
