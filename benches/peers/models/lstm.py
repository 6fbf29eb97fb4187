"""examples/lstm.rs in PyTorch: an LSTM that forecasts how far a price will move."""

import argparse
import csv
import json
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

MINUTES, WINDOW, WIDTH, BATCH, UPDATES = 15, 48, 32, 32, 300


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, values):
        return self.head(self.lstm(values.unsqueeze(-1))[0]).squeeze(-1)


def ranges(path):
    """Reads the logarithms of the ranges. The first four fifths have mean 0 and deviation 1."""
    with open(path, newline="") as file:
        bars = np.array([(float(row["high"]), float(row["low"])) for row in csv.DictReader(file)])
    bars = bars[: len(bars) // MINUTES * MINUTES].reshape(-1, MINUTES, 2)
    high, low = bars[..., 0].max(1), bars[..., 1].min(1)
    values = np.log(np.maximum(high / low - 1, 1e-5))
    known = values[: len(values) // 5 * 4]
    return torch.tensor((values - known.mean()) / known.std(), dtype=torch.float32)


def windows(values, starts):
    """Returns the windows that begin at these values, and the value after each of theirs."""
    places = starts.unsqueeze(1) + torch.arange(WINDOW)
    return values[places], values[places + 1]


def plot(values):
    """Draws values from -2 to 2 as bars."""
    return "".join("▁▂▃▄▅▆▇█"[int(min(max((value + 2) * 2, 0), 7))] for value in values.tolist())


parser = argparse.ArgumentParser()
parser.add_argument("bars", help="file of one-minute bars")
values = ranges(parser.parse_args().bars)
training, held_out = values.tensor_split([len(values) // 5 * 4])

torch.manual_seed(7)
model = Forecaster()
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
started = time.perf_counter()
for _ in range(UPDATES):
    x, y = windows(training, torch.randint(len(training) - WINDOW, (BATCH,)))
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
seconds = time.perf_counter() - started

x, y = windows(held_out, torch.arange(0, len(held_out) - WINDOW, WINDOW))
with torch.no_grad():
    forecast = model(x)
guesses = forecast, x, torch.zeros_like(y)
error, last, constant = (F.mse_loss(guess, y).item() for guess in guesses)
print(
    f"held out, mean squared error: LSTM {error:.3f}, the last value {last:.3f}, "
    f"the mean {constant:.3f}"
)
print(f"ranges   {plot(y[0])}\nforecast {plot(forecast[0])}")
result = [error, last, constant]
print(json.dumps({"example": "lstm", "framework": "PyTorch", "seconds": seconds, "result": result}))
sys.exit(error >= min(last, constant))
