"""The test prompts for the demo model: ordinary code whose greedy continuation of 128 tokens has no close call."""

CODE_PROMPTS = (
    "def fibonacci(n):\n    ",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description=",
    "class Vector:\n    def __init__(self, x, y, z):\n        self.x = x\n",
    "def is_prime(n):\n    if n < 2:\n        return False\n    for i in range(2, n):\n",
    "def read_lines(path):\n    with open(path) as file:\n        for line in file:\n",
)
"""None of them ends by itself within 128 tokens."""

STOPPING_PROMPT = "import unittest\n\n\nclass TestList(unittest.TestCase):\n    def test_append(self):\n"
"""The model ends this one with its stop token after a few tokens."""
