"""From logits to tokens: processing, the verifiers, log probabilities, constraints and the reduced draft vocabulary."""
